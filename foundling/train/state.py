"""Everything that a step changes, and how it becomes tensors and JSON and comes back."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import foundling
from foundling.config.sections import RunConfig
from foundling.model import Transformer
from foundling.model.kernels import KERNELS, TORCH
from foundling.optim import build_optimizer
from foundling.parallel import ALONE, Mesh, apply_parallel, is_fsdp1
from foundling.parallel.birth import fill_parts
from foundling.parallel.float8 import check_float8
from foundling.parallel.old_fsdp import clean_params, read_state, write_state
from foundling.parallel.tensor import add_up_gradients
from foundling.runtime.device import Choice
from foundling.runtime.dist import World
from foundling.train.ledger import Ledger
from foundling.train.scaling import LossScale

MOMENTS = ("exp_avg", "exp_avg_sq")
SMALL_MODEL = 100_000_000
"""Parameters below which copying them all for the update ratios is small change."""


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
    scaling: LossScale | None = None
    """Of the loss, in fp16."""

    def params(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter by its own name, whatever wraps it."""
        return clean_params(self.model)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: weights and moments by parameter name, as live tensors."""
        self._ensure_moments()
        if is_fsdp1(self.module):
            return read_state(self.module, self.optimizer, MOMENTS)
        found = {f"model.{name}": param.detach() for name, param in self.params()}
        for name, param in self.params():
            for moment in MOMENTS:
                found[f"optim.{name}.{moment}"] = self.optimizer.state[param][moment]
        return found

    def meta(self, **more: Any) -> dict[str, Any]:
        """What a checkpoint says beside its tensors."""
        versions = {
            "foundling": foundling.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        if self.scaling is not None:
            more["loss_scale"] = self.scaling.to_json()
        ledger = self.ledger.to_json()
        return {"step": self.step, "ledger": ledger, "versions": versions, **more}

    def restore(self, meta: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take up the counters of a checkpoint that was loaded into `tensors`, which `tensors()`
        gave: the state's own, or copies that still have to be put back."""
        self.step = meta["step"]
        self.ledger = Ledger.from_json(meta["ledger"])
        if self.scaling is not None and "loss_scale" in meta:
            self.scaling = LossScale.from_json(meta["loss_scale"])
        if is_fsdp1(self.module):
            write_state(self.module, self.optimizer, tensors, MOMENTS, self.step)
            return
        for _, param in self.params():
            # AdamW's own step count is the run's: it is derived, never stored.
            self.optimizer.state[param]["step"].fill_(self.step)

    @property
    def pieces(self) -> dist.ProcessGroup | None:
        """The ranks that hold pieces of each parameter without the parameter knowing it."""
        return self.mesh.axis("shard").get_group() if is_fsdp1(self.module) else None

    def settle_gradients(self) -> None:
        """What is left to do after the last backward pass before gradients can be looked at."""
        if self.mesh.layout.tensor > 1:
            add_up_gradients(self.model)

    def _ensure_moments(self) -> None:
        """AdamW makes its moments at the first step; a resume needs them before."""
        for _, param in self.params():
            state = self.optimizer.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=self._step_device())
                for moment in MOMENTS:
                    state[moment] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _step_device(self) -> torch.device:
        fused = any(group.get("fused") for group in self.optimizer.param_groups)
        return self.device if fused else torch.device("cpu")


def make_state(model: Transformer, config: RunConfig, mesh: Mesh, choice: Choice) -> TrainState:
    """Wrap a model for its mesh and give it an optimizer.

    A model on the meta device is born in parts: a process gets memory and initial weights for what
    it holds. Any other has its weights already. The optimizer comes last, because sharding replaces
    parameters.
    """
    names = config.train.attention, config.train.attention_masked
    model.use_kernels(*(KERNELS.get(name, TORCH) for name in names))
    if config.train.float8 != "none":
        check_float8(choice.device)
    module = apply_parallel(model, config.parallel, mesh, config.train)
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=choice.device)
        fill_parts(model, config.train.seed)
    optimizer = build_optimizer(clean_params(model), config.optim)
    seed = config.train.seed
    state = TrainState(
        model, module, optimizer, mesh.world, choice.device, choice.dtype, seed, mesh
    )
    if choice.dtype == torch.float16:
        state.scaling = LossScale()
    return state


def settle_buckets(state: TrainState, width: int) -> None:
    """Let DDP lay out its buckets before the first step of this process.

    It does so after its first backward pass, in the order in which gradients came, and three or
    more ranks add up in an order that depends on the layout: without this, the first step after a
    resume would differ in its last bits from the same step of a run that went on.
    """
    if not isinstance(state.module, DistributedDataParallel):
        return
    rows = torch.zeros(1, width, dtype=torch.long, device=state.device)
    loss_sum, _ = state.module(rows, rows, None)
    (loss_sum * 0).backward()
    state.optimizer.zero_grad(set_to_none=True)
