"""The real training command, killed: nothing that was saved is lost, and the run ends the same.
(Two hundred times: tests/full/run_kills.py.)"""

import subprocess
import sys
from pathlib import Path

from killed_runs import ROOT, Killed, Order, assert_undisturbed

from foundling.config.load import dump_yaml
from foundling.config.run import RunConfig

ORDERS = (Order("self", 1, "stage", 20), Order("all", 0, "delete", 2))
"""One that the launcher itself makes good, and one that ends it too."""


def test_a_killed_run_ends_as_if_it_had_not_been(tiny: RunConfig, tmp_path: Path) -> None:
    config = tiny.replace(
        train={"horizon": 30, "batch_size": 2, "global_batch_tokens": 4 * 64},
        checkpoint={"every": 4},
        eval={"every": 10},
        data={"allow_repeat": 100},
    )
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(config))
    words = ["train", str(file), "--nproc", "2"]
    whole = [sys.executable, "-m", "foundling", *words, "--run", str(tmp_path / "whole")]
    subprocess.run(whole, cwd=ROOT, check=True, capture_output=True, timeout=120)
    killed = Killed(tmp_path / "killed", words)
    assert [killed.kill(order) for order in ORDERS] == [True, True]
    killed.finish()
    assert assert_undisturbed(tmp_path / "whole", killed.run) == 0
    assert killed.assert_taken_up() >= len(ORDERS)
