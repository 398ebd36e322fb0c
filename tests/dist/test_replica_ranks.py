"""Replicas that differ by one bit are found under every layout; and what one rank cannot evaluate,
none does."""

from pathlib import Path

import replica_ranks
from forks import run_ranks

from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_dir import read_lines

EMBED, NORM, UP = "embed.weight", "layers.1.ffn_norm.weight", "layers.0.ffn.up.weight"
CASES: dict[str, tuple[dict[str, int], int, str, tuple[int, ...]]] = {
    "ddp": ({}, 2, UP, (2,)),
    "hsdp": ({"shard": 2}, 3, UP, (1, 3)),  # of a pair, either
    "replicas of tensor": ({"tensor": 2}, 1, EMBED, (1, 3)),
    "whole along tensor": ({"tensor": 2, "shard": 2}, 2, NORM, (2, 3)),
    "shards alone have no replica": ({"shard": 4}, 1, UP, ()),
}


def test_one_flipped_bit_is_found_by_every_rank(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    code = run_ranks(replica_ranks.replicas, CASES, processes=4, errors=errors)
    assert code == 0, errors.read_text()[-2000:]


def test_what_one_rank_cannot_evaluate_none_does(tmp_path: Path) -> None:
    code = run_ranks(replica_ranks.attempts, tmp_path, processes=3, errors=tmp_path / "errors")
    assert code == 0, (tmp_path / "errors").read_text()[-2000:]
    told = [(line["what"], line["step"]) for line in read_lines(RunDir(tmp_path).events_path)]
    assert told == [("evaluation", 5), ("evaluation", 6)]
    assert not (tmp_path / "tried.json").exists()


def test_a_time_limit_that_one_rank_knows_stops_all_and_is_no_failure(tmp_path: Path) -> None:
    code = run_ranks(replica_ranks.stops, tmp_path, processes=2, errors=tmp_path / "errors")
    assert code == 0, (tmp_path / "errors").read_text()[-2000:]
    assert read_lines(RunDir(tmp_path).events_path) == []
