"""Section `train`: horizon, batch, precision, compilation, kernels."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, field_validator, model_validator

from foundling.config.base import Section
from foundling.config.data import MOST_SEQ_LEN
from foundling.config.errors import ConfigError
from foundling.config.parallel import AUTO

ParamCount = Literal["all", "no-input-embedding", "no-positions", "matrices-and-head"]
Stage = Literal["pretrain", "finetune"]
Compile = Literal["auto", "off", "blocks", "model", "graphs"]
Attention = Literal[
    "auto", "torch", "cudnn", "band", "flash", "flash3", "flash4", "flex", "efficient", "math"
]


MOST_THREADS = 1024
"""Of one process; with a hundred thousand, no other thread can be started."""


class TrainConfig(Section):
    """How long, how much at a time, and on what."""

    where: ClassVar[str] = "train"

    stage: Stage = "pretrain"
    """pretrain: text, loss on every token; finetune: conversations, loss on the assistant's tokens
    (text may be mixed in against forgetting, and counts in full)."""
    init: str = ""
    """Run, checkpoint or model from elsewhere whose weights this run starts from; empty: fresh."""
    steps: NonNegativeInt = 0
    """Horizon in optimizer steps (exactly one horizon may be given; 0 is not this one)."""
    tokens: NonNegativeInt = 0
    """Horizon in tokens; accepts 20B, 3.5M."""
    epochs: NonNegativeFloat = 0.0
    """Horizon in passes over the mixture's tokens."""
    flops: NonNegativeFloat = 0.0
    """Horizon in floating-point operations of training."""
    tokens_per_param: NonNegativeFloat = 0.0
    """Horizon in tokens per parameter, of the count that param_count names."""
    hours: NonNegativeFloat = 0.0
    """Horizon in hours on the hardware that --gpu names (`foundling plan -o` makes it steps)."""
    dollars: NonNegativeFloat = 0.0
    """Horizon in dollars at that hardware's price, likewise."""
    param_count: ParamCount = "no-input-embedding"
    """Which count of parameters tokens_per_param and flops use."""
    seq_len: Annotated[int, Field(gt=0, le=MOST_SEQ_LEN)] = 256
    """Tokens of input per row."""
    batch_size: NonNegativeInt = 8
    """Rows per process per micro-step; auto (0) takes the fastest that fits the planned GPU."""
    global_batch_tokens: NonNegativeInt = 0
    """Tokens per optimizer step over all processes; 0 means one micro-step of each process."""
    seed: int = 1
    """Seed of initial weights, data order and everything random."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to train; auto takes CUDA if it is there."""
    dtype: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Arithmetic of matrix products, with master weights in fp32; auto takes bf16 on CUDA (fp16 on
    cards without it) and fp32 elsewhere; bf16 on a CPU where a child process survives it. fp16
    scales its loss and takes a step again that overflows."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Matrix products of the blocks in float8 (extra: torchao), one scale a tensor or a row; the
    rest as train.dtype says."""
    float8_skip: tuple[str, ...] = ()
    """float8: parts of the names of products that are left out: attn, ffn.down, layers.0. (with
    the dot, or layers.10 is out as well)."""
    float8_head: bool = False
    """float8: make the head's logits in float8 too; its gradients stay in bf16."""
    compile: Compile = "auto"
    """torch.compile: blocks (one graph for all blocks, in seconds), model (all blocks in one graph,
    in minutes), graphs (blocks, launched as CUDA graphs) or off. auto takes blocks on CUDA; on a
    CPU what is faster, if the run is long enough to measure it."""
    attention: Attention = "auto"
    """Attention kernel of plain causal layers; auto launches those there are and takes the
    fastest, once a run."""
    attention_masked: Attention = "auto"
    """The same where documents or windows are masked."""
    feed_forward: Literal["auto", "plain", "fused"] = "auto"
    """Squared ReLU in a pass of its own (plain) or inside its products (fused: bf16, Hopper and
    newer); auto launches both and takes the faster, once a run. Nothing for other activations."""
    deterministic: bool = False
    """Refuse kernels whose result may differ between two identical runs (CUDA)."""
    loss: Literal["auto", "fused", "plain", "torch", "liger"] = "fused"
    """How the head's cross-entropy is computed: fused (in chunks, the logits are never whole), or
    for comparison plain (full logits), torch (its linear_cross_entropy, where it has one) or liger
    (extra: liger); auto launches all but plain and takes the fastest, once a run."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of log(sum(exp(logits)))^2 in the loss, which keeps logits from drifting; 0: none."""
    threads: Annotated[int, Field(ge=0, le=MOST_THREADS)] = 0
    """CPU threads for torch; 0 means one per core."""
    stop_after: NonNegativeFloat = 0.0
    """Seconds after which the run saves and ends with exit code 75, to be started again; 0: never.
    SLURM's own limit is watched in any case."""
    stop_margin: NonNegativeFloat = 120.0
    """Seconds before SLURM's limit at which the run saves and ends."""
    branch: str = ""
    """RUN@STEP that this run continues with other settings: weights, optimizer, data position and
    ledger go on from there (`train --from`); empty: none."""

    @field_validator("batch_size", mode="before")
    @classmethod
    def _read_auto(cls, value: Any) -> Any:
        return 0 if value == AUTO else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse what cannot work, or another setting makes idle."""
        if len(given := horizons(self)) > 1:
            raise ConfigError(
                f"{' and '.join('train.' + name for name in given)} are both horizons; give one."
            )
        if self.float8 == "none":
            for name in ("float8_skip", "float8_head"):
                self.refuse_idle(name, "while train.float8 is none", "a kind of float8")
        elif self.dtype not in ("auto", "bf16"):
            raise ConfigError(
                f"train.float8 {self.float8} needs the rest in bf16, and train.dtype is"
                f" {self.dtype}; use bf16 or auto."
            )
        if self.float8_head and self.loss != "fused":
            raise ConfigError(
                f"train.float8_head is train.loss fused's, and it is {self.loss}; use fused."
            )
        if self.branch and self.init:
            raise ConfigError(
                "train.init starts from weights alone and train.branch from the whole state; give"
                " one."
            )
        if self.stage == "finetune" and not (self.init or self.branch):
            raise ConfigError(
                "train.stage finetune needs train.init, the run whose weights to start from."
            )
        return self

    @property
    def head_float8(self) -> Literal["tensorwise", "rowwise"] | None:
        """How logits are scaled into float8, where they are."""
        return self.float8 if self.float8_head and self.float8 != "none" else None

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled, as far as that is decided: auto is not on a CPU."""
        return self.compile in ("blocks", "model", "graphs")


FLOAT8_SIDE = 16
"""Of a product, a multiple of which the hardware takes."""
HORIZONS = ("steps", "tokens", "epochs", "flops", "tokens_per_param", "hours", "dollars")


def horizons(train: "TrainConfig") -> list[str]:
    """Names of the horizons that are set."""
    return [name for name in HORIZONS if getattr(train, name)]
