"""What must be true of a run under every layout; shared by the sample and the full matrix."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layout_ranks import rows_of, train_run
from worlds import World

from foundling.checkpoint.folders import list_checkpoints, step_of
from foundling.config.run import RunConfig
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.runtime.run_reader import read_events, step_lines

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))

from compare_runs import assert_same_run

TOLERANCE = 1e-4
ALONE = "one process"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    ALONE: (1, {}),
    "ddp 2": (2, {}),
    "ddp 4": (4, {}),
    "fsdp 2": (2, {"shard": 2}),
    "fsdp 4": (4, {"shard": 4}),
    "hsdp 2 x 2": (4, {"shard": 2}),
    "tensor 2": (2, {"tensor": 2}),
    "fsdp x tensor 2 x 2": (4, {"shard": 2, "tensor": 2}),
    "fsdp1 2": (2, {"shard": 2, "fsdp1": True}),
    "ddp 3": (3, {}),
    "fsdp 3": (3, {"shard": 3}),
}
"""Processes and degrees. The batch of eight rows does not divide by three."""
COUNTED = ("step", "lr", "tokens", "targets", "sources")
TINY = {
    "model.vocab-size": "0",
    "model.dim": "32",
    "model.layers": "2",
    "model.heads": "4",
    "model.ffn-dim": "64",
    "train.seq-len": "64",
    "train.batch-size": "2",
    "train.global-batch-tokens": "512",
    "train.threads": "1",
    "train.device": "cpu",
    "data.allow-repeat": "100",
    "checkpoint.keep": "9",
    "eval.tokens": "2000",
    "log.tensorboard": "false",
}


@dataclass(frozen=True)
class Proving:
    """Runs of one config under many layouts, in worlds that stay."""

    home: Path
    config: RunConfig
    worlds: Mapping[int, World]

    def train(self, name: str, run: Path, stop_at: int = 0) -> Path:
        """Begin `run` under a layout, or go on with it."""
        self.worlds[LAYOUTS[name][0]].run(train_run, self.laid_out(name), run, stop_at)
        return run

    def laid_out(self, name: str) -> RunConfig:
        """The config of a layout."""
        parallel = self.config.parallel.replace(**LAYOUTS[name][1])
        return self.config.replace(parallel=parallel)

    def whole(self, name: str) -> Path:
        """The run under one layout, not interrupted."""
        return self.train(name, self._place(name))

    def moved(self, one: str, other: str, step: int) -> Path:
        """What `one` had saved at a step, gone on with under `other`."""
        run = self._place(f"{one} at {step} to {other}")
        shutil.copytree(self._place(one), run)
        for folder in list_checkpoints(RunDir(run).checkpoints):
            if (step_of(folder) or 0) > step:
                shutil.rmtree(folder)
        RunDir(run).update_info(status="running")
        return self.train(other, run)

    def resized(self, names: list[str], every: int) -> Path:
        """One run that is told to stop every so many steps and goes on under another layout."""
        run = self._place(" to ".join(names))
        for number, name in enumerate(names, start=1):
            self.train(name, run, stop_at=every * number if number < len(names) else 0)
        return run

    def _place(self, name: str) -> Path:
        return self.home / name.replace(" ", "-")


def same_data(one: Path, other: Path) -> int:
    """Raise unless both runs ate the same, step by step and row by row, as far as `other` was
    watched; the rows compared."""
    left, right = (read_lines(RunDir(run).metrics_path) for run in (one, other))
    assert [[a[name] for name in COUNTED] for a in left] == [
        [b[name] for name in COUNTED] for b in right
    ], f"{other.name}: other counts"
    ledgers = [[line["sources"] for line in lines] for lines in (left, right)]
    assert ledgers[0] == ledgers[1], f"{other.name}: another ledger"
    wanted, found = rows_of(one), rows_of(other)
    assert found, f"{other.name}: nobody watched"
    for step, rows in found.items():
        assert rows == wanted[step], f"{other.name}: step {step} has read other rows"
    return sum(map(len, found.values()))


def farthest(one: Path, other: Path) -> float:
    """The largest difference of a loss between two runs; held-out scores count too."""
    pairs = []
    for what, field, read in (("steps", "loss", _steps), ("scores", "bpb", _scores)):
        left, right = read(one), read(other)
        assert [a["step"] for a in left] == [b["step"] for b in right], f"{other.name}: {what}"
        assert left, f"{one.name}: no {what}"
        pairs += [(a[field], b[field]) for a, b in zip(left, right, strict=True)]
    return max(abs(a - b) for a, b in pairs)


def same_bits(one: Path, other: Path) -> None:
    """Raise unless losses, norms, counts, ledger, scores, weights and moments are equal."""
    assert_same_run(one, other)
    left, right = ([line["sources"] for line in _steps(run)] for run in (one, other))
    assert left == right, f"{other.name}: another ledger"
    left, right = ([(e["step"], e["bpb"]) for e in _scores(run)] for run in (one, other))
    assert left == right, f"{other.name}: other scores"
    told = [read_events(RunDir(run)).measured["sampled"] for run in (one, other)]
    left, right = ([(line["step"], line["samples"]) for line in lines] for lines in told)
    assert left == right, f"{other.name}: other samples"


def _steps(run: Path) -> list[Mapping[str, Any]]:
    return list(step_lines(RunDir(run)))


def _scores(run: Path) -> Sequence[Mapping[str, Any]]:
    return read_events(RunDir(run)).measured["evaluated"]
