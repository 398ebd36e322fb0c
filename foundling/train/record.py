"""data_order.json: the segments a run reads by, and the settings they were made from.

A checkpoint holds its segments too; this file also holds those that began after it. So a run that
was killed between a new segment and its next checkpoint takes up the same segment again, although
the manifest that it follows has grown since.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foundling.config.errors import RunError
from foundling.data import Segment
from foundling.runtime.files import write_text_atomic
from foundling.runtime.rundir import RunDir
from foundling.train.resume import data_settings

ORDER_SCHEMA = 1


@dataclass(frozen=True)
class Recorded:
    """What a run was reading when it was last heard of."""

    settings: dict[str, Any]
    segments: tuple[Segment, ...]


def write_record(run: RunDir, settings: Mapping[str, Any], segments: Sequence[Segment]) -> None:
    """Replace the record; it is on disk before any unit of a new segment is read."""
    data = {
        "schema": ORDER_SCHEMA,
        "settings": dict(settings),
        "segments": [segment.to_json() for segment in segments],
    }
    write_text_atomic(run.order_path, json.dumps(data, indent=2) + "\n")


def read_record(
    run: RunDir, meta: Mapping[str, Any] | None, batch: int | None = None
) -> Recorded | None:
    """The record of a run, or what its checkpoint says where there is none; None if it has read
    nothing yet. `batch` is where the run stands, if that is not the checkpoint's step."""
    saved = _saved(meta) if meta else ()
    if not run.order_path.is_file():
        return Recorded(data_settings(meta["config"]), saved) if meta else None
    try:
        data = json.loads(run.order_path.read_text())
        known = data["schema"] == ORDER_SCHEMA
        record = Recorded(data["settings"], _segments(data["segments"]))
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise RunError(
            f"{run.order_path} is damaged or of another version; remove it to go on with what the"
            " last checkpoint says."
        )
    if meta is None:  # nothing was saved yet that it could differ from
        return record
    step = meta["step"] if batch is None else batch
    if _before(record.segments, step) != _before(saved, step):
        raise RunError(
            f"{run.order_path} and the checkpoint of step {step} tell of other data; the run"
            " directory mixes two runs."
        )
    return record


def _saved(meta: Mapping[str, Any]) -> tuple[Segment, ...]:
    """A checkpoint's segments; an older one has a single segment and its rows in the config."""
    train = meta["config"]["train"]
    rows = train["global_batch_tokens"] // train["seq_len"]
    return tuple(Segment.from_json(data, rows_per_step=rows) for data in meta["segments"])


def _segments(data: Sequence[Mapping[str, Any]]) -> tuple[Segment, ...]:
    return tuple(Segment.from_json(segment) for segment in data)


def _before(segments: Sequence[Segment], step: int) -> list[Segment]:
    return [segment for segment in segments if segment.first_step < step]
