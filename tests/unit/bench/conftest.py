"""A model so small that a bench of it takes a moment, and a card that is too small for it."""

from typing import Any

import pytest
import torch

from foundling.config.load import load_config
from foundling.config.run import RunConfig


@pytest.fixture(scope="session")
def small() -> RunConfig:
    """Two layers, 300 tokens, rows of 32."""
    return load_config(
        "hamlet",
        {
            "model.dim": "32",
            "model.layers": "2",
            "model.heads": "4",
            "model.kv-heads": "2",
            "model.ffn-dim": "64",
            "model.vocab-size": "300",
            "train.seq-len": "32",
            "train.batch-size": "4",
            "train.threads": "1",
            "train.device": "cpu",
        },
    )


@pytest.fixture
def no_moments(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """AdamW's moments do not fit as often as the list's one number says."""
    left, right = [10**9], torch.zeros_like

    def zeros_like(given: torch.Tensor, **how: Any) -> torch.Tensor:
        # AdamW alone asks for a memory format; its first moment is made after its count of steps.
        if left[0] and "memory_format" in how and given.numel() > 1000:
            left[0] -= 1
            raise torch.OutOfMemoryError("no room")
        return right(given, **how)

    monkeypatch.setattr(torch, "zeros_like", zeros_like)
    return left
