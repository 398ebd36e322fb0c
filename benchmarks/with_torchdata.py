"""torchdata's StatefulDataLoader over a flat file of tokens, mapped: the leanest there is.

It brings no build and no format of its own. A file of tokens is what trainers without a data engine
use, and no format can be read faster; the sampler is torch's own, whose state torchdata keeps.
"""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.contender import Job, Settings
from benchmarks.tokens import Encoder, texts

NEEDS = ("torchdata.stateful_dataloader",)
BUILDS = False
SETTINGS: tuple[Settings, ...] = (
    {"num_workers": 0},
    {"num_workers": 1, "persistent_workers": True},
)


def prepare(job: Job) -> None:
    """All tokens in one file."""
    encoder = Encoder(job.tokenizer)
    with (job.folder / f"tokens.{encoder.dtype.__name__}").open("wb") as out:
        for file in job.files:
            for batch in texts(file):
                out.write(encoder.flat(batch).tobytes())


def repeat(job: Job, long: Job, times: int) -> None:
    """One file that is as much longer; what follows the tokens is a hole, which reads as zeros."""
    (file,) = job.folder.glob("tokens.*")
    shutil.copy(file, long.folder / file.name)
    os.truncate(long.folder / file.name, file.stat().st_size * times)


class Flat(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Row r is tokens [r * T, (r + 1) * T] of the file."""

    def __init__(self, job: Job) -> None:
        (file,) = job.folder.glob("tokens.*")
        self.tokens = np.memmap(file, np.dtype(file.suffix[1:]), "r")
        self.seq_len = job.seq_len

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.seq_len
        row = torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))
        return row[:-1], row[1:]


def open(job: Job, settings: Settings, state: Any = None) -> "Pairs":
    """Shuffled rows of the file."""
    torch.manual_seed(job.seed)
    return Pairs(Flat(job), job.rows, settings, state)


class Pairs:
    """Batches as torch's default collation makes them."""

    def __init__(self, data: Flat, rows: int, settings: Settings, state: Any) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.batches = len(data) // rows
        self.loader = StatefulDataLoader(
            data, batch_size=rows, shuffle=True, drop_last=True, **settings
        )
        if state is not None:
            self.loader.load_state_dict(state)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from self.loader

    def state(self) -> Any:
        """The loader's own."""
        return self.loader.state_dict()
