"""Section `train`: horizon, batch, precision, compilation, kernels."""

import math
import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, field_validator, model_validator

from foundling.config.base import Section, parse_number
from foundling.config.data import MAX_SEQ_LEN
from foundling.config.errors import ConfigError
from foundling.config.parallel import AUTO

ParamCount = Literal["all", "no-input-embedding", "no-positions", "matrices-and-head"]
Compile = Literal["auto", "off", "blocks", "model", "graphs"]
Attention = Literal[
    "auto", "torch", "cudnn", "band", "flash", "flash3", "flash4", "flex", "efficient", "math"
]


_MAX_THREADS = 1024
"""Largest train.threads; with 100,000 no thread starts."""


HorizonUnit = Literal["steps", "tokens", "epochs", "tokens/param", "flops", "hours", "dollars"]
_UNITS: dict[HorizonUnit, tuple[str, ...]] = {
    "steps": ("steps", "step", ""),
    "tokens": ("tokens", "token"),
    "epochs": ("epochs", "epoch"),
    "tokens/param": ("tokens/param", "tokens/parameter"),
    "flops": ("flops", "flop"),
    "hours": ("hours", "hour"),
    "dollars": ("dollars", "dollar"),
}
"""Of a horizon, as people write them; a bare number is steps."""
_WHOLE = ("steps", "tokens")
_HORIZON = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d+)?(?:[KMBT]|[kmbt](?= |$))?) ?([a-z/]*)")


class KernelsConfig(Section):
    """How a step's parts are computed. What was measured at a run's start is recorded here."""

    section_name: ClassVar[str] = "train.kernels"

    attention: Attention = "auto"
    """Of plain causal layers; auto launches the kernels there are and takes the fastest."""
    attention_masked: Attention = "auto"
    """The same where documents or windows are masked."""
    mlp: Literal["auto", "plain", "fused"] = "auto"
    """Squared ReLU in a pass of its own (plain) or inside its products (fused: bf16, Hopper and
    newer); auto launches both. Nothing for other activations."""
    loss: Literal["auto", "fused", "plain", "torch", "liger"] = "fused"
    """The head's cross-entropy: fused (in chunks, the logits are never whole), or for comparison
    plain (full logits), torch (its linear_cross_entropy, where it has one) or liger (extra: liger);
    auto launches all but plain."""


