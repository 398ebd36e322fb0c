"""Figures that were recorded: held to what they were measured of, and to nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest

from foundling.bench.figures import meaning_of, refuse_changed
from foundling.cli import run_verb
from foundling.config import RunConfig
from foundling.config.errors import DataError
from foundling.config.resolve import dump_yaml, resolve


def test_a_file_that_was_edited_since_is_another_model(small: RunConfig, tmp_path: Path) -> None:
    run, file = tmp_path / "run.yaml", tmp_path / "performance.json"
    words = ["bench", "train", str(run), "--steps", "1", "--check-steps", "0"]
    run.write_text(dump_yaml(small))
    assert run_verb([*words, "--record", str(file)]) == 0
    assert run_verb([*words, "--record", str(file)]) == 0, "of the same line again"
    run.write_text(dump_yaml(replace(small, model=replace(small.model, layers=1))))
    with pytest.raises(DataError, match=r"another model: model\.layers was 2 and is 1; record it"):
        run_verb([*words, "--against", str(file)])


def test_only_what_makes_a_step_faster_or_slower_counts(small: RunConfig) -> None:
    figure = {"tokens_per_s": 1.0, "meaning": meaning_of(small)}
    longer = replace(small, train=replace(small.train, steps=7, batch_size=2))
    refuse_changed(figure, longer)
    refuse_changed({"tokens_per_s": 1.0}, longer)  # of before the meaning was kept
    skipped = {"train.float8": "tensorwise", "train.float8-skip": "attn"}
    eight = resolve("llama-1.24b", skipped)
    refuse_changed({"meaning": meaning_of(eight)}, eight)
    for section, changes in (
        ("parallel", {"recompute": "all"}),
        ("optim", {"name": "muon"}),
        ("train", {"seq_len": 16}),
        ("data", {"document_mask": True}),
    ):
        other = replace(small, **{section: replace(getattr(small, section), **changes)})
        with pytest.raises(
            DataError, match=rf"another model: {section}\.{next(iter(changes))} was"
        ):
            refuse_changed(figure, other)
