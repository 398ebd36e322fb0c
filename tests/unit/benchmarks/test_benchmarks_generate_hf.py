"""Decoding beside transformers."""

from types import SimpleNamespace

import pytest

from benchmarks import generate_hf
from foundling.bench import generate
from foundling.cli.options import Options
from foundling.cli.parser import parse
from foundling.config.errors import CheckpointError
from foundling.config.model import ModelConfig

SHAPE = ModelConfig(vocab_size=200, dim=32, layers=1, heads=2, ffn_dim=64)


def options(*words: str) -> Options:
    lengths = ("--batch", "1", "--prompt", "8", "--new", "4", "--rounds", "1", "--device", "cpu")
    return parse(generate_hf.PROGRAM, "generate_hf", ["shape", *lengths, *words])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(generate_hf, "sized_config", lambda *_: SimpleNamespace(model=SHAPE))
    monkeypatch.setattr(generate_hf, "measure_ceilings", lambda *_, **__: None)


def test_no_speed_is_told_where_tokens_are_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "check_tokens", lambda *_: (64, 0, 3))
    with pytest.raises(CheckpointError, match="3 of 64 tokens"):
        generate_hf._run(options())
    assert "tokens/s" not in capsys.readouterr().out


@pytest.mark.parametrize(("words", "times"), [((), 1), (("--no-continuous",), 0)])
def test_continuous_batching_is_timed_unless_told_not_to(
    words: tuple[str, ...],
    times: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(generate_hf, "time_continuous", lambda *_: asked.append(1) or 1e9)
    generate_hf._run(options(*words))
    out = capsys.readouterr().out
    assert len(asked) == times
    assert ("continuous batching" in out) == bool(times)
    assert "0.00 times" in out or not times  # the best of theirs counts
