"""A build that is followed: shards come in waves, are only ever appended, and come the same way."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from build_samples import Numbers, documents, files, learn, make

from foundling.config.data_manifest import Manifest
from foundling.config.errors import DataError
from foundling.data.build import encode
from foundling.data.build.shard_writer import ShardWriter
from foundling.data.dataset import DataSet
from foundling.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Manifest]:
    """Every manifest that is published, as a follower would read it."""
    monkeypatch.setattr(encode, "PART_ROWS", 30)
    monkeypatch.setattr(sys.modules["foundling.data.build.build"], "SMALL_TOKENS", 0)
    found: list[Manifest] = []
    save = Manifest.save

    def saved(manifest: Manifest, folder: Path) -> None:
        save(manifest, folder)
        found.append(Manifest.load(folder))
        DataSet(folder, tokenizer=manifest.tokenizer, follow=True).verify()

    monkeypatch.setattr(Manifest, "save", saved)
    return found


def test_shards_come_in_waves_and_stay(
    seen: list[Manifest], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    manifest = make(Numbers(), tokenizer, tmp_path / "d", follow=True)
    assert [one.complete for one in seen] == [False] * (len(seen) - 1) + [True]
    assert len(seen) >= 4
    for earlier, later in pairwise(seen):
        assert later.train[: len(earlier.train)] == earlier.train
        assert later.val[: len(earlier.val)] == earlier.val
        assert len(later.train) > len(earlier.train) or later.complete
    # The first wave is one shard of 2,000 tokens and a little: training can start early.
    assert 2000 <= seen[0].train_tokens < 4000
    assert seen[-1] == manifest
    together = make(Numbers(), tokenizer, tmp_path / "whole")
    for split in ("train", "val"):
        one, other = (
            documents(DataSet(tmp_path / name, split=split), tokenizer) for name in ("d", "whole")
        )
        assert sorted(one) == sorted(other)
        assert len(set(one)) == len(one), "a copy came through in a later wave"
    assert together.recipe["result"] == manifest.recipe["result"]
    with pytest.raises(DataError, match="already holds"):
        make(Numbers(), tokenizer, tmp_path / "d")


def test_workers_and_interruptions_change_no_wave(
    seen: list[Manifest],
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make(Numbers(), tokenizer, tmp_path / "one", follow=True)
    wanted = list(seen)
    seen.clear()
    make(Numbers(), tokenizer, tmp_path / "many", follow=True, workers=2)
    assert seen == wanted
    assert files(tmp_path / "one") == files(tmp_path / "many")

    write, left = ShardWriter._write, [0]

    def interrupted(writer: ShardWriter, *given: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return write(writer, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardWriter, "_write", interrupted)
    seen.clear()
    for left[0], published in ((9, 2), (5, 3)):
        with pytest.raises(KeyboardInterrupt):
            make(Numbers(), tokenizer, tmp_path / "stopped", follow=True)
        assert len(seen) >= published
    make(Numbers(), tokenizer, tmp_path / "stopped", follow=True)
    # A follower never sees a manifest with less than the one before.
    sizes = [len(one.train) for one in seen]
    assert sizes == sorted(sizes)
    assert files(tmp_path / "one") == files(tmp_path / "stopped")


def test_a_budget_ends_the_last_wave(
    seen: list[Manifest], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    manifest = make(Numbers(count=None), tokenizer, tmp_path / "d", follow=True, max_tokens=9000)
    assert 9000 <= manifest.train_tokens < 9200
    assert manifest.complete
    assert not seen[0].complete


def test_a_manifest_of_another_schema_or_that_was_changed_is_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    make(Numbers(count=100), tokenizer, tmp_path / "d")
    path = tmp_path / "d/manifest.json"
    stored = json.loads(path.read_text())
    for change, told in (
        ({"complete": False}, "changed after"),
        ({"seal": ""}, "changed after"),
        ({"schema": 1}, "has schema 1 and this version reads 2"),
        ({"schema": 3}, "has schema 3"),
    ):
        path.write_text(json.dumps({**stored, **change}))
        with pytest.raises(DataError, match=told):
            Manifest.load(tmp_path / "d")
    del stored["seal"]
    path.write_text(json.dumps(stored))
    with pytest.raises(DataError, match="changed after"):
        Manifest.load(tmp_path / "d")
