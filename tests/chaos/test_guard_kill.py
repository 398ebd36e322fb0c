"""A bad batch under the real command line, killed and replayed. (Every kind, three seeds, one and
two processes: tests/full/guards.py.)"""

from dataclasses import replace
from pathlib import Path

from guarded_runs import Case, check_case

from foundling.config import RunConfig
from foundling.config.resolve import dump_yaml


def test_a_spike_of_one_rank_sends_both_back(tiny: RunConfig, tmp_path: Path) -> None:
    config = replace(
        tiny,
        train=replace(tiny.train, steps=32, batch_size=2, global_batch_tokens=4 * 64),
        data=replace(tiny.data, allow_repeat=100),
    )
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(config))
    found = check_case(Case("a spike", 1, 2, 23), tmp_path / "runs", ["train", str(file)], kills=1)
    assert found["record"] == [("spike", [22, 24], 20)]
    assert found["counts"]["kills"] == 1
