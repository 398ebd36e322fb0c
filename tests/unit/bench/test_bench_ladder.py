"""`bench ladder`: what each rung is asked, and what is made of its answer."""

import json

import pytest

from foundling.bench.ladder import LADDER, bench_ladder, describe_ladder
from foundling.config import RunConfig
from foundling.config.resolve import resolve
from foundling.runtime.children import Ended


def test_each_rung_adds_what_its_name_says() -> None:
    config = resolve("llama-1.24b", {})
    rungs = [rung.config(config) for rung in LADDER]
    assert [c.train.compiles for c in rungs] == [False, True, True, True, True, True]
    assert [c.train.dtype for c in rungs] == ["fp32", "fp32", *["auto"] * 4]
    assert [rung.fused for rung in LADDER] == [False, False, False, True, True, True]
    assert [c.parallel.recompute for c in rungs] == [*["none"] * 4, "every-2", "all"]
    assert all(c.train.loss == "plain" for c in rungs)
    # Theirs kept every score in fp32; nobody reaches their speed so in bf16.
    for masks in ("attention", "attention_masked"):
        assert [getattr(c.train, masks) for c in rungs] == ["math", "math", *["auto"] * 4]
    for rung in LADDER:  # their own arithmetic, to the figure they printed
        told = rung.batch * 2048 / rung.step_s
        assert told == pytest.approx(rung.tokens_per_s, rel=0.01)


def test_a_rung_that_fails_leaves_the_rest(small: RunConfig) -> None:
    asked = []

    def start(given: str) -> Ended:
        asked.append(json.loads(given))
        if len(asked) == 1:
            return Ended(1, "", "Traceback\nboom", 1.0)
        row = {"rows": 4, "step_s": 0.5, "reserved": 2e9, "allocated": 1e9, "tokens_per_s": 256.0}
        return Ended(
            0, "noise\n" + json.dumps({"same": None, "largest": row, "chosen": []}), "", 1.0
        )

    found = list(
        bench_ladder(small, steps=2, most=8, memory_gb=0, limit_s=9, only=(1, 3), start=start)
    )
    assert [one.name for one in found] == ["fp32, eager", "+ bf16"]
    assert [given["batch"] for given in asked] == [3, 8]
    assert found[0].refusal == "boom"
    lines = describe_ladder(found, "here")
    assert any("62,400" in line and "2.0 GB" in line for line in lines)
    assert "fp32, eager: boom" in lines


def test_a_rung_climbs_in_a_process_of_its_own(small: RunConfig) -> None:
    (found,) = bench_ladder(small, steps=1, most=4, memory_gb=0, limit_s=120, only=(1,))
    assert found.refusal == ""
    assert found.same is not None
    assert found.largest is not None
    assert (found.same["rows"], found.largest["rows"]) == (3, 4)
    assert found.largest["tokens_per_s"] == pytest.approx(4 * 32 / found.largest["step_s"])
