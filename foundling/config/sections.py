"""THE vocabulary: every setting there is, with its help beside it.

Frozen keyword-only dataclasses, so that a part can be handed its own section and cannot change it.
The string under a field is its help on the command line. Rejected: one flat namespace (names
collide), a mutable tree (parts quietly edit what others read), and behaviour keyed on a model's
name (a new shape should be new values, not new code).
"""

from dataclasses import dataclass, field
from typing import Literal

ParamCount = Literal["all", "no-input-embedding", "matrices-and-head"]
Stage = Literal["pretrain", "finetune"]
ScheduleName = Literal["constant", "linear", "cosine", "quarter-cosine", "wsd"]
Packing = Literal["concat", "bestfit"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the transformer."""

    vocab_size: int = 0
    """Rows of the embedding; 0 takes the tokenizer's size when training starts."""
    dim: int = 192
    """Width of the residual stream."""
    layers: int = 6
    """Number of transformer blocks."""
    heads: int = 6
    """Query heads per block."""
    kv_heads: int = 0
    """Key and value heads per block (grouped-query attention); 0 means as many as heads."""
    head_dim: int = 0
    """Width of a head; 0 means dim / heads."""
    ffn_dim: int = 512
    """Width of the feed-forward layer (SwiGLU)."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    tie_embeddings: bool = False
    """Use the input embedding as the output head."""
    init_std: float = 0.02
    """Standard deviation of the embedding's initial values; matrices use 1/sqrt(fan_in)."""

    def __post_init__(self) -> None:
        from foundling.config.checks import check_model

        check_model(self)

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads, with the default filled in."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of a head, with the default filled in."""
        return self.head_dim or self.dim // self.heads


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer the run reads and writes with."""

    path: str = ""
    """Folder with tokenizer.json (or vocab.json and merges.txt); empty: the one the data was built
    with."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the run eats."""

    sources: dict[str, float] = field(default_factory=dict)
    """Built data sets (folders with a manifest.json) and their weights, by packed rows."""
    packing: Packing = "bestfit"
    """How documents become rows: concat (cut anywhere) or bestfit (rows start at a document)."""
    document_mask: bool = False
    """Keep attention inside each document of a packed row."""
    allow_repeat: float = 1.0
    """How many epochs of a source a run may take before it is refused."""
    prefetch: int = 2
    """Batches prepared ahead of the step."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How gradients become updates."""

    lr: float = 1e-3
    """Peak learning rate."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors and embeddings are not decayed."""
    clip: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    schedule: ScheduleName = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up (give this or warmup_share)."""
    warmup_share: float = 0.0
    """Warm-up as a share of all steps (give this or warmup_steps)."""
    decay_share: float = 0.2
    """wsd only: share of the steps, at the end, over which the rate falls."""
    final_lr_share: float = 0.0
    """Learning rate at the last step as a share of the peak."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is laid out over processes."""

    replicate: int = 0
    """Data-parallel replicas (DDP); 0 means every process of the job."""
    shard: int = 1
    """Fully sharded data parallel degree (FSDP)."""
    tensor: int = 1
    """Tensor parallel degree."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how much at a time, and on what."""

    stage: Stage = "pretrain"
    """pretrain: text, loss on every token; finetune: conversations, loss on the assistant's tokens
    (text may be mixed in against forgetting, and counts in full)."""
    init: str = ""
    """Run or checkpoint whose weights this run starts from; empty: fresh ones."""
    steps: int = 0
    """Horizon in optimizer steps (exactly one horizon may be given)."""
    tokens: int = 0
    """Horizon in tokens; accepts 20B, 3.5M."""
    epochs: float = 0.0
    """Horizon in passes over the mixture's tokens."""
    flops: float = 0.0
    """Horizon in floating-point operations of training."""
    tokens_per_param: float = 0.0
    """Horizon in tokens per parameter, of the count that param_count names."""
    param_count: ParamCount = "no-input-embedding"
    """Which count of parameters tokens_per_param and flops use."""
    seq_len: int = 256
    """Tokens of input per row."""
    batch_size: int = 8
    """Rows per process per micro-step."""
    global_batch_tokens: int = 0
    """Tokens per optimizer step over all processes; 0 means one micro-step of each process."""
    seed: int = 1
    """Seed of initial weights, data order and everything random."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to train; auto takes CUDA if it is there."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Arithmetic of matrix products; auto takes bf16 on CUDA and fp32 elsewhere."""
    compile: bool = False
    """Compile each transformer block with torch.compile."""
    deterministic: bool = False
    """Refuse kernels whose result may differ between two identical runs (CUDA)."""
    threads: int = 0
    """CPU threads for torch; 0 means one per core."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved and what is kept."""

    every: int = 200
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 2
    """How many of the newest complete checkpoints to keep."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What is measured on a clock while training."""

    every: int = 200
    """Steps between evaluations on held-out data; 0 switches them off."""
    tokens: int = 65536
    """Held-out tokens per evaluation; the final one reads everything."""
    sample_every: int = 200
    """Steps between samples from the fixed prompts; 0 switches them off."""
    sample_tokens: int = 48
    """Tokens per sample."""
    prompts: tuple[str, ...] = ()
    """Fixed prompts that are continued on the sampling clock."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is said while training."""

    every: int = 1
    """Steps between lines on the screen; metrics.jsonl has every step."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Send metrics to Weights & Biases (extra: wandb)."""
    project: str = "foundling"
    """Name of the W&B project."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything one run is made of."""

    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
