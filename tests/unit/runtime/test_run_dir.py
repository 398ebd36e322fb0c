"""RUN@STEP as everything reads it: a run and a step, unless a path has that very name."""

from pathlib import Path

import pytest

from foundling.runtime.run_dir import split_step


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("runs/a@100", ("runs/a", 100)),
        ("runs/a@b@7", ("runs/a@b", 7)),
        (Path("runs/a@7"), ("runs/a", 7)),
        ("runs/a", None),
        ("runs/a@", None),
        ("@7", None),
        ("runs/a@last", None),
        ("runs/a@-1", None),
    ],
)
def test_a_run_and_its_step(text: str | Path, found: tuple[str, int] | None) -> None:
    assert split_step(text) == found


def test_a_path_that_is_there_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "me@2").mkdir()
    assert split_step(tmp_path / "me@2") is None
    assert split_step(f"{tmp_path}/me@2@3") == (f"{tmp_path}/me@2", 3)
