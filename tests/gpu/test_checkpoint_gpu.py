"""Saves of tensors on a GPU: copied before `save` returns, and memory that could not be locked."""

from pathlib import Path

import pytest
import torch

from foundling.checkpoint import writer
from foundling.checkpoint.manager import CheckpointManager
from foundling.checkpoint.reader import load_tensors
from foundling.config.run import CheckpointConfig
from foundling.runtime.dist import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def state(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"model.a": (512, 1024), "model.b": (7,), "optim.c": (1000, 333), "optim.d": ()}
    return {name: torch.randn(shape, generator=g).cuda() for name, shape in shapes.items()}


@pytest.mark.parametrize("locked", [True, False])
def test_training_may_change_the_tensors_as_soon_as_save_returns(
    tmp_path: Path, locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not locked:

        class Refuses:
            def cudaHostRegister(self, *_: object) -> int:  # noqa: N802
                return 1

        monkeypatch.setattr(writer, "_cudart", Refuses)
    with CheckpointManager(
        tmp_path / "run" / "checkpoints", CheckpointConfig(keep=9), World()
    ) as saver:
        for step in (1, 2, 3):
            tensors = state(step)
            saver.save(step, tensors, {"step": step})
            for tensor in tensors.values():
                tensor.fill_(-1)
        assert saver._stage._is_locked == locked
        saver.finish()
    for step in (1, 2, 3):
        into = {name: torch.zeros_like(tensor) for name, tensor in state(step).items()}
        load_tensors(tmp_path / "run" / "checkpoints" / f"step-{step:08d}", into)
        for name, tensor in state(step).items():
            assert torch.equal(into[name], tensor)
