"""Several optimizers that work on different parameters, as one."""

from collections.abc import Callable, Sequence

import torch

from foundling.optim.eight_bit import AdamW8bit
from foundling.optim.muon import Muon


class Mixed(torch.optim.Optimizer):
    """Groups and state are those of the parts, so that whoever sets a rate, measures a group or
    saves a moment need not know how many there are."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of each."""
        assert closure is None
        for part in self.parts:
            part.step()


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that one is made of."""
    return optimizer.parts if isinstance(optimizer, Mixed) else (optimizer,)


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Optimizers make their state at the first step; a resume needs it before."""
    for part in parts_of(optimizer):
        for group in part.param_groups:
            for param in group["params"]:
                if part.state[param]:
                    continue
                if isinstance(part, Muon | AdamW8bit):
                    part.init_state(param)
                else:
                    part.state[param] = _adamw_state(param, fused=bool(group.get("fused")))


def kept(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """What has to be saved of a parameter's state, by name; the count of steps is the run's."""
    return {name: tensor for name, tensor in optimizer.state[param].items() if name != "step"}


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Tell every parameter's state how many steps there have been."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)


def _adamw_state(param: torch.Tensor, *, fused: bool) -> dict[str, torch.Tensor]:
    device = param.device if fused else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        **{
            moment: torch.zeros_like(param, memory_format=torch.preserve_format)
            for moment in ("exp_avg", "exp_avg_sq")
        },
    }
