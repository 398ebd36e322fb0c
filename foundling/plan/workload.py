"""One micro-step of one GPU as plain numbers: the only place that reads them out of a config.

Memory and speed are functions of a Work and a Gpu, so another project's run can be written down as
a Work (its loss, its residual stream, its copies) and compared with what it published.
"""

from dataclasses import dataclass

from foundling.config.data import phase_mixtures
from foundling.config.model import ModelConfig
from foundling.config.optim import OptimConfig
from foundling.config.run import SAMPLE_TOKENS, RunConfig
from foundling.config.train import TrainConfig
from foundling.plan.hardware import Gpu
from foundling.plan.horizon import batch_tokens, micro_rows
from foundling.plan.layout import MeshLayout
from foundling.plan.params import sizes_of

ONE_GPU = MeshLayout()
NAMED = {"auto": "", "torch": ""}
"""Settings of an attention kernel that name none."""
SMALL_MODEL = 100_000_000
"""Parameters below which update ratios, which cost a copy of all of them, are measured at every
step."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one GPU does in a step."""

    model: ModelConfig
    seq_len: int
    batch: int
    """Rows of one micro-step."""
    accumulation: int = 1
    rows: int = 0
    """Rows of a whole step over all ranks; 0: every micro-step of every rank is full."""
    dtype: str = "bf16"
    float8: str = "none"
    """How the blocks' products are scaled into float8 (train.float8)."""
    float8_skip: tuple[str, ...] = ()
    float8_head: bool = False
    """Whether the logits are made of float8 numbers too."""
    compile: bool = False
    feed_forward: str = "auto"
    """Whether a squared ReLU may be made by its product (train.kernels.mlp)."""
    loss: str = "fused"
    recompute: str = "none"
    optimizer: str = "adamw"
    """Of foundling/plan/memory.py."""
    layout: MeshLayout = ONE_GPU
    document_mask: bool = False
    measures_update: bool = True
    """Whether this step keeps a copy of the weights to tell how far they moved."""
    evaluates: bool = True
    asks: bool = False
    """Whether tasks are scored on a clock, with prompts kept for their answers."""
    sampled: int = 0
    """Positions of all fixed prompts and their continuations, in the key-value cache at once."""
    stream_bytes: int = 4
    """Width of the residual stream's numbers: ours is that of the products."""
    weight_bytes: int = 4
    """Width of the stored weights, gradients and moments; a bf16-true trainer has 2."""
    kernel: str = ""
    """The attention kernel, where it was named or is a peer's and not the one ours would take."""
    masked_kernel: str = ""
    """That of documents and windows, likewise."""
    logit_bytes: tuple[float, float] | None = None
    """A peer's plain loss: bytes a logit at the end of the forward pass and in the backward."""
    saved_products: float = 1.0
    """per-op: share of the products' results that is kept; torchtitan keeps every second."""

    @property
    def positions(self) -> int:
        """Rows x tokens of one micro-step."""
        return self.batch * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Positions of a step that are not filler."""
        full = self.batch * self.accumulation * self.layout.data_ranks
        return (self.rows or full) * self.seq_len

    @property
    def width(self) -> int:
        """Bytes of a number in matrix products."""
        return 4 if self.dtype in ("fp32", "tf32") else 2

    @property
    def grouped(self) -> bool:
        return self.model.num_kv_heads != self.model.heads


def kind_of(optim: OptimConfig) -> str:
    """The optimizer as the plan names it (memory.py)."""
    return f"{optim.name}-wide" if optim.wide_embedding else optim.name


def works_of(config: RunConfig, layout: MeshLayout, gpu: Gpu) -> tuple[Workload, ...]:
    """The micro-step of each phase."""
    count = 1 + len(config.data.phases)
    return tuple(work_of(config, layout, gpu, phase) for phase in range(count))


def work_of(config: RunConfig, layout: MeshLayout, gpu: Gpu, phase: int = 0) -> Workload:
    """The micro-step that a phase of a config asks for on such a GPU."""
    train = config.train
    _, spec = phase_mixtures(config.data, train.seq_len)[phase]
    units = spec.units_per_step(batch_tokens(config, layout.data_ranks))
    per_rank = -(-units // layout.data_ranks)
    batch = min(micro_rows(train, spec), per_rank)
    # A bucket's unit is a micro-step; the longest rows weigh the most.
    rows = spec.rows_in(spec.seq_len) if spec.packing == "bucket" else 1
    params = sizes_of(config.model).all
    return Workload(
        model=config.model,
        seq_len=spec.seq_len,
        batch=batch * rows,
        accumulation=-(-per_rank // batch),
        rows=units * rows,
        dtype=dtype_on(train.dtype, gpu),
        float8=train.float8,
        float8_skip=train.float8_skip,
        float8_head=train.head_float8 is not None,
        feed_forward=train.kernels.mlp,
        compile=compile_on(train, layout.tensor, on_cuda=gpu.name != "cpu") != "off",
        loss="fused" if train.kernels.loss == "auto" else train.kernels.loss,
        recompute=config.parallel.recompute,
        optimizer=kind_of(config.optim),
        layout=layout,
        document_mask=config.data.document_mask,
        measures_update=params < SMALL_MODEL or config.log.every == 1,
        evaluates=config.eval.every > 0,
        asks=bool(config.eval.tasks),
        sampled=_sampled(config),
        kernel=NAMED.get(train.kernels.attention, train.kernels.attention),
        masked_kernel=NAMED.get(train.kernels.attention_masked, train.kernels.attention_masked),
        stream_bytes=4 if dtype_on(train.dtype, gpu) in ("fp32", "tf32") else 2,
    )


def _sampled(config: RunConfig) -> int:
    """A prompt is taken to be as long as its bytes, which is more than its tokens."""
    if not config.eval.every:
        return 0
    longest = max((len(prompt.encode()) for prompt in config.eval.prompts), default=0)
    return len(config.eval.prompts) * (longest + SAMPLE_TOKENS)


def compile_on(train: TrainConfig, tensor: int, *, on_cuda: bool) -> str:
    """`auto` as a rule, where train/autotune measures: blocks on CUDA, unless tensors are split."""
    if train.compile != "auto":
        return train.compile
    return "blocks" if on_cuda and tensor <= 1 else "off"


def dtype_on(wanted: str, gpu: Gpu) -> str:
    """`auto` as train resolves it: bf16 where the GPU has it, else fp16, and fp32 on a CPU."""
    if wanted != "auto":
        return wanted
    if gpu.name == "cpu":
        return "fp32"
    return next((name for name in ("bf16", "fp16") if name in gpu.peaks), "fp32")
