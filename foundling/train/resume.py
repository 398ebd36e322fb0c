"""Whether a run may go on with the settings it is given now.

A field that changes the mathematics is refused by name; cadences and conveniences may change, and
the change is recorded. What the run reads may change too: from the current step on, as a segment
of the data order, with everything that was read before still accounted for. Rejected: a list of the
forbidden fields, because a new field would be allowed by default.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from foundling.config.errors import RunError
from foundling.config.resolve import Change, differences
from foundling.config.sections import RunConfig
from foundling.data import DataSet, Segment

FREE_SECTIONS = ("log", "eval", "checkpoint", "guard")
FREE_FIELDS = (
    "data.prefetch",
    "data.allow_repeat",
    "data.follow_minutes",
    # How the work is laid out, and numbers kept or made again; not how they are rounded on the way.
    *(f"parallel.{name}" for name in ("replicate", "shard", "tensor", "fsdp1", "recompute")),
    *(f"parallel.{name}" for name in ("reshard", "prefetch", "bucket_mb", "offload")),
    "train.batch_size",  # the global batch is compared; how it is cut up is not the mathematics
    "train.device",
    # How the same numbers are computed; a resume that does not name them keeps to its choice.
    *(f"train.{name}" for name in ("attention", "attention_masked", "feed_forward", "loss")),
    "train.compile",
    "train.threads",
    "train.stop_after",
    "train.stop_margin",
)
FIXED_FIELDS = ("checkpoint.folder",)  # elsewhere there is nothing to go on from
DATA_FIELDS = (
    "data.sources",
    "data.weights_by",
    "data.packing",
    "data.buckets",
    "data.bucket_tokens",
    "data.phases",
    "data.follow",
    "train.seq_len",
)
"""What the segments of the data order are made from."""


def allowed_changes(old: RunConfig, new: RunConfig, where: str) -> list[Change]:
    """The changes between a run's config and the one given now; refuses those that matter."""
    changes = differences(old, new)
    refused = [change for change in changes if not _may_change(change.field)]
    if refused:
        told = "; ".join(f"{c.field} was {c.old!r} and is {c.new!r}" for c in refused)
        raise RunError(
            f"{where} cannot continue with other mathematics: {told}."
            " Give the same settings, or another --run."
        )
    return changes


def _may_change(field: str) -> bool:
    if field in FIXED_FIELDS:
        return False
    free = field.partition(".")[0] in FREE_SECTIONS or field in FREE_FIELDS
    return free or field in DATA_FIELDS


def data_settings(config: RunConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the data order was made from, as JSON keeps them; those that an older run
    did not know yet are as they were before anybody could set them."""
    tree, default = asdict(config) if isinstance(config, RunConfig) else config, asdict(RunConfig())
    found = {}
    for section, _, name in (field.partition(".") for field in DATA_FIELDS):
        found[f"{section}.{name}"] = tree[section].get(name, default[section][name])
    settings: dict[str, Any] = json.loads(json.dumps(found))
    return settings


def check_sources(segments: Sequence[Segment], datasets: Mapping[str, DataSet], where: str) -> None:
    """Refuse data that is not what the run has read under the same name, or that it has read under
    another: places in it would mean nothing, or would be read twice."""
    was = {name: segment for segment in segments for name in segment.digests}
    known = {segment.digests[name]: name for segment in segments for name in segment.digests}
    for name, dataset in datasets.items():
        if name in was:
            _check_digest(name, dataset, was[name], where)
            continue
        moved = known.get(dataset.digest)
        if moved is not None and moved not in datasets:
            raise RunError(
                f"{name} is the data set that {where} has read as {moved}; give it its old name (a"
                " symbolic link will do), so that nothing is read twice."
            )


def _check_digest(name: str, dataset: DataSet, segment: Segment, where: str) -> None:
    span = segment.shards.get(name)
    if span is not None and span[1] > len(dataset.shards):
        raise RunError(
            f"{name} has {len(dataset.shards)} shards and {where} has read from {span[1]}; bring"
            " the others back or give another --run."
        )
    found, wanted = dataset.digest_of(span), segment.digests[name]
    if found != wanted:
        raise RunError(
            f"{name} holds other data than {where} has read (digest {found[:12]}, was"
            f" {wanted[:12]}); bring the old data back, or give the new another folder and name it"
            " in data.sources."
        )
