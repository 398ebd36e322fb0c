"""What a model has eaten in its whole life: its own ledger and its ancestors', source by source.

A run that starts from another's weights has eaten what those weights had: the parent's ledger up to
the step they were taken from, and so on up the line. Restarts need no care, because a resume cuts
the lines after its checkpoint.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foundling.plan.diet import COUNTS, with_shares
from foundling.report.markup import Markup, join, table, tag
from foundling.report.numbers import compact, percent
from foundling.report.read import Line, RunData, ledger_lines
from foundling.runtime.rundir import RunDir


@dataclass(frozen=True)
class Diet:
    """What one run added."""

    path: str
    stage: str
    steps: int
    sources: dict[str, dict[str, float]]
    """By source: units, positions, tokens, targets, and epochs (how often it was read)."""
    missing: str = ""
    """Why nothing is known, in a sentence."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, with each source's share of the run's units and tokens."""
        return {**asdict(self), "sources": with_shares(self.sources)}


def diets(run: RunDir) -> list[Diet]:
    """What a run and each of its ancestors added, oldest first."""
    found: list[Diet] = []
    seen = set()
    here: RunDir | None = run
    last: int | None = None
    while here is not None and here.path.resolve() not in seen:
        seen.add(here.path.resolve())
        info = here.read_info()
        found.insert(0, _diet(here, info, last))
        stated, here = info.get("parent"), here.parent()
        if not stated:
            break
        last = int(stated["step"])
        if here is None:
            told = f"{stated['path']} is not there, and what it ate is not counted."
            found.insert(0, Diet(str(stated["path"]), "unknown", last, {}, told))
    return found


def _diet(run: RunDir, info: Line, last: int | None) -> Diet:
    """One run's ledger, up to the step `last` if one is given."""
    lines, _ = ledger_lines(run)
    read = [line for line in lines if last is None or line["step"] <= last]
    steps = max((int(line["step"]) for line in read), default=0)
    untold = not lines and run.metrics_path.is_file()
    told = f"{run.path} has no ledger.jsonl, and what it ate is not counted." if untold else ""
    return Diet(str(run.path), str(info.get("stage", "run")), steps, added_up(read), told)


def added_up(lines: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Lines of ledger.jsonl as totals by source; epochs are where the last line left them."""
    total: dict[str, dict[str, float]] = {}
    for line in lines:
        for name, counts in line["sources"].items():
            row = total.setdefault(name, {**dict.fromkeys(COUNTS, 0), "epochs": 0.0})
            for field in COUNTS:
                row[field] += counts[field]
            row["epochs"] = counts["epochs"]
    return total


def reading(data: RunData) -> Markup:
    """The same for one run's chapter of the page."""
    sources = with_shares(added_up(ledger_lines(data.run)[0]))
    if not sources:
        return Markup("")
    rows = [
        [
            name,
            f"{counts['units']:,}",
            compact(counts["tokens"]),
            compact(counts["targets"]),
            f"{counts['epochs']:.3f}",
            percent(counts["units_share"]),
            percent(counts["tokens_share"]),
        ]
        for name, counts in sources.items()
    ]
    head = ["", "units", "tokens", "targets", "epochs", "share of units", "share of tokens"]
    caption = "Units are packed rows; targets are the tokens that the loss counted"
    return join([tag("h3", "What it read"), table(caption, head, rows)])
