"""`bench train --layouts`: what is asked of each layout, and what is made of the ranks' numbers."""

import json
from typing import Any

import pytest

from foundling.bench.layouts import (
    LAYOUTS,
    LayoutTiming,
    bench_parallel,
    chosen,
    describe_parallel,
    laid_out,
    obstacle,
    result_of,
    same_losses,
)
from foundling.config.errors import ConfigError
from foundling.config.parallel import ParallelConfig
from foundling.config.run import RunConfig
from foundling.runtime.processes import ChildResult


def rank(step_s: float, alone_s: float | None, **more: Any) -> ChildResult:
    alone = None if alone_s is None else {"step_s": [alone_s] * 3, "optimizer_s": [0.1] * 3}
    tree = {
        "step_s": [step_s] * 3,
        "optimizer_s": [0.05] * 3,
        "losses": [3.0, 2.5],
        "positions": 1000,
        "memory": 10_000_000,
        "alone": alone,
        **more,
    }
    return ChildResult(0, f"noise\n{json.dumps(tree)}\n", "", 1.0)


def test_each_layout_has_its_degrees() -> None:
    given = ParallelConfig(recompute="all", shard=2, param_dtype="bf16", tensor=2)
    degrees = {
        name: (laid.replicate, laid.shard, laid.tensor, laid.fsdp1)
        for name in LAYOUTS
        for laid in [laid_out(name, 4, given)]
    }
    assert degrees == {
        "ddp": (4, 1, 1, False),
        "fsdp1": (1, 4, 1, True),
        "fsdp2": (1, 4, 1, False),
        "hsdp": (2, 2, 1, False),
    }
    assert laid_out("hsdp", 4, given).recompute == "all"
    assert laid_out("fsdp1", 4, given).param_dtype == "fp32"
    assert laid_out("ddp", 4, given) == ParallelConfig(replicate=4, recompute="all")
    assert laid_out("fsdp2", 4, given).param_dtype == "bf16"


def test_a_step_is_as_slow_as_its_slowest_rank_and_talk_is_what_the_work_does_not_explain() -> None:
    result = result_of("fsdp2", [rank(0.5, 0.4), rank(0.4, 0.3, memory=20_000_000)])
    assert result.tokens_per_s == 1000 / 0.5
    assert result.memory == 20_000_000
    assert result.talk_share == pytest.approx(1 - (0.3 + 0.05) / 0.5)
    assert result.loss == 2.5
    assert result_of("fsdp2", [rank(0.5, None)]).talk_share is None
    assert "30.0%" in describe_parallel([result], 2, "cpu")[2]
    fast = result_of("ddp", [rank(0.5, 0.6)])  # alone it took longer
    assert "below noise of 10.0%" in describe_parallel([fast], 2, "cpu")[2]


def test_a_layout_that_fails_is_named_and_the_next_is_measured(tiny: RunConfig) -> None:
    asked: list[tuple[int, int]] = []

    def start(config: RunConfig, processes: int) -> list[ChildResult]:
        asked.append((config.parallel.replicate, config.parallel.shard))
        if config.parallel.shard == 1:
            return [rank(0.5, 0.4), ChildResult(None, "", "", 9.0)]
        return [rank(0.5, 0.4)] * 2

    found = list(bench_parallel(tiny, LAYOUTS, 2, steps=1, limit_s=9, start=start))
    assert asked == [(2, 1), (1, 2), (1, 2)]
    assert found[0].refusal.startswith("rank 1: no answer within 9 s")
    assert [bool(one.refusal) for one in found] == [True, False, False, True]
    assert "hsdp needs 4 processes and there are 2" in found[3].refusal
    text = "\n".join(describe_parallel(found, 2, "cpu"))
    assert "hsdp: hsdp needs 4" in text
    assert "communication: the share of a step beyond" in text


def test_layouts_that_do_not_compute_the_same_are_not_believed() -> None:
    alike = [
        LayoutTiming("ddp", loss=2.5),
        LayoutTiming("fsdp2", loss=2.5001),
        LayoutTiming("hsdp", "no", loss=9),
    ]
    assert same_losses(alike) == ""
    assert "believe none" in same_losses([*alike, LayoutTiming("fsdp1", loss=2.6)])


def test_mistakes_are_named(tiny: RunConfig) -> None:
    assert chosen([]) == LAYOUTS
    with pytest.raises(ConfigError, match="--layouts zero is unknown here; there are ddp, fsdp1"):
        chosen(["ddp", "zero"])
    assert "even number" in obstacle("hsdp", 5)
    left = tiny.replace(train={"batch_size": 0})
    with pytest.raises(ConfigError, match=r"--train\.batch-size"):
        list(bench_parallel(left, ["ddp"], 2, steps=1, limit_s=9))
