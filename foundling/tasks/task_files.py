"""Rows of the public files that tasks are made of: JSON lines, JSON or Parquet, compressed or not.

A task's file is named with it (`gsm8k=PATH`), or looked for by its usual names in a folder.
"""

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foundling.config.errors import DataError
from foundling.runtime.files import cache_folder


def find_file(task: str, patterns: Sequence[str], given: str | None, folder: str | None) -> Path:
    """The file of a task: `given`, or the first that fits a pattern in `folder` (default: the
    cache's folder of tasks)."""
    if given:
        if not Path(given).is_file():
            raise DataError(f"{given} does not exist; give the file of {task}.")
        return Path(given)
    home = Path(folder) if folder else cache_folder("tasks")
    for pattern in patterns:
        found = sorted(home.rglob(pattern)) if home.is_dir() else []
        if found:
            return found[0]
    raise DataError(
        f"{task} needs its questions: give them as {task}=FILE, or a folder that holds"
        f" {patterns[0]} with --task-data (default: {cache_folder('tasks')})."
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Every row, in order."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
            return rows
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
        if text.lstrip().startswith("["):
            return [dict(row) for row in json.loads(text)]
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError, EOFError, zlib.error, TypeError) as error:
        raise DataError(f"{path} cannot be read as a task's questions ({error}).") from None


def need(row: dict[str, Any], fields: Sequence[str], path: Path, number: int) -> list[Any]:
    """The values of these fields, or a sentence that names the one that is not there."""
    for field in fields:
        if field not in row:
            raise DataError(f"row {number + 1} of {path} has no {field}.")
    return [row[field] for field in fields]
