"""A model so small that a bench of it takes a moment."""

import pytest

from foundling.config import RunConfig
from foundling.config.resolve import resolve


@pytest.fixture(scope="session")
def small() -> RunConfig:
    """Two layers, 300 tokens, rows of 32."""
    return resolve(
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
