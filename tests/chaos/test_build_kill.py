"""kill -9 at random moments of a build: started again, it ends with the same bytes."""

import random
import sys
from pathlib import Path

import pytest
from build_victim import SAMPLES, build_here, kill_until_done

sys.path.insert(0, str(SAMPLES))
from build_samples import files, learn

KILLS = 5
WAYS = ({"workers": 2}, {"follow": True}, {})


def killed_builds(folder: Path, kills: int, rng: random.Random, each: int) -> int:
    """Builds of every way in turn, each killed `each` times at most, until `kills` have hit.

    Each must end as if undisturbed, and as if one worker had done it.
    """
    tokenizer = learn()
    tokenizer.save(folder / "tokenizer")
    hits = number = 0
    while hits < kills:
        way = WAYS[number % len(WAYS)]
        whole = folder / f"whole-{number % len(WAYS)}"
        if not whole.is_dir():
            build_here(whole, tokenizer, **{**way, "workers": 1})
        killed = folder / f"killed-{number}"
        hits += kill_until_done(killed, folder / "tokenizer", rng, min(each, kills - hits), **way)
        assert files(killed) == files(whole), (way, number)
        number += 1
    return hits


@pytest.mark.timeout(300)
def test_a_build_killed_at_random_moments_ends_with_the_same_bytes(tmp_path: Path) -> None:
    assert killed_builds(tmp_path, KILLS, random.Random(7), each=2) >= KILLS
