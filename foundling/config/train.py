"""Section `train`: horizon, batch, precision, compilation, kernels."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from foundling.config.errors import ConfigError, IdleError
from foundling.config.parallel import kept_share

if TYPE_CHECKING:
    from foundling.config.run import RunConfig

# THE vocabulary: every setting there is, with its help beside it.
#
# Frozen keyword-only dataclasses, so that a part can be handed its own section and cannot change
# it. The string under a field is its help on the command line. Rejected: one flat namespace (names
# collide), a mutable tree (parts quietly edit what others read), and behaviour keyed on a model's
# name (a new shape should be new values, not new code).

ParamCount = Literal["all", "no-input-embedding", "no-positions", "matrices-and-head"]
Stage = Literal["pretrain", "finetune"]
Compile = Literal["auto", "off", "blocks", "model", "graphs"]
Attention = Literal[
    "auto", "torch", "cudnn", "band", "flash", "flash3", "flash4", "flex", "efficient", "math"
]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how much at a time, and on what."""

    stage: Stage = "pretrain"
    """pretrain: text, loss on every token; finetune: conversations, loss on the assistant's tokens
    (text may be mixed in against forgetting, and counts in full)."""
    init: str = ""
    """Run, checkpoint or model from elsewhere whose weights this run starts from; empty: fresh."""
    steps: int = 0
    """Horizon in optimizer steps (exactly one horizon may be given; 0 is not this one)."""
    tokens: int = 0
    """Horizon in tokens; accepts 20B, 3.5M."""
    epochs: float = 0.0
    """Horizon in passes over the mixture's tokens."""
    flops: float = 0.0
    """Horizon in floating-point operations of training."""
    tokens_per_param: float = 0.0
    """Horizon in tokens per parameter, of the count that param_count names."""
    hours: float = 0.0
    """Horizon in hours on the hardware that --gpu names (`foundling plan -o` makes it steps)."""
    dollars: float = 0.0
    """Horizon in dollars at that hardware's price, likewise."""
    param_count: ParamCount = "no-input-embedding"
    """Which count of parameters tokens_per_param and flops use."""
    seq_len: int = 256
    """Tokens of input per row."""
    batch_size: int = 8
    """Rows per process per micro-step; auto (0) takes the fastest that fits the planned GPU."""
    global_batch_tokens: int = 0
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
    compile: Compile | bool = "auto"
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
    z_loss: float = 0.0
    """Weight of log(sum(exp(logits)))^2 in the loss, which keeps logits from drifting; 0: none."""
    threads: int = 0
    """CPU threads for torch; 0 means one per core."""
    stop_after: float = 0.0
    """Seconds after which the run saves and ends with exit code 75, to be started again; 0: never.
    SLURM's own limit is watched in any case."""
    stop_margin: float = 120.0
    """Seconds before SLURM's limit at which the run saves and ends."""
    branch: str = ""
    """RUN@STEP that this run continues with other settings: weights, optimizer, data position and
    ledger go on from there (`train --from`); empty: none."""

    def __post_init__(self) -> None:
        # `on` and `off` in YAML are true and false, and older files say so.
        if isinstance(self.compile, bool):
            object.__setattr__(self, "compile", "blocks" if self.compile else "off")
        object.__setattr__(self, "float8_skip", tuple(self.float8_skip))

    @property
    def head_float8(self) -> Literal["tensorwise", "rowwise"] | None:
        """How logits are scaled into float8, where they are."""
        return self.float8 if self.float8_head and self.float8 != "none" else None

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled, as far as that is decided: auto is not on a CPU."""
        return self.compile in ("blocks", "model", "graphs")


# Settings of speed and precision that cannot work together, or would have no effect.
#
# What only the device can tell (a GPU that is missing, a compiler left to `auto`) is refused where
# it is known: foundling/train/autotune/attention.py and foundling/parallel.

FLOAT8_SIDE = 16
"""Of a product, a multiple of which the hardware takes."""


def check_speed(config: "RunConfig") -> None:
    """Refuse what another setting makes idle, and layouts that a way of computing does not know."""
    train, parallel = config.train, config.parallel
    if train.z_loss < 0:
        raise ConfigError(f"train.z_loss cannot be negative (it is {train.z_loss}).")
    if kept_share(parallel.recompute) is not None and train.compile == "off":
        raise ConfigError(
            f"parallel.recompute {parallel.recompute} has no effect while train.compile is off; use"
            " train.compile blocks, or per-op."
        )
    _check_float8(config)
    _check_loss(config)
    if train.compile in ("model", "graphs") and (parallel.shard > 1 or parallel.tensor > 1):
        raise ConfigError(
            f"train.compile {train.compile} knows neither parallel.shard nor parallel.tensor, whose"
            " ranks talk between the blocks; use train.compile blocks."
        )


def _check_float8(config: "RunConfig") -> None:
    train, parallel = config.train, config.parallel
    if train.float8 == "none":
        for name in ("float8_skip", "float8_head"):
            if getattr(train, name):
                remedy = "remove it or choose a kind of float8"
                raise IdleError(f"train.{name}", "while train.float8 is none", remedy)
        return
    if train.float8_head and train.loss != "fused":
        raise ConfigError(
            f"train.float8_head is train.loss fused's, and it is {train.loss}; use fused."
        )
    if train.float8_head and config.model.dim % FLOAT8_SIDE:
        raise ConfigError(
            f"train.float8_head needs model.dim to be a multiple of {FLOAT8_SIDE}, and it is"
            f" {config.model.dim}; leave it off."
        )
    if parallel.tensor > 1 or parallel.fsdp1:
        name = "parallel.tensor" if parallel.tensor > 1 else "parallel.fsdp1"
        raise ConfigError(
            f"train.float8 {train.float8} is not built for {name}; use parallel.shard without it,"
            " or train.float8 none."
        )
    if train.dtype not in ("auto", "bf16"):
        raise ConfigError(
            f"train.float8 {train.float8} needs the rest in bf16, and train.dtype is {train.dtype};"
            " use bf16 or auto."
        )


def _check_loss(config: "RunConfig") -> None:
    train, parallel = config.train, config.parallel
    if train.loss == "torch" and (config.model.logit_softcap or train.z_loss):
        raise ConfigError(
            "train.loss torch knows neither model.logit_softcap nor train.z_loss; use fused."
        )
    if train.loss not in ("torch", "liger"):
        return
    for name in ("shard", "tensor"):
        if getattr(parallel, name) > 1:
            raise ConfigError(
                f"train.loss {train.loss} needs the whole head, and parallel.{name} cuts it; use"
                " fused."
            )


HORIZONS = ("steps", "tokens", "epochs", "flops", "tokens_per_param", "hours", "dollars")


def horizons(train: "TrainConfig") -> list[str]:
    """Names of the horizons that are set."""
    return [name for name in HORIZONS if getattr(train, name)]
