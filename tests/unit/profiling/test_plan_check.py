"""`plan --probe`: nothing is measured in vain, and it does not take an hour in silence."""

from pathlib import Path
from typing import Any

import pytest
import torch

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError
from foundling.profiling import plan_check
from foundling.profiling.ceilings import measure_ceilings

CPU = torch.device("cpu")
SMALL = "--model.dim 32 --model.heads 2 --model.ffn-dim 64 --model.layers 2 --train.seq-len 64"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was measured; ceilings are made quickly."""
    done: list[str] = []

    def quick(device: torch.device) -> Any:
        done.append(str(device))
        return measure_ceilings(CPU, quick=True)

    monkeypatch.setenv("FOUNDLING_HOME", str(tmp_path))
    monkeypatch.setattr(plan_check, "measure_ceilings", quick)
    return done


def test_the_vocabulary_comes_from_the_data(
    measured: list[str], village: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"--data.sources {village.text} --model.vocab-size 0 --train.batch-size 2"
    run_verb(f"plan hamlet --probe --train.device cpu {data} {SMALL}".split())
    shown = capsys.readouterr()
    assert "memory, peak" in shown.out
    assert "step 1 of 7 took" in shown.err
    assert measured == ["cpu"]


def test_no_vocabulary_is_refused_before_anything_is_measured(measured: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 0"):
        run_verb(f"plan hamlet --probe --model.vocab-size 0 {SMALL}".split())
    assert measured == []


def test_steps_that_would_take_long_are_refused_before_anything_is_measured(
    measured: list[str],
) -> None:
    with pytest.raises(ConfigError, match=r"10 steps.*train\.batch_size 8.*--probe-minutes"):
        run_verb(["plan", "clm-60m", "--probe", "--train.device", "cpu"])
    assert measured == []
