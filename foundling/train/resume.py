"""Whether a run may go on with the settings it is given now.

A field that changes the mathematics is refused by name; cadences and conveniences may change, and
the change is recorded. Rejected: a list of the forbidden fields, because a new field would be
allowed by default.
"""

from foundling.config.errors import RunError
from foundling.config.resolve import Change, differences
from foundling.config.sections import RunConfig

FREE_SECTIONS = ("log", "eval", "checkpoint")
FREE_FIELDS = (
    "data.prefetch",
    "data.allow_repeat",
    # How the work is laid out, and numbers kept or made again; not how they are rounded on the way.
    *(f"parallel.{name}" for name in ("replicate", "shard", "tensor", "fsdp1", "recompute")),
    *(f"parallel.{name}" for name in ("reshard", "prefetch", "bucket_mb", "offload")),
    "train.batch_size",  # the global batch is compared; how it is cut up is not the mathematics
    "train.device",
    "train.threads",
    "train.stop_after",
    "train.stop_margin",
)


def allowed_changes(old: RunConfig, new: RunConfig, where: str) -> list[Change]:
    """The changes between a run's config and the one given now; refuses those that matter."""
    changes = differences(old, new)
    refused = [change for change in changes if not _is_free(change.field)]
    if refused:
        told = "; ".join(f"{c.field} was {c.old!r} and is {c.new!r}" for c in refused)
        raise RunError(
            f"{where} cannot continue with other mathematics: {told}."
            " Give the same settings, or another --run."
        )
    return changes


def _is_free(field: str) -> bool:
    return field.partition(".")[0] in FREE_SECTIONS or field in FREE_FIELDS
