"""Hugging Face datasets, map style: `map` with processes, `save_to_disk`, rows through torchdata.

Generous where there was a choice: tokenising and cutting into rows in one pass over the data (the
usual recipe takes two), rows stored as small as the vocabulary allows, no shuffle of documents.
For rows of a stored data set its documentation points to StatefulDataLoader to save and resume.
"""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.contender import Job, Settings, link_all
from benchmarks.tokens import Encoder, rows_of

NEEDS = ("datasets", "torchdata.stateful_dataloader")
BUILDS = True
SETTINGS: tuple[Settings, ...] = (
    {"num_workers": 0},
    {"num_workers": 1, "persistent_workers": True},
)


def prepare(job: Job) -> None:
    """Parquet to rows of tokens on disk."""
    import datasets

    encoder = Encoder(job.tokenizer)
    width = job.seq_len + 1
    kept: dict[str, Encoder] = {}

    def to_rows(batch: dict[str, list[str]]) -> dict[str, Any]:
        mine = kept.setdefault("encoder", encoder)
        return {"row": rows_of(mine.flat(batch["text"]), width)}

    kind = str(encoder.dtype.__name__)
    features = datasets.Features({"row": datasets.List(datasets.Value(kind), length=width)})
    data = datasets.load_dataset(
        "parquet", data_files=list(job.files), split="train", cache_dir=str(job.folder / "cache")
    )
    rows = data.map(
        to_rows,
        batched=True,
        batch_size=1000,
        num_proc=job.workers,
        remove_columns=data.column_names,
        features=features,
    )
    rows.save_to_disk(str(job.folder / "rows"), num_proc=job.workers)


def repeat(job: Job, long: Job, times: int) -> None:
    """The same Arrow files under more names."""
    rows, home = job.folder / "rows", long.folder / "rows"
    names = link_all(sorted(rows.glob("*.arrow")), home, times)
    state = json.loads((rows / "state.json").read_text())
    state["_data_files"] = [{"filename": name} for each in names for name in each]
    (home / "state.json").write_text(json.dumps(state))
    shutil.copy(rows / "dataset_info.json", home)


def open(job: Job, settings: Settings, state: Any = None) -> "Rows":
    """Shuffled rows, through torchdata's loader."""
    import datasets

    data = datasets.load_from_disk(str(job.folder / "rows")).with_format("torch")
    torch.manual_seed(job.seed)
    return Rows(data, len(data) // job.rows, job.rows, settings, state, shuffle=True)


class Rows:
    """Inputs and targets out of rows."""

    def __init__(
        self, data: Any, batches: int, rows: int, settings: Settings, state: Any, **more: Any
    ) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.batches = batches
        self.loader = StatefulDataLoader(data, batch_size=rows, drop_last=True, **settings, **more)
        if state is not None:
            self.loader.load_state_dict(state)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in self.loader:
            row = batch["row"].long()
            yield row[:, :-1], row[:, 1:]

    def state(self) -> Any:
        """The loader's own."""
        return self.loader.state_dict()
