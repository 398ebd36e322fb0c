"""Saved under one layout and gone on with under another, in processes that stay. (All eleven by
eleven: tests/full/layouts.py.)"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from layout_checks import ALONE, LAYOUTS, TINY, TOLERANCE, Proving, farthest, same_bits, same_data
from layout_ranks import train_planted, train_run
from worlds import World

from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.config.run import GuardConfig
from foundling.runtime.device import choose_device
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.runtime.run_reader import read_events

STEPS, SAVED = 8, 4
CLOCK = {
    "train.horizon": str(STEPS),
    "checkpoint.every": "4",
    "eval.every": "4",
}
SMALL = [name for name, (processes, _) in LAYOUTS.items() if processes < 3]
LARGE = ("hsdp 2 x 2", "fsdp x tensor 2 x 2")


@pytest.fixture(scope="module")
def prove(
    village: Any, opened: dict[int, World], tmp_path_factory: pytest.TempPathFactory
) -> Proving:
    config = load_config("hamlet", {**TINY, **CLOCK})
    data = config.data.replace(sources={str(village.text): 1.0})
    config = config.replace(data=data, eval={"prompts": ("About",)})
    return Proving(tmp_path_factory.mktemp("layouts"), config, opened)


@pytest.fixture(scope="module")
def whole(prove: Proving) -> dict[str, Path]:
    return {name: prove.whole(name) for name in (*SMALL, *LARGE)}


@pytest.mark.parametrize("name", [*SMALL[1:], *LARGE])
def test_a_layout_trains_as_one_process_does(name: str, whole: dict[str, Path]) -> None:
    """The same rows, losses, scores, norms, and as many samples."""
    one, many = whole[ALONE], whole[name]
    assert same_data(one, many) == 8 * STEPS
    assert farthest(one, many) < TOLERANCE
    norms = [[line["grad_norm"] for line in read_lines(r / "metrics.jsonl")] for r in (one, many)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    texts = [
        [line["step"] for line in read_events(RunDir(run)).measured["sampled"]]
        for run in (one, many)
    ]
    assert texts == [[4, 8], [4, 8]]


def test_every_layout_goes_on_under_every_other(prove: Proving, whole: dict[str, Path]) -> None:
    chance = random.Random(4)
    for name in SMALL:
        others = chance.sample([other for other in SMALL if other != name], 2)
        for run in (prove.moved(name, other, SAVED) for other in others):
            same_data(whole[ALONE], run)
            assert farthest(whole[ALONE], run) < TOLERANCE, run.name
    for name, other in zip(LARGE, ("tensor 2", "fsdp1 2"), strict=True):
        assert farthest(whole[ALONE], prove.moved(name, other, SAVED)) < TOLERANCE, name


@pytest.mark.parametrize("name", [name for name in SMALL if name != ALONE])
def test_a_layout_resumes_to_the_bit(name: str, prove: Proving, whole: dict[str, Path]) -> None:
    same_bits(whole[name], prove.moved(name, name, SAVED))


def test_a_run_that_changes_its_size_reads_the_same_rows(
    prove: Proving, whole: dict[str, Path]
) -> None:
    run = prove.resized([ALONE, "fsdp 3", "tensor 2", "ddp 3"], 2)
    assert same_data(whole[ALONE], run) == 8 * STEPS
    assert farthest(whole[ALONE], run) < TOLERANCE


@pytest.mark.parametrize("name", ["ddp 2", "fsdp 2"])
def test_what_one_rank_finds_bad_every_rank_leaves_out(name: str, prove: Proving) -> None:
    """A NaN in rank 1's part and a spike in rank 0's: as if both had never been."""
    guard = GuardConfig(spike_loss=12, spike_norm=12, hash_every=1)
    laid_out = prove.laid_out(name)
    config = laid_out.replace(guard=guard, train={"horizon": 12})
    faulty, clean = (prove.home / f"{kind}-{name.replace(' ', '-')}" for kind in ("bad", "good"))
    prove.worlds[2].run(train_planted, config, faulty, "nan:5,spike:10")
    record = read_events(RunDir(faulty)).record
    assert [(one["what"], one["skipped"], one["back_to"]) for one in record] == [
        ("nonfinite", [5, 6], None),
        ("spike", [9, 11], 8),
    ]
    clean.mkdir()
    (clean / "lock").touch()  # as a start leaves it that was cut off
    text = "".join(json.dumps(event) + "\n" for event in record)
    (clean / "events.jsonl").write_text(text)
    prove.worlds[2].run(train_run, config, clean)
    same_bits(clean, faulty)


def test_bf16_means_the_same_under_every_layout(prove: Proving, whole: dict[str, Path]) -> None:
    """fp32 weights, bf16 products, gradients added up in fp32: other sums of the same numbers are
    nearer to each other than bf16 is to fp32."""
    try:
        choose_device("cpu", "bf16")
    except ConfigError as refusal:  # some processors end a process that tries
        pytest.skip(str(refusal))
    narrow = prove.config.replace(train={"dtype": "bf16"})
    proving = Proving(prove.home / "bf16", narrow, prove.worlds)
    proving.home.mkdir()
    one = proving.whole(ALONE)
    rounding = farthest(whole[ALONE], one)
    assert rounding > 1e-5  # it was bf16
    assert max(farthest(one, proving.whole(name)) for name in ("ddp 2", "fsdp 2")) < rounding
    # Here a product's own sum is cut in two, and each half rounded.
    assert farthest(one, proving.whole("tensor 2")) < 2 * rounding
