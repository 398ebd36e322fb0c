"""What was read, as a table: by stage and source, with each source's achieved share.

`train` prints it when a run ends and `runs show` for a model's whole life, so it stands below both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from foundling.config.sections import DataConfig

COUNTS = ("units", "positions", "tokens", "targets")
Counts = Mapping[str, float]
_HEAD = ["stage", "source", "units", "tokens", "targets", "epochs", "of units", "of tokens"]
_TEXT = 2  # columns of words; the others are numbers and stand to the right


def with_shares(sources: Mapping[str, Counts]) -> dict[str, dict[str, float]]:
    """Each source's counts, and its shares of all units and tokens."""
    totals = {field: max(sum(c[field] for c in sources.values()), 1) for field in COUNTS}
    return {
        name: {
            **counts,
            "units_share": counts["units"] / totals["units"],
            "tokens_share": counts["tokens"] / totals["tokens"],
        }
        for name, counts in sources.items()
    }


def added_up(parts: Sequence[Mapping[str, Counts]]) -> dict[str, float]:
    """All sources of all parts together."""
    return {
        field: sum(counts[field] for part in parts for counts in part.values()) for field in COUNTS
    }


def diet_table(parts: Sequence[tuple[str, Mapping[str, Counts]]]) -> list[str]:
    """(stage, counts by source) for each run of a life, as lines of text with a total."""
    rows = [_HEAD]
    for stage, sources in parts:
        shared = with_shares(sources)
        rows += [[stage, name, *_cells(shared[name])] for name in shared]
    total = added_up([sources for _, sources in parts])
    rows.append(["total", "", *(f"{total[field]:,}" for field in _HEAD[2:5]), "", "", ""])
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    return ["  ".join(_aligned(row, widths)).rstrip() for row in rows]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    words = zip(row[:_TEXT], widths[:_TEXT], strict=True)
    numbers = zip(row[_TEXT:], widths[_TEXT:], strict=True)
    return [cell.ljust(w) for cell, w in words] + [cell.rjust(w) for cell, w in numbers]


def _cells(counts: Counts) -> list[str]:
    shares = [f"{counts['units_share']:.2%}", f"{counts['tokens_share']:.2%}"]
    return [*(f"{counts[field]:,}" for field in _HEAD[2:5]), f"{counts['epochs']:.3f}", *shares]


def asked_for(data: DataConfig) -> list[str]:
    """The mixture as it was asked for, phase by phase, to stand beside what was achieved."""
    return [
        f"asked for, by {data.weights_by}: {_weights(data.sources)}",
        *(f"from {_when(p.at)} on: {_weights(p.sources)}" for p in data.phases if p.sources),
    ]


def _when(at: float) -> str:
    return f"{at:.0%} of the steps" if at < 1 else f"step {at:g}"


def _weights(sources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {weight:g}" for name, weight in sources.items())


def by_documents(epochs: Mapping[str, float], documents: Mapping[str, int]) -> list[str]:
    """What was read in documents: epochs times a source's own, because rows know no documents."""
    read = {name: passes * documents[name] for name, passes in epochs.items() if name in documents}
    total = sum(read.values())
    if not total:
        return []
    shares = (f"{name} about {n:,.0f} ({n / total:.2%})" for name, n in read.items())
    return [f"read, in documents: {', '.join(shares)}"]


def as_counts(ledger: Mapping[str, Any], epochs: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """A ledger's JSON with the epochs beside the counts."""
    return {name: {**counts, "epochs": epochs.get(name, 0.0)} for name, counts in ledger.items()}
