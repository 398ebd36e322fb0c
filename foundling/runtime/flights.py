"""Reading what torch's flight recorder wrote, rank by rank: who is behind, who took another turn.

It knows every collective of every process group, those inside DDP and FSDP too, which our own pulse
does not see; it does not know steps. Its files are JSON of torch's making and are read with care:
what is not understood is left out.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundling.runtime.beats import Odd

NAMES = ("gloo.json", "nccl.json")
ROOTED = ("scatter", "gather", "broadcast", "reduce")
"""One rank gives or gets what the others do not: their tensors need not be alike."""


@dataclass(frozen=True)
class Flight:
    """The collectives of one rank in one process group, by their number there."""

    group: str
    calls: Mapping[int, str]

    @property
    def last(self) -> int:
        return max(self.calls, default=0)


def flight_path(folder: Path, rank: int, name: str) -> Path:
    """Where a rank keeps one form of its record."""
    return folder / f"rank-{rank:05d}.{name}"


def read_flights(folder: Path, rank: int) -> dict[str, Flight]:
    """A rank's record, by process group."""
    calls: dict[str, dict[int, str]] = {}
    for name in NAMES:
        try:
            entries = json.loads(flight_path(folder, rank, name).read_text())["entries"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        for entry in entries:
            if entry.get("is_p2p"):
                continue
            group = " ".join(str(part) for part in entry.get("process_group", ["?"]))
            calls.setdefault(group, {})[int(entry.get("collective_seq_id", 0))] = _told(entry)
    return {group: Flight(group, found) for group, found in calls.items()}


def odd_by_flight(flights: Mapping[int, Mapping[str, Flight]]) -> Odd | None:
    """The rank that differs from the others of some process group; None where none does."""
    groups = dict.fromkeys(group for found in flights.values() for group in found)
    for group in groups:
        members = {rank: found[group] for rank, found in flights.items() if group in found}
        odd = _who_turned(group, members) or _who_is_behind(group, members)
        if odd is not None:
            return odd
    return None


def _who_turned(group: str, members: Mapping[int, Flight]) -> Odd | None:
    common = _common(flight.calls for flight in members.values())
    for number in sorted(common):
        at = {rank: flight.calls[number] for rank, flight in members.items()}
        kinds = Counter(at.values())
        usual, count = kinds.most_common(1)[0]
        if len(kinds) > 1 and count * 2 > len(members):
            odd = tuple(rank for rank, call in at.items() if call != usual)
            told = f"entered {at[odd[0]]} where the others entered {usual}"
            return Odd(odd, f"as number {number} of group {group} it {told}")
        if len(kinds) > 1:
            told = "; ".join(f"rank {rank}: {call}" for rank, call in at.items())
            return Odd((), f"number {number} of group {group} is not the same everywhere: {told}")
    return None


def _who_is_behind(group: str, members: Mapping[int, Flight]) -> Odd | None:
    furthest = max(flight.last for flight in members.values())
    behind = tuple(rank for rank, flight in members.items() if flight.last < furthest)
    if not behind:
        return None
    there = next(flight for flight in members.values() if flight.last == furthest)
    return Odd(
        behind,
        f"has not entered collective number {furthest} of group {group},"
        f" {there.calls[furthest]}, in which the others wait",
    )


def _common(calls: Iterable[Mapping[int, str]]) -> set[int]:
    sets = [set(one) for one in calls]
    return set.intersection(*sets) if sets else set()


def _told(entry: Mapping[str, Any]) -> str:
    name = str(entry.get("profiling_name", "?"))
    if name.rpartition(":")[2] in ROOTED:
        return name
    return f"{name} {entry.get('input_dtypes', [])} {entry.get('input_sizes', [])}"
