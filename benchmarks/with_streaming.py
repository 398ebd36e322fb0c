"""Hugging Face datasets, streamed: the rows that `map` wrote, as an iterable with a shuffle buffer.

Tokens are made beforehand, as for everybody else; tokenising while training would only be slower.
Its shuffle is a buffer of 1,000 rows, where the others shuffle an epoch as a whole.
"""

from typing import Any

from benchmarks import with_datasets
from benchmarks.contender import Job, Settings

NEEDS = with_datasets.NEEDS
BUILDS = False
SETTINGS = with_datasets.SETTINGS
SHARDS = 64
BUFFER = 1000


def prepare(job: Job) -> None:
    """The same rows as for the map style."""
    with_datasets.prepare(job)


def repeat(job: Job, long: Job, times: int) -> None:
    """The same Arrow files under more names."""
    with_datasets.repeat(job, long, times)


def open(job: Job, settings: Settings, state: Any = None) -> with_datasets.Rows:
    """Shards in shuffled order, rows through a buffer, state as its documentation says."""
    import datasets

    data = datasets.load_from_disk(str(job.folder / "rows"))
    batches = len(data) // job.rows
    stream = data.to_iterable_dataset(num_shards=min(SHARDS, len(data)))
    stream = stream.shuffle(seed=job.seed, buffer_size=BUFFER).with_format("torch")
    return with_datasets.Rows(stream, batches, job.rows, settings, state)
