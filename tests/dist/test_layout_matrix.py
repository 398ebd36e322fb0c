"""Saved under one layout and gone on with under another, in processes that stay. (All eleven by
eleven: tests/full/layouts.py.)"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from layout_checks import ALONE, LAYOUTS, TINY, TOLERANCE, Proving, farthest, same_bits, same_data
from worlds import worlds

from foundling.config.resolve import resolve

STEPS, SAVED = 12, 8
SIZES = (1, 2, 3)
SMALL = [name for name, (processes, _) in LAYOUTS.items() if processes in SIZES[:2]]


@pytest.fixture(scope="module")
def prove(village: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proving]:
    home = tmp_path_factory.mktemp("layouts")
    clock = {"train.steps": str(STEPS), "checkpoint.every": "4", "eval.every": "6"}
    config = resolve("hamlet", {**TINY, **clock})
    config = replace(config, data=replace(config.data, sources={str(village.text): 1.0}))
    with worlds(SIZES, home) as opened:
        yield Proving(home, config, opened)


@pytest.fixture(scope="module")
def whole(prove: Proving) -> dict[str, Path]:
    return {name: prove.whole(name) for name in SMALL}


def test_every_layout_goes_on_under_every_other(prove: Proving, whole: dict[str, Path]) -> None:
    chance = random.Random(4)
    for name in SMALL:
        others = chance.sample([other for other in SMALL if other != name], 2)
        for run in (whole[name], *(prove.moved(name, other, SAVED) for other in others)):
            same_data(whole[ALONE], run)
            assert farthest(whole[ALONE], run) < TOLERANCE, run.name


@pytest.mark.parametrize("name", [name for name in SMALL if name != ALONE])
def test_a_layout_resumes_to_the_bit(name: str, prove: Proving, whole: dict[str, Path]) -> None:
    same_bits(whole[name], prove.moved(name, name, SAVED))


def test_a_run_that_changes_its_size_reads_the_same_rows(
    prove: Proving, whole: dict[str, Path]
) -> None:
    run = prove.resized([ALONE, "fsdp 3", "tensor 2", "ddp 3"], 3)
    assert same_data(whole[ALONE], run) == 8 * STEPS
    assert farthest(whole[ALONE], run) < TOLERANCE
