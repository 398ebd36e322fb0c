"""Figures that were recorded: held to what they were measured of, and to nothing else."""

from pathlib import Path
from typing import Any

import pytest

from foundling.bench.baselines import line_of, meaning_of, refuse_changed
from foundling.cli.main import run_verb
from foundling.config.errors import DataError
from foundling.config.load import dump_yaml, load_config
from foundling.config.run import RunConfig
from tests.unit.bench.changed import set_in


def test_a_file_that_was_edited_since_is_another_model(small: RunConfig, tmp_path: Path) -> None:
    run, file = tmp_path / "run.yaml", tmp_path / "performance.json"
    words = ["bench", "train", str(run), "--steps", "1", "--check-steps", "0"]
    run.write_text(dump_yaml(small))
    run_verb([*words, "--record", str(file)])
    run_verb([*words, "--record", str(file)])  # of the same line again
    run.write_text(dump_yaml(set_in(small, "model", layers=1)))
    with pytest.raises(DataError, match=r"another model: model\.layers was 2 and is 1; record it"):
        run_verb([*words, "--against", str(file)])


def test_only_what_makes_a_step_faster_or_slower_counts(small: RunConfig) -> None:
    line = line_of("run.yaml", {}, device="cpu", batch="4")
    figure = {"tokens_per_s": 1.0, "meaning": meaning_of(small, line)}
    longer = set_in(small, "train", horizon=7, batch_size=2)
    refuse_changed(figure, line, set_in(longer, "model", init={"std": 0.5}))
    refuse_changed({"tokens_per_s": 1.0}, line, longer)  # of before the meaning was kept
    eight = load_config("llama-1.24b", {"train.float8": "tensorwise", "train.float8-skip": "attn"})
    refuse_changed({"meaning": meaning_of(eight, line)}, line, eight)
    for section, changes in (
        ("parallel", {"recompute": "all"}),
        ("optim", {"name": "muon"}),
        ("train", {"seq_len": 16}),
        ("data", {"document_mask": True}),
        ("model", {"layers": 1}),
    ):
        other = set_in(small, section, **changes)
        with pytest.raises(
            DataError, match=rf"another model: {section}\.{next(iter(changes))} was"
        ):
            refuse_changed(figure, line, other)


@pytest.mark.parametrize(
    ("left", "setting"),
    [({}, "batch_size"), ({"batch": "4", "micro_steps": 0}, "global_batch_tokens")],
)
def test_rows_that_the_line_leaves_to_the_target_count(
    left: dict[str, Any], setting: str, small: RunConfig
) -> None:
    line = line_of("run.yaml", {}, device="cpu", **left)
    figure = {"meaning": meaning_of(small, line)}
    other = set_in(small, "train", **{setting: 2 * getattr(small.train, setting) or 512})
    with pytest.raises(DataError, match=rf"another model: train\.{setting} was"):
        refuse_changed(figure, line, other)


def test_a_setting_that_came_later_had_its_default(small: RunConfig) -> None:
    """And one whose default has changed since is told, whoever names it."""
    line = line_of("run.yaml", {}, device="cpu", batch="4")
    meaning = meaning_of(small, line)
    del meaning["train.float8_skip"]
    refuse_changed({"meaning": meaning}, line, small)
    with pytest.raises(DataError, match="loss was liger and is fused"):
        refuse_changed({"meaning": {**meaning, "train.kernels.loss": "liger"}}, line, small)
