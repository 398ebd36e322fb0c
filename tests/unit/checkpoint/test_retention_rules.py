"""The keep rules together: newest, every m steps, best, pinned; and the memory they rely on."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_samples import sample
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foundling.checkpoint import manifest
from foundling.checkpoint.folders import list_checkpoints, step_of
from foundling.checkpoint.manifest import verify
from foundling.checkpoint.retention import (
    VerifiedCache,
    abandon_after,
    latest,
    note_score,
    pin,
    pinned,
    retain,
    scores,
    unpin,
)
from foundling.checkpoint.writer import save
from foundling.config.run import CheckpointConfig


def fill(folder: Path, steps: range | list[int]) -> Path:
    for step in steps:
        save(folder, step, {"a": torch.tensor(step)}, {})
    return folder


def steps(folder: Path) -> list[int | None]:
    return [step_of(path) for path in list_checkpoints(folder)]


def spoil(path: Path) -> None:
    (path / "meta.json").write_text("[]")


def test_every_so_many_steps_one_stays(tmp_path: Path) -> None:
    fill(tmp_path, range(10, 71, 10))
    retain(tmp_path, CheckpointConfig(keep=1, keep_every=30))
    assert steps(tmp_path) == [30, 60, 70]


def test_the_best_stay(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 6))
    for step, score in ((1, 7.0), (2, -1.0), (3, 8.0), (4, 0.5)):
        note_score(tmp_path, step, score)
    note_score(tmp_path, 5, float("nan"))
    retain(tmp_path, CheckpointConfig(keep=1, keep_best=2))
    assert steps(tmp_path) == [2, 4, 5]
    assert set(scores(tmp_path)) == {2, 4}, "a score goes with its checkpoint"


def test_a_damaged_best_one_does_not_count(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 5))
    for step in range(1, 5):
        note_score(tmp_path, step, float(step))
    spoil(tmp_path / "step-00000001")
    retain(tmp_path, CheckpointConfig(keep=1, keep_best=1))
    assert steps(tmp_path) == [2, 4]


def test_a_pinned_one_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 5))
    pin(tmp_path, 2)
    pin(tmp_path, 2)
    retain(tmp_path, CheckpointConfig(keep=1))
    assert steps(tmp_path) == [2, 4]
    assert pinned(tmp_path) == {2}
    verify(tmp_path / "step-00000002")
    unpin(tmp_path, 2)
    unpin(tmp_path, 2)
    retain(tmp_path, CheckpointConfig(keep=1))
    assert steps(tmp_path) == [4]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    whole=st.lists(st.booleans(), min_size=1, max_size=7),
    rules=st.builds(
        CheckpointConfig,
        keep=st.integers(1, 3),
        keep_every=st.integers(0, 4),
        keep_best=st.integers(0, 2),
    ),
    scored=st.dictionaries(st.integers(1, 7), st.floats(-2, 2), max_size=5),
    pins=st.sets(st.integers(1, 7), max_size=2),
)
def test_no_rule_deletes_what_another_wants_or_the_last_whole_one(
    tmp_path_factory: pytest.TempPathFactory,
    whole: list[bool],
    rules: CheckpointConfig,
    scored: dict[int, float],
    pins: set[int],
) -> None:
    folder = fill(tmp_path_factory.mktemp("rules"), range(1, len(whole) + 1))
    for step, good in enumerate(whole, 1):
        if not good:
            spoil(folder / f"step-{step:08d}")
    for step, score in scored.items():
        note_score(folder, step, score)
    for step in pins:
        pin(folder, step)
    good = [step for step, is_good in enumerate(whole, 1) if is_good]
    wanted = set(good[-rules.keep :]) | (pins & set(range(1, len(whole) + 1)))
    wanted |= {step for step in good if rules.keep_every and step % rules.keep_every == 0}
    ranked = sorted((s for s in reversed(good) if s in scored), key=lambda s: scored[s])
    wanted |= set(ranked[: rules.keep_best])
    retain(folder, rules)
    left = steps(folder)
    assert wanted <= set(left)
    extra = [step for step in left if step in good and step not in wanted]
    assert not extra or len(good) < rules.keep
    if good:
        assert latest(folder) is not None


def test_a_link_is_unlinked_and_what_it_points_to_stays(tmp_path: Path) -> None:
    elsewhere = fill(tmp_path / "other run", [1])
    folder = fill(tmp_path / "checkpoints", [2, 3])
    (folder / "step-00000001").symlink_to(elsewhere / "step-00000001")
    assert steps(folder) == [1, 2, 3]
    retain(folder, CheckpointConfig(keep=1))
    assert steps(folder) == [3]
    verify(elsewhere / "step-00000001")


def test_what_a_rollback_set_aside_goes_when_the_new_course_is_past_it(tmp_path: Path) -> None:
    fill(tmp_path, [1, 2, 3])
    moved = abandon_after(tmp_path, 1)
    assert sorted(path.name for path in moved) == [
        "step-00000002.abandoned-1",
        "step-00000003.abandoned-1",
    ]
    assert steps(tmp_path) == [1]
    fill(tmp_path, [2])
    retain(tmp_path, CheckpointConfig(keep=1))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-00000002", "step-00000003.abandoned-1"]


# What was verified before


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that were read to be hashed."""
    seen: list[Path] = []
    plain = manifest._sha256
    monkeypatch.setattr(manifest, "_sha256", lambda path: seen.append(path) or plain(path))
    return seen


def test_a_checkpoint_is_hashed_once_and_again_when_it_changed(
    folder: Path, hashed: list[Path]
) -> None:
    path = folder / "step-00000010"
    known = VerifiedCache()
    assert known.is_whole(path)
    assert len(hashed) == 3
    hashed.clear()
    assert known.is_whole(path)
    assert hashed == []
    file = path / "__0_0.distcp"
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not known.is_whole(path), "same size, same time of change, other bits"
    assert not VerifiedCache().is_whole(path)


def test_a_copy_is_hashed_anew(folder: Path, hashed: list[Path]) -> None:
    known = VerifiedCache()
    assert known.is_whole(folder / "step-00000010")
    hashed.clear()
    shutil.copytree(folder / "step-00000010", folder / "new", copy_function=shutil.copy2)
    shutil.rmtree(folder / "step-00000010")
    (folder / "new").rename(folder / "step-00000010")
    assert known.is_whole(folder / "step-00000010")
    assert len(hashed) == 3


def test_a_lie_in_the_memory_does_not_make_a_torn_one_whole(folder: Path) -> None:
    known = VerifiedCache()
    known.note(folder / "step-00000010")
    (folder / "step-00000010" / "manifest.json").unlink()
    assert not known.is_whole(folder / "step-00000010")
    assert not VerifiedCache().is_whole(folder / "step-00000010")
    assert sample(10).keys() == sample(9).keys()
