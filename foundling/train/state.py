"""Everything that a step changes, and how it becomes tensors and JSON and comes back."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import foundling
from foundling.config.sections import RunConfig
from foundling.model import Transformer
from foundling.optim import build_optimizer
from foundling.parallel import Mesh, apply_parallel, make_mesh
from foundling.runtime.device import Choice
from foundling.runtime.dist import World
from foundling.train.ledger import Ledger

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
    mesh: Mesh
    step: int = 0
    """Completed optimizer steps."""
    ledger: Ledger = field(default_factory=lambda: Ledger({}))

    def params(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter by its own name, whatever wraps it."""
        return iter(self.model.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: weights and moments by parameter name, as live tensors."""
        self._ensure_moments()
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
        ledger = self.ledger.to_json()
        return {"step": self.step, "ledger": ledger, "versions": versions, **more}

    def restore(self, meta: dict[str, Any]) -> None:
        """Take up the counters of a checkpoint whose tensors were loaded into `tensors()`."""
        self.step = meta["step"]
        self.ledger = Ledger.from_json(meta["ledger"])
        for _, param in self.params():
            # AdamW's own step count is the run's: it is derived, never stored.
            self.optimizer.state[param]["step"].fill_(self.step)

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


def make_state(model: Transformer, config: RunConfig, world: World, choice: Choice) -> TrainState:
    """The optimizer and the wrapping of a model that has its weights and is on its device."""
    optimizer = build_optimizer(model.named_parameters(), config.optim)
    mesh = make_mesh(config.parallel, world, choice.device)
    module = apply_parallel(
        model,
        config.parallel,
        mesh,
        compile_blocks=config.train.compile,
        loss=config.train.loss,
    )
    return TrainState(
        model, module, optimizer, world, choice.device, choice.dtype, config.train.seed, mesh
    )
