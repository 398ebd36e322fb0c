"""litdata: `optimize` into chunks of tokens, read back as blocks by its streaming loader.

It empties its cache folders before it works, by default `chunks` and `data` in the temporary
directory, whoever they belong to; here both are put into the contender's own folder first.
"""

import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.contender import Job, Settings, link_all
from benchmarks.tokens import Encoder, texts

NEEDS = ("litdata",)
BUILDS = True
SETTINGS: tuple[Settings, ...] = (
    {"num_workers": 0},
    {"num_workers": 1, "persistent_workers": True},
)
CHUNK_BYTES = "64MB"


def _keep_in(job: Job) -> None:
    for variable, name in (
        ("DATA_OPTIMIZER_CACHE_FOLDER", "chunks"),
        ("DATA_OPTIMIZER_DATA_CACHE_FOLDER", "cached"),
        ("LITDATA_CACHE_DIR", "read"),
    ):
        os.environ[variable] = str(job.folder / name)
    os.environ["TMPDIR"] = str(job.folder)


def encode_file(file: str, folder: str) -> Iterator[torch.Tensor]:
    """The documents of a file, as its documentation's example yields them."""
    encoder = Encoder(folder)
    dtype = torch.uint16 if np.dtype(encoder.dtype).itemsize == 2 else torch.int32
    for batch in texts(file):
        for ids in encoder.documents(batch):
            yield torch.tensor(ids, dtype=dtype)


def prepare(job: Job) -> None:
    """Files to chunks, a worker a file."""
    _keep_in(job)
    import litdata

    litdata.optimize(
        fn=partial(encode_file, folder=job.tokenizer),
        inputs=list(job.files),
        output_dir=str(job.folder / "out"),
        chunk_bytes=CHUNK_BYTES,
        item_loader=litdata.TokensLoader(block_size=job.seq_len + 1),
        num_workers=job.workers,
        verbose=False,
    )


def repeat(job: Job, long: Job, times: int) -> None:
    """The same chunks under more names."""
    index = json.loads((job.folder / "out" / "index.json").read_text())
    files = [job.folder / "out" / chunk["filename"] for chunk in index["chunks"]]
    names = link_all(files, long.folder / "out", times)
    index["chunks"] = [
        {**chunk, "filename": name}
        for each in names
        for chunk, name in zip(index["chunks"], each, strict=True)
    ]
    (long.folder / "out" / "index.json").write_text(json.dumps(index))


def open(job: Job, settings: Settings, state: Any = None) -> "Blocks":
    """Shuffled blocks."""
    _keep_in(job)
    import litdata

    data = litdata.StreamingDataset(
        str(job.folder / "out"),
        item_loader=litdata.TokensLoader(block_size=job.seq_len + 1),
        shuffle=True,
        drop_last=True,
        seed=job.seed,
    )
    return Blocks(data, job.rows, settings, state)


class Blocks:
    """Inputs and targets out of blocks."""

    def __init__(self, data: Any, rows: int, settings: Settings, state: Any) -> None:
        import litdata

        self.batches = len(data) // rows
        self.loader = litdata.StreamingDataLoader(data, batch_size=rows, drop_last=True, **settings)
        if state is not None:
            self.loader.load_state_dict(state)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for block in self.loader:
            row = block.long()
            yield row[:, :-1], row[:, 1:]

    def state(self) -> Any:
        """The loader's own."""
        return self.loader.state_dict()
