"""grain: rows in ArrayRecord files, its documented format for random access, shuffled as a whole.

Records are written one a group, as its documentation asks for random access. It brings no build.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.contender import Job, Settings, link_all
from benchmarks.tokens import Encoder, rows_of, texts

NEEDS = ("grain", "array_record")
BUILDS = False
# Its default of 16 threads and 500 batches ahead, and leaner ones; a worker process as for others.
SETTINGS: tuple[Settings, ...] = (
    {"num_threads": 16, "ahead": 500, "num_workers": 0},
    {"num_threads": 1, "ahead": 2, "num_workers": 0},
    {"num_threads": 0, "ahead": 0, "num_workers": 0},
    {"num_threads": 1, "ahead": 2, "num_workers": 1},
)


def prepare(job: Job) -> None:
    """Rows as records."""
    from array_record.python import array_record_module

    encoder = Encoder(job.tokenizer)
    name = job.folder / f"rows.{encoder.dtype.__name__}.array_record"
    writer = array_record_module.ArrayRecordWriter(str(name), "group_size:1")
    for file in job.files:
        for batch in texts(file):
            for row in rows_of(encoder.flat(batch), job.seq_len + 1):
                writer.write(row.tobytes())
    writer.close()


def repeat(job: Job, long: Job, times: int) -> None:
    """The same records under more names."""
    link_all(sorted(job.folder.glob("*.array_record")), long.folder, times)


def open(job: Job, settings: Settings, state: Any = None) -> "Records":
    """The pipeline of its documentation: source, shuffle, map, batch, iterator."""
    import grain

    files = sorted(job.folder.glob("*.array_record"))
    dtype = np.dtype(files[0].name.split(".")[1])
    source = grain.sources.ArrayRecordDataSource(list(map(str, files)))
    data = (
        grain.MapDataset.source(source)
        .shuffle(seed=job.seed)
        .map(lambda record: np.frombuffer(record, dtype).astype(np.int64))
        .batch(job.rows, drop_remainder=True)
    )
    options = grain.ReadOptions(
        num_threads=settings["num_threads"], prefetch_buffer_size=settings["ahead"]
    )
    stream = data.to_iter_dataset(options)
    if settings["num_workers"]:
        stream = stream.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=settings["num_workers"])
        )
    return Records(stream, len(source) // job.rows, state)


class Records:
    """Inputs and targets out of rows."""

    def __init__(self, stream: Any, batches: int, state: Any) -> None:
        self.batches, self.stream = batches, stream
        self.iterator: Any = None
        self.start = state

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.iterator = iter(self.stream)
        if self.start is not None:
            self.iterator.set_state(self.start)
            self.start = None
        for rows in self.iterator:
            row = torch.from_numpy(rows)
            yield row[:, :-1], row[:, 1:]

    def state(self) -> Any:
        """The iterator's own."""
        return self.iterator.get_state()