class TrainConfig(Section):
    """How long, how much at a time, and on what."""

    section_name: ClassVar[str] = "train"

    start: str = ""
    """Run, checkpoint or model from elsewhere that this run starts from; empty: fresh weights."""
    start_with: Literal["weights", "everything"] = "weights"
    """What is taken from train.start: weights, from step 0 on; or everything (optimizer, data
    position and ledger), which goes on from RUN@STEP with other settings (`train --from`)."""
    horizon: str = ""
    """How long to train: 20B tokens, 3 epochs (of the mixture), 20 tokens/param, 1e19 flops,
    8 hours or 40 dollars (on the hardware that --gpu names), or a number of steps."""
    param_count: ParamCount = "no-input-embedding"
    """Which count of parameters a horizon in tokens/param or flops uses."""
    seq_len: Annotated[int, Field(gt=0, le=MAX_SEQ_LEN)] = 256
    """Tokens of input per row."""
    batch_size: NonNegativeInt = 8
    """Rows per process per micro-step; auto (0) takes the fastest that fits the planned GPU."""
    global_batch_tokens: NonNegativeInt = 0
    """Tokens per optimizer step over all processes; 0 means one micro-step of each process."""
    seed: int = 1
    """Seed of weights, data order and everything random."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to train; auto takes CUDA if it is there."""
    dtype: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Arithmetic of matrix products, with master weights in fp32; auto takes bf16 on CUDA (fp16 on
    cards without it) and fp32 elsewhere; bf16 on a CPU where a child process survives it. fp16
    scales its loss and takes a step again that overflows."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Matrix products of the blocks in float8 (extra: torchao), one scale a tensor or a row; the
    rest as train.dtype says."""
    float8_skip: tuple[str, ...] = ("head",)
    """float8: parts of the names of products that are left out: head (the logits), attn, ffn.down,
    layers.0. (with the dot, or layers.10 is out as well). Without head its logits are in float8
    too, and its gradients in bf16."""
    compile: Compile = "auto"
    """torch.compile: blocks (one graph for all blocks, in seconds), model (all blocks in one graph,
    in minutes), graphs (blocks, launched as CUDA graphs) or off. auto takes blocks on CUDA; on a
    CPU what is faster, if the run is long enough to measure it."""
    kernels: KernelsConfig = KernelsConfig()
    """How attention, attention_masked, mlp and loss are computed; auto launches what there is and
    takes the fastest, once a run."""
    deterministic: bool = False
    """Refuse kernels whose result may differ between two identical runs (CUDA)."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of log(sum(exp(logits)))^2 in the loss, which keeps logits from drifting; 0: none."""
    threads: Annotated[int, Field(ge=0, le=_MAX_THREADS)] = 0
    """CPU threads for torch; 0 means one per core."""
    stop_after: NonNegativeFloat = 0.0
    """Seconds after which the run saves and ends with exit code 75, to be started again; 0: never.
    SLURM's own limit is watched in any case."""

    @field_validator("horizon", mode="before")
    @classmethod
    def _read_horizon(cls, value: Any) -> str:
        """As it is kept: a number and its unit."""
        match = _HORIZON.fullmatch(" ".join(str(value).split()))
        unit = next((u for u in _UNITS if match and match[2] in _UNITS[u]), "")
        number = float(parse_number(match[1], float)) if match and unit else math.nan
        if value == "" or number == 0:
            return ""
        if not math.isfinite(number) or (unit in _WHOLE and not number.is_integer()):
            raise ConfigError(
                "train.horizon must be a number of steps, or such as 20B tokens, 3 epochs, 20"
                f" tokens/param, 1e19 flops, 8 hours or 40 dollars, not {str(value)!r}."
            )
        return f"{_short(number) if unit in _WHOLE else f'{number:.12g}'} {unit}"

    @field_validator("batch_size", mode="before")
    @classmethod
    def _read_auto(cls, value: Any) -> Any:
        return 0 if value == AUTO else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse settings that cannot work, or that have no effect with another one."""
        if self.float8 == "none":
            self.refuse_unused("float8_skip", "while train.float8 is none", "a kind of float8")
        elif self.dtype not in ("auto", "bf16"):
            raise ConfigError(
                f"train.float8 {self.float8} needs train.dtype bf16, and it is {self.dtype}; set"
                " train.dtype bf16 or train.float8 none."
            )
        if self.head_float8 and self.kernels.loss != "fused":
            raise ConfigError(
                "train.float8_skip without head needs train.kernels.loss fused, and it is"
                f" {self.kernels.loss}; use fused, or skip head."
            )
        if not self.start:
            self.refuse_unused("start_with", "without train.start", "train.start")
        return self

    @property
    def head_float8(self) -> Literal["tensorwise", "rowwise"] | None:
        """How logits are scaled into float8, where they are."""
        return self.float8 if self.float8 != "none" and "head" not in self.float8_skip else None

    def horizon_in(self, unit: HorizonUnit) -> float:
        """The number of the horizon where it is in this unit, else 0."""
        number, _, own = self.horizon.partition(" ")
        return float(parse_number(number, float)) if own == unit else 0.0

    @property
    def is_timed(self) -> bool:
        """Whether the horizon is hours or dollars, which only hardware turns into steps."""
        return bool(self.horizon_in("hours") or self.horizon_in("dollars"))

    @property
    def is_branch(self) -> bool:
        """Whether the run goes on with the whole state of another."""
        return self.start_with == "everything"

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled, as far as that is decided: auto is not on a CPU."""
        return self.compile in ("blocks", "model", "graphs")


FLOAT8_MULTIPLE = 16
"""Float8 products need sides that are multiples of this."""


def _short(number: float) -> str:
    """20B, 3.2M and 500K where that says all of a number."""
    for suffix, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size and number % (size // 100) == 0:
            return f"{number / size:.6g}{suffix}"
    return str(int(number) if number.is_integer() else number)
