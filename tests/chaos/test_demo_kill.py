"""Promise 1 on the whole walk: killed anywhere and started again, it is the same life."""

import hashlib
import random
from pathlib import Path

import pytest
from compare_runs import assert_same_run
from killed_demo import run_demo, run_killed

KILLS = 2


@pytest.mark.timeout(600)
def test_a_demo_that_is_killed_ends_the_same(tmp_path: Path) -> None:
    whole_s = run_demo(tmp_path / "whole", "tiny")
    hits = run_killed(tmp_path / "killed", "tiny", KILLS, whole_s, random.Random(4))
    assert hits >= 1, "the kills came too late to mean anything"
    for name in ("pretrain", "finetune"):
        assert_same_run(tmp_path / "whole" / name, tmp_path / "killed" / name)
    for name in ("text", "chat"):
        for shard in sorted((tmp_path / "whole" / name).rglob("*.arrow")):
            other = tmp_path / "killed" / shard.relative_to(tmp_path / "whole")
            assert digest(shard) == digest(other)
    one, other = (tmp_path / n / "transcript.txt" for n in ("whole", "killed"))
    assert one.read_text() == other.read_text()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
