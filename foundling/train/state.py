"""TrainState: everything that a step changes, as tensors and JSON; the gradient scaler."""

import contextlib
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from foundling.config.optim import OptimConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.train import TrainConfig
from foundling.model.kernels.attention_backends import KERNELS, TORCH
from foundling.model.layers import Embedding
from foundling.model.transformer import Transformer
from foundling.optim.optimizer import build_optimizer, ensure_state, saved_state, set_step
from foundling.parallel.apply import apply_parallel, check_float8, is_fsdp1
from foundling.parallel.fsdp import init_shards
from foundling.parallel.fsdp1 import clean_params, read_state, write_state
from foundling.parallel.mesh import ALONE, Mesh
from foundling.runtime.device import DeviceChoice, memory_usage
from foundling.runtime.dist import World
from foundling.runtime.versions import __version__
from foundling.train.token_ledger import Ledger

# The scale of the loss in fp16, whose smallest gradients would vanish without one.
#
# A step whose gradients overflow is taken again from the same batch at half the scale: nothing is
# lost, nothing is skipped, and a replay does the same. Rejected: torch's GradScaler, which drops
# the batch and counts the step.

INITIAL_SCALE = 2.0**16
MIN_SCALE = 1.0
MAX_SCALE = 2.0**24


@dataclass
class GradScaler:
    """Loss scale of fp16: a power of two, and for how many steps it has not changed."""

    value: float = INITIAL_SCALE
    held: int = 0
    """Steps since it last changed."""
    patience: int = 2000
    """Steps that it holds before it is doubled."""

    def back_off(self) -> bool:
        """Halve the scale; False at the minimum."""
        if self.value <= MIN_SCALE:
            return False
        self.value, self.held = self.value / 2, 0
        return True

    def grow_if_stable(self) -> None:
        """Count a step, and double the scale after `patience` of them."""
        self.held += 1
        if self.held >= self.patience:
            self.value, self.held = min(self.value * 2, MAX_SCALE), 0


# Everything that a step changes, and how it becomes tensors and JSON and comes back.

FSDP1_MOMENTS = ("exp_avg", "exp_avg_sq")
"""What torch's first FSDP translates; it trains with AdamW alone."""


@dataclass
class TrainState:
    """The model, its optimizer, and how far they have come."""

    model: Transformer
    module: nn.Module
    """The model as parallel/apply.py wrapped it: micro-batch in, (loss_sum, count) out."""
    optimizer: torch.optim.Optimizer
    world: World
    device: torch.device
    dtype: torch.dtype
    seed: int
    mesh: Mesh = ALONE
    step: int = 0
    """Completed optimizer steps."""
    ledger: Ledger = field(default_factory=lambda: Ledger({}))
    grad_scaler: GradScaler | None = None
    """Of the loss, in fp16."""

    def params(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter by its own name, whatever wraps it."""
        return clean_params(self.model)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: weights and moments by parameter name, as live tensors."""
        ensure_state(self.optimizer)
        if is_fsdp1(self.module):
            return read_state(self.module, self.optimizer, FSDP1_MOMENTS)
        return named_tensors(self.params(), self.optimizer)

    def meta(self, **more: Any) -> dict[str, Any]:
        """The JSON of a checkpoint: step, ledger, versions."""
        versions = {
            "foundling": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        if self.grad_scaler is not None:
            more["loss_scale"] = asdict(self.grad_scaler)
        ledger = self.ledger.to_json()
        return {"step": self.step, "ledger": ledger, "versions": versions, **more}

    def restore(self, meta: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Set the counters from a checkpoint that was loaded into `tensors`, which `tensors()`
        returned: the state's own, or copies that still have to be put back."""
        self.step = meta["step"]
        self.ledger = Ledger.from_json(meta["ledger"])
        if self.grad_scaler is not None and "loss_scale" in meta:
            self.grad_scaler = GradScaler(**meta["loss_scale"])
        if is_fsdp1(self.module):
            write_state(self.module, self.optimizer, tensors, FSDP1_MOMENTS, self.step)
            return
        # AdamW's own step count is the run's: it is derived, never stored.
        set_step(self.optimizer, self.step)

    def memory(self) -> dict[str, int]:
        """Bytes that the run holds, and held at most."""
        return memory_usage(self.device, graphs=self.model.has_graphs)

    @property
    def fsdp1_group(self) -> dist.ProcessGroup | None:
        """The ranks over which FSDP1 shards each parameter, which the parameter itself does not
        say."""
        return self.mesh.axis("shard").get_group() if is_fsdp1(self.module) else None


def named_tensors(
    params: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Weights, and what the optimizer keeps of each, by the names that a checkpoint gives them."""
    named = dict(params)
    found = {f"model.{name}": param.detach() for name, param in named.items()}
    for name, param in named.items():
        for what, tensor in saved_state(optimizer, param).items():
            found[f"optim.{name}.{what}"] = tensor
    return found


def make_state(
    model: Transformer,
    train: TrainConfig,
    optim: OptimConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    choice: DeviceChoice,
) -> TrainState:
    """Wrap a model for its mesh and give it an optimizer.

    A model on the meta device gets memory and initial weights here, in each process for the shards
    that it holds. Any other has its weights already. The optimizer comes last, because sharding
    replaces parameters.
    """
    names = train.kernels.attention, train.kernels.attention_masked
    fused = train.kernels.mlp == "fused"
    model.use_kernels(*(KERNELS.get(name, TORCH) for name in names), fused_mlp=fused)
    if train.float8 != "none":
        check_float8(choice.device, choice.dtype)
    module = apply_parallel(model, parallel, mesh, train)
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=choice.device)
        init_shards(model, train.seed)
    for part in model.modules():
        if isinstance(part, Embedding):  # DDP and FSDP need autograd to accumulate every gradient
            part.adds_in_place = mesh.world.size == 1
    ranks = dist.group.WORLD if mesh.world.size > 1 else None
    optimizer = build_optimizer(clean_params(model), optim, ranks=ranks)
    seed = train.seed
    state = TrainState(
        model, module, optimizer, mesh.world, choice.device, choice.dtype, seed, mesh
    )
    if choice.dtype == torch.float16:
        state.grad_scaler = GradScaler()
    return state


def fix_ddp_buckets(state: TrainState, width: int) -> None:
    """Let DDP lay out its buckets before the first step of this process.

    It does so after its first backward pass, in the order in which gradients came, and three or
    more ranks add up in an order that depends on the layout: without this, the first step after a
    resume would differ in its last bits from the same step of a run that went on.
    """
    if not isinstance(state.module, DistributedDataParallel):
        return
    rows = torch.zeros(1, width, dtype=torch.long, device=state.device)
    # In the run's own arithmetic, which its attention kernel was chosen for; and not compiled: no
    # step has rows of this shape.
    with contextlib.ExitStack() as stack:
        if state.model.is_compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        with autocast(state):
            loss_sum, _ = state.module(rows, rows, None)
        (loss_sum * 0).backward()
    state.optimizer.zero_grad(set_to_none=True)


def autocast(state: TrainState) -> contextlib.AbstractContextManager[object]:
    """The arithmetic of the forward pass: master weights in fp32, products in `state.dtype`."""
    if state.dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(state.device.type, state.dtype)


def allocate_gradients(state: TrainState) -> None:
    """Give every parameter a gradient of zeros, to be added to. Left to itself, autograd takes the
    first gradient that comes as it is; one that comes out of a CUDA graph lies in memory that the
    next launch overwrites."""
    for _, param in state.params():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
