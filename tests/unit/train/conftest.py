"""A second source for runs that mix, and short windows of the guard."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def second(village: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another village's documents, 20,000 tokens, in the first one's tokens."""
    from foundling.data.build.build import build
    from foundling.data.open_source import open_source
    from foundling.tokenizer.tokenizer import Tokenizer

    folder = tmp_path_factory.mktemp("second") / "text2"
    source = open_source("hamlet", seed=2, val_share=0.05)
    tokenizer = Tokenizer.load(village.tokenizer)
    build(source, tokenizer, folder, name=source.name, kind=source.kind, max_tokens=20_000)
    return folder


@pytest.fixture(scope="module")
def short_window() -> Iterator[None]:
    """Spikes are measured against the last 8 steps, as tests have few."""
    from foundling.train.faults import anomaly

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anomaly, "WINDOW", 8)
        yield
