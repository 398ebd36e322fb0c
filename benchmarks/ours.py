"""foundling: `data build` and the loader, with everything on that is on by default.

The build drops duplicates, splits validation off, shuffles all documents, writes checksums. The
batches carry document boundaries besides inputs and targets. A state is the number of the step.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.contender import Job, Settings, link_all
from foundling.config.data import DataConfig
from foundling.config.data_manifest import Manifest
from foundling.data.batch_reader import BatchReader
from foundling.data.build.build import build
from foundling.data.dataset import DataSet
from foundling.data.open_source import open_source
from foundling.data.order import reopen_order
from foundling.tokenizer.tokenizer import Tokenizer

NEEDS: tuple[str, ...] = ()
BUILDS = True
# In this process, or by a thread that works ahead.
SETTINGS: tuple[Settings, ...] = ({"depth": 0}, {"depth": 2})


def prepare(job: Job) -> None:
    """Build a data set of the corpus."""
    source = open_source(str(Path(job.files[0]).parent))
    tokenizer = Tokenizer.load(job.tokenizer)
    build(source, tokenizer, job.folder / "set", seed=job.seed, workers=job.workers)


def repeat(job: Job, long: Job, times: int) -> None:
    """The same shards under more names, and a manifest of all of them."""
    folder, home = job.folder / "set", long.folder / "set"
    manifest = Manifest.load(folder)
    names = link_all([folder / info.name for info in manifest.train], home / "train", times)
    train = tuple(
        replace(info, name=f"train/{name}")
        for each in names
        for info, name in zip(manifest.train, each, strict=True)
    )
    replace(manifest, train=train, val=()).save(home)


def open(job: Job, settings: Settings, state: Any = None) -> "Steps":
    """The loader, from the step that a state says."""
    sources = {"bench": DataSet(job.folder / "set")}
    data = DataConfig(sources={"bench": 1.0}, packing="concat")
    tokens = job.rows * job.seq_len
    order = reopen_order(
        (), sources, data, seed=job.seed, seq_len=job.seq_len, steps=1, global_batch_tokens=tokens
    )
    loader = BatchReader(sources, order, micro_tokens=tokens)
    batches = sources["bench"].units(job.seq_len, "concat") // job.rows
    return Steps(loader, batches, json.loads(state or "0"), settings["depth"])


class Steps:
    """Steps of a run, an epoch's worth at a time."""

    def __init__(self, loader: BatchReader, batches: int, step: int, depth: int) -> None:
        self.loader, self.batches, self.step, self.depth = loader, batches, step, depth

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        end = (self.step // self.batches + 1) * self.batches
        if self.depth:
            steps = self.loader.prefetch(self.step, end, self.depth)
        else:
            steps = ((step, self.loader.step(step)) for step in range(self.step, end))
        for step, (batch,) in steps:
            self.step = step + 1
            yield torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)

    def state(self) -> str:
        """All that a resume needs."""
        return json.dumps(self.step)
