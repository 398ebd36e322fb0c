"""Steps of runs as one table, CSV or Parquet: every number of metrics.jsonl a column, a row a step.

The lines are read twice, for the names of the columns and for their values, so that a run of a
million steps is never held whole. What is nested has a name with dots: `sources.data/mine.tokens`.
"""

import csv
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from foundling.runtime.files import refuse_existing
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import numbers_of, step_lines

ROWS_AT_ONCE = 10_000
"""Rows of Parquet that are written together."""
Row = dict[str, Any]


def columns_of(runs: Sequence[RunDir]) -> list[str]:
    """Names of the columns, in the order in which they are met."""
    names = dict.fromkeys(["run", "step"])
    for row in rows_of(runs):
        names |= dict.fromkeys(row)
    return list(names)


def rows_of(runs: Sequence[RunDir]) -> Iterator[Row]:
    """A row a step, without what it has no number for."""
    for run in runs:
        name = run.path.resolve().name
        for line in step_lines(run):
            yield {"run": name, **dict(numbers_of(line))}


def print_csv(runs: Sequence[RunDir], out: IO[str]) -> None:
    """The table as CSV; a step without a number has an empty field."""
    writer = csv.DictWriter(out, columns_of(runs))
    writer.writeheader()
    writer.writerows(rows_of(runs))


def write_table(runs: Sequence[RunDir], path: Path, *, parquet: bool, force: bool) -> None:
    """The table as a file, whole or not there; a file that is there is replaced with `force`."""
    if not force:
        refuse_existing(path)
    working = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        if parquet:
            _write_parquet(runs, working)
        else:
            with open(working, "w", encoding="utf-8", newline="") as file:
                print_csv(runs, file)
        os.replace(working, path)
    finally:
        working.unlink(missing_ok=True)


def _write_parquet(runs: Sequence[RunDir], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"run": pa.string(), "step": pa.int64()}
    schema = pa.schema([(name, types.get(name, pa.float64())) for name in columns_of(runs)])
    rows = rows_of(runs)
    with pq.ParquetWriter(path, schema) as writer:
        while batch := list(islice(rows, ROWS_AT_ONCE)):
            columns = [
                [row.get(name) for row in batch]
                if name in types
                else [None if row.get(name) is None else float(row[name]) for row in batch]
                for name in schema.names
            ]
            arrays = [pa.array(c, t) for c, t in zip(columns, schema.types, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
