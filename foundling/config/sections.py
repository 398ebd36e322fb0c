"""THE vocabulary: every setting there is, with its help beside it.

Frozen keyword-only dataclasses, so that a part can be handed its own section and cannot change it.
The string under a field is its help on the command line. Rejected: one flat namespace (names
collide), a mutable tree (parts quietly edit what others read), and behaviour keyed on a model's
name (a new shape should be new values, not new code).
"""

from dataclasses import dataclass, field
from typing import Literal

from foundling.config.model import ModelConfig as ModelConfig
from foundling.config.optim import OptimConfig as OptimConfig

ParamCount = Literal["all", "no-input-embedding", "no-positions", "matrices-and-head"]
Stage = Literal["pretrain", "finetune"]
Packing = Literal["concat", "bestfit", "bucket", "pad"]
Compile = Literal["auto", "off", "blocks", "model", "graphs"]
Attention = Literal[
    "auto", "torch", "cudnn", "band", "flash", "flash3", "flash4", "flex", "efficient", "math"
]
WeightsBy = Literal["rows", "tokens", "documents", "epochs"]


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer the run reads and writes with."""

    path: str = ""
    """Folder with tokenizer.json (or vocab.json and merges.txt); empty: the one the data was built
    with."""


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """What changes from some step on; what is left out stays as it was."""

    at: float
    """Where it begins: a share of the steps below 1, or the number of a step above 1."""
    seq_len: int = 0
    """Tokens of input per row from here on; 0: as before."""
    sources: dict[str, float] = field(default_factory=dict)
    """Data sets and their weights from here on; empty: as before."""
    packing: Literal["", "concat", "bestfit", "bucket", "pad"] = ""
    """How documents become rows from here on; empty: as before."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the run eats."""

    sources: dict[str, float] = field(default_factory=dict)
    """Built data sets (folders with a manifest.json) and their weights."""
    weights_by: WeightsBy = "rows"
    """What the weights share out: packed rows, tokens, documents, or epochs (a source of weight 2
    is read twice as often as one of weight 1, whatever their sizes)."""
    packing: Packing = "bestfit"
    """How documents become rows: concat (cut anywhere), bestfit (rows start at a document), pad
    (one document a row) or bucket (one document a row, micro-batches of rows alike in length)."""
    buckets: tuple[int, ...] = (256, 512, 768, 1024, 1536, 2048, 8192)
    """bucket: longest document of each bucket; train.seq_len takes the place of the last ones that
    exceed it, or comes on top."""
    bucket_tokens: int = 16384
    """bucket: padded tokens of a micro-batch, which is the unit (train.batch_size is not used)."""
    phases: tuple[PhaseConfig, ...] = ()
    """Changes of sequence length, mixture or packing on the way, such as a long-context stretch."""
    follow: bool = False
    """Begin while the data sets are still being built, and read on as they grow."""
    follow_minutes: float = 60.0
    """How long to wait for new shards before the run is saved and stops."""
    document_mask: bool = False
    """Keep attention inside each document of a packed row."""
    allow_repeat: float = 1.0
    """How many epochs of a source a run may take before it is refused."""
    prefetch: int = 2
    """Batches prepared ahead of the step."""

    def __post_init__(self) -> None:
        # Read from a file, phases and edges arrive as plain lists.
        phases = (p if isinstance(p, PhaseConfig) else PhaseConfig(**p) for p in self.phases)
        object.__setattr__(self, "phases", tuple(phases))
        object.__setattr__(self, "buckets", tuple(self.buckets))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is laid out over processes."""

    replicate: int = 0
    """Data-parallel replicas (DDP); 0 means every process of the job."""
    shard: int = 1
    """Fully sharded data parallel degree (FSDP)."""
    tensor: int = 1
    """Tensor parallel degree."""
    context: int = 1
    """Context parallel degree; not built yet, 1 is the only value."""
    pipeline: int = 1
    """Pipeline parallel degree; not built yet, likewise."""
    fsdp1: bool = False
    """Shard with torch's first FSDP instead of the second: for comparison with old runs."""
    reshard: bool = True
    """FSDP: give a block's gathered weights back after its forward pass and gather them again; off
    costs memory and saves traffic."""
    prefetch: int = 1
    """FSDP: blocks whose weights are gathered ahead of the one at work."""
    gather_dtype: Literal["fp32", "bf16"] = "fp32"
    """FSDP: how weights travel. fp32 computes as one device does; bf16 halves the traffic and
    rounds the norms' weights too."""
    grad_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """How gradients travel between ranks; 16 bits halve the traffic and round each rank's part."""
    bucket_mb: int = 25
    """DDP: gradients are sent in buckets of this size while the backward pass goes on."""
    offload: bool = False
    """FSDP: keep weights and optimizer state in the host's memory."""
    recompute: str = "none"
    """Activations made again in the backward pass to save memory: none, every-N (every N-th block),
    all, per-op (all but matrix products and attention), ffn (the feed-forward halves), or budget-S
    (what the compiler chooses to keep the share S; needs train.compile)."""


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
    """Horizon in hours on the hardware that --gpu names (`foundling config` makes it steps)."""
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


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved and what is kept."""

    every: int = 200
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 2
    """How many of the newest complete checkpoints to keep."""
    keep_every: int = 0
    """Keep every checkpoint whose step is a multiple of this, too; 0: none."""
    keep_best: int = 0
    """Keep the checkpoints with the best held-out scores on the evaluation clock, too: this many;
    by bits per byte, and by the loss where a source holds conversations."""
    best: Literal["lowest", "highest"] = "lowest"
    """keep_best: which scores are the best ones."""
    folder: str = ""
    """Where checkpoints go, in a folder named after the run: another disk, or an address such as
    s3://bucket/runs (extra: remote); empty: into the run directory."""
    background: bool = True
    """Write behind the training, from a copy in the host's memory; off waits for every save."""
    timeout_s: int = 600
    """Seconds that ranks wait for each other in a save, and a save for the one before it."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What is measured on a clock while training."""

    every: int = 200
    """Steps between evaluations on held-out data; 0 switches them off."""
    tokens: int = 65536
    """Held-out tokens of each source that an evaluation reads, always the same ones; the last step
    scores all of them as well, as full_bpb and full_loss."""
    sample_every: int = 200
    """Steps between samples from the fixed prompts; 0 switches them off."""
    sample_tokens: int = 48
    """Tokens per sample."""
    prompts: tuple[str, ...] = ()
    """Fixed prompts that are continued on the sampling clock."""
    tasks: tuple[str, ...] = ()
    """Tasks that are scored on a clock of their own, such as core=eval_bundle.zip or gsm8k=FILE;
    `foundling eval RUN list` names them."""
    tasks_every: int = 0
    """Steps between scores of the tasks; 0 switches them off. The last step is scored too."""
    tasks_limit: int = 200
    """Examples a task; 0: all."""


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
class GuardConfig:
    """What is done when a step, a rank or the memory misbehaves."""

    spike_loss: float = 10.0
    """A loss this many spreads (1.48 x median absolute deviation) above the median of the window,
    and above all of it, is a spike: back to the last good checkpoint, its rows left out; 0: off."""
    spike_norm: float = 30.0
    """The same for the logarithm of the gradient norm; 0: off."""
    window: int = 128
    """Steps that a spike is measured against; none is looked for before half of them are there."""
    skip_before: int = 1
    """Batches before a spike that are left out with it: the update before may have caused it."""
    nonfinite: int = 3
    """Batches in a row whose loss or gradient is not finite: fewer are left out one by one, so many
    send the run back to its last good checkpoint."""
    limit: int = 6
    """Batches left out and rollbacks within limit_steps steps; one more ends the run."""
    limit_steps: int = 1000
    """Steps over which they are counted."""
    hash_every: int = 100
    """Steps between comparisons of the replicas' weights, bit for bit; 0: off."""
    hang_s: float = 600.0
    """Seconds without progress after which the watchdog tells who is stuck and ends the job, to be
    started again; 0: off."""
    hang_slow_s: float = 1800.0
    """The same for what takes longer: set-up, the first step, a save, an evaluation, a rollback."""
    memory_every: int = 10
    """Steps between looks at memory in use; a steady rise over 64 looks is told once; 0: off."""


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
    guard: GuardConfig = field(default_factory=GuardConfig)
