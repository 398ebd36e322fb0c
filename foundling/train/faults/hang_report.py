"""HangReport: the culprit rank by heartbeats, stacks and the flight recorder."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundling.train.faults.heartbeat import FINISHED, Heartbeat, _named, process_state

# Each rank writes a file to the disk that all share, because a rank that hangs or is dead answers
# no message. Whether a rank still beats is seen from its file changing, never from comparing two
# machines' clocks. Of a process that was killed, the last beat is all that is known: it is at most
# five seconds old. Rejected: a file mapped into memory that holds the last collectives to the
# moment, because a full disk ends the process that writes to it with SIGBUS.


@dataclass(frozen=True)
class CulpritRank:
    """The ranks that differ from the others, and in what."""

    ranks: tuple[int, ...]
    why: str


@dataclass
class RankReport:
    """The last heartbeats of a job's ranks, and which processes are dead or silent."""

    beats: dict[int, Heartbeat]
    size: int
    dead: set[int] = field(default_factory=set)
    """Ranks whose process died without a report."""
    silent: set[int] = field(default_factory=set)
    """Ranks whose process has stopped beating."""

    @property
    def missing(self) -> list[int]:
        """Ranks without any heartbeat."""
        return [rank for rank in range(self.size) if rank not in self.beats]


def find_culprit(seen: RankReport) -> CulpritRank | None:
    """The ranks that hold up the others; None where no rank differs. Causes come before their
    consequences: a rank in another collective (others may crash of it), a dead rank, a silent one,
    one that the others wait for."""
    if seen.size < 2:
        return None
    turned = _different_collective(seen.beats)
    if turned is not None:
        return turned
    left = {r: b for r, b in seen.beats.items() if b.ended and b.ended != FINISHED}
    if seen.dead:
        return CulpritRank(
            tuple(sorted(seen.dead)), "gone without a word: killed, or out of memory"
        )
    if left:
        # A rank that only lost a peer left later, or says so.
        first = min(left, key=lambda rank: (_is_lost_peer(left[rank].ended), rank))
        return CulpritRank((first,), f"ended with {left[first].ended}")
    if seen.missing:
        return CulpritRank(tuple(seen.missing), "never heard of: it did not start, or not this far")
    if seen.silent:
        return CulpritRank(tuple(sorted(seen.silent)), "alive or not, it has stopped answering")
    return _rank_waited_for({r: b for r, b in seen.beats.items() if not b.ended})


def _different_collective(beats: Mapping[int, Heartbeat]) -> CulpritRank | None:
    """Ranks that entered another collective than the others under the same number: they left one
    out, or made one too many."""
    turns = {rank: {one.number: one for one in beat.entered} for rank, beat in beats.items()}
    common = set.intersection(*(set(turn) for turn in turns.values())) if turns else set()
    for number in sorted(common):
        at = {rank: turn[number] for rank, turn in turns.items()}
        kinds = Counter((one.name, one.step) for one in at.values())
        if len(kinds) == 1:
            continue
        # The larger party is right; of two equal ones the one that is not a step ahead, and within
        # one step the one that does what came next before.
        past = [next(iter(turns.values()))[n].name for n in sorted(common) if n < number]
        usual = max(kinds, key=lambda kind: (kinds[kind], -kind[1], _precedent(past, kind[0])))
        culprit = [rank for rank, one in at.items() if (one.name, one.step) != usual]
        other = at[culprit[0]]
        return CulpritRank(
            tuple(culprit),
            f"entered '{other.name}' of step {other.step + 1} as its collective number {number},"
            f" where the others entered '{usual[0]}' of step {usual[1] + 1}: it left one out, or"
            " made one too many",
        )
    return None


def _precedent(past: Sequence[str], name: str) -> int:
    """After how many of the newest collectives in a row `name` has come before; -1 for never."""
    best = -1
    for at in (n for n, one in enumerate(past) if one == name):
        alike = 0
        while alike < at and past[at - 1 - alike] == past[-1 - alike]:
            alike += 1
        best = max(best, alike)
    return best


def _rank_waited_for(beats: Mapping[int, Heartbeat]) -> CulpritRank | None:
    waiting = {rank: beat.inside for rank, beat in beats.items() if beat.inside is not None}
    if not waiting:
        return None
    absent = [rank for rank in beats if rank not in waiting]
    one = max(waiting.values(), key=lambda entered: entered.number)
    if absent:
        others = "the other waits" if len(waiting) == 1 else f"{len(waiting)} others wait"
        return CulpritRank(tuple(absent), f"in no collective, while {others} in {_named(one)}")
    behind = [rank for rank, entered in waiting.items() if entered.number < one.number]
    if behind:
        return CulpritRank(tuple(behind), f"behind: the others have come as far as {_named(one)}")
    return None


def _is_lost_peer(ending: str) -> bool:
    """Whether an error only says that another rank went away."""
    lower = ending.lower()
    signs = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed")
    return any(sign in lower for sign in (*signs, "nccl", "remote process"))


# The report of a job that stands still: the culprit first, then the other ranks, those at one place
# together.

SHOWN = 12
"""Frames of a stack that are shown; the rest is in the file."""


@dataclass(frozen=True)
class HangReport:
    """The report of a hang: the culprit ranks, one sentence, and the full text."""

    culprit: tuple[int, ...]
    sentence: str
    text: str


def make_report(why: str, seen: RankReport, folder: Path) -> HangReport:
    """Find the culprit of a hang from the beats and from torch's flight recorder."""
    culprit = find_culprit(seen)
    flight = flight_culprit({rank: read_flights(folder, rank) for rank in seen.beats})
    if culprit is None or not culprit.ranks:
        culprit = flight or culprit
    sentence = _sentence(why, seen, culprit)
    lines = [f"watchdog: {sentence}"]
    if flight is not None and flight is not culprit:
        lines.append(f"flight recorder: {_who(flight)}{flight.why}")
    first = [rank for rank in (culprit.ranks if culprit else ()) if rank in seen.beats]
    rest = [rank for rank in sorted(seen.beats) if rank not in first]
    for ranks in [*([rank] for rank in first), *_alike(seen, rest)]:
        lines += ["", *_about(seen, ranks)]
        if ranks[0] in first:
            lines += _own_stacks(folder, ranks[0])
    for rank in seen.missing:
        lines += ["", f"rank {rank}: never heard of"]
    lines += ["", f"all threads of every rank, and the flight recorder: {folder}"]
    return HangReport(culprit.ranks if culprit else (), sentence, "\n".join(lines))


def _sentence(why: str, seen: RankReport, culprit: CulpritRank | None) -> str:
    if culprit is None and seen.size > 1:
        return f"{why}; no rank differs from the others: look at the links with foundling doctor"
    if culprit is None:
        place = next((beat.place() for beat in seen.beats.values()), "nowhere")
        return f"{why}; the process is {place}"
    if not culprit.ranks:
        return f"{why}; {culprit.why}"
    places = [seen.beats[rank].place() for rank in culprit.ranks if rank in seen.beats]
    where = f"; it was {places[0]}" if places else ""
    return f"{why}; the culprit is {_who(culprit)}{culprit.why}{where}"


def _who(culprit: CulpritRank) -> str:
    if not culprit.ranks:
        return ""
    return f"{name_ranks(culprit.ranks)}: "


def _alike(seen: RankReport, ranks: Sequence[int]) -> list[list[int]]:
    """Ranks at the same place, which the report lists once."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank in ranks:
        beat = seen.beats[rank]
        inside = (beat.inside.name, beat.inside.number) if beat.inside else None
        key = (beat.stack, beat.phase, beat.step, inside, beat.ended, _state(seen, rank))
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _about(seen: RankReport, ranks: Sequence[int]) -> list[str]:
    beat = seen.beats[ranks[0]]
    who = name_ranks(ranks)
    state = _state(seen, ranks[0])
    lines = [f"{who}{state}: {beat.place()}, not moved for {beat.stall_s:.1f} s{_process(beat)}"]
    lines += [f"  ended: {beat.ended}"] if beat.ended else []
    hidden = len(beat.stack) - SHOWN
    lines += [f"  ... {hidden} frames further out"] if hidden > 0 else []
    return [*lines, *(f"  {frame}" for frame in beat.stack[-SHOWN:])]


def _process(beat: Heartbeat) -> str:
    return f" (process {beat.pid} on {beat.host})"


def _state(seen: RankReport, rank: int) -> str:
    if rank in seen.dead:
        return " (gone)"
    if rank in seen.silent:
        state = process_state(seen.beats[rank].pid)
        return " (stopped)" if state in ("T", "t") else " (does not answer)"
    return ""


def name_ranks(ranks: Sequence[int]) -> str:
    """Their numbers, the first few of many."""
    named = ", ".join(map(str, ranks[:16])) + (" and others" if len(ranks) > 16 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def _own_stacks(folder: Path, rank: int) -> list[str]:
    """What the culprit's own process wrote: the stacks of all its threads."""
    lines: list[str] = []
    for place in (folder, folder.parent):
        with contextlib.suppress(OSError):
            lines += (place / f"rank-{rank:05d}.stacks").read_text(errors="replace").splitlines()
    return ["  every thread of it:", *(f"    {line}" for line in lines[:60])] if lines else []


# Reading torch's flight recorder, rank by rank: which rank is behind or in another collective.
#
# It knows every collective of every process group, those inside DDP and FSDP too, which our own
# progress does not see; it does not know steps. Its files are JSON of torch's making and are read
# with care: what is not understood is left out.

NAMES = ("gloo.json", "nccl.json")
ROOTED = ("scatter", "gather", "broadcast", "reduce")
"""One rank gives or gets what the others do not: their tensors need not be alike."""


@dataclass(frozen=True)
class FlightRecord:
    """The collectives of one rank in one process group, by their number there."""

    group: str
    calls: Mapping[int, str]

    @property
    def last(self) -> int:
        return max(self.calls, default=0)


def flight_path(folder: Path, rank: int, name: str) -> Path:
    """Where a rank keeps one form of its record."""
    return folder / f"rank-{rank:05d}.{name}"


def read_flights(folder: Path, rank: int) -> dict[str, FlightRecord]:
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
            calls.setdefault(group, {})[int(entry.get("collective_seq_id", 0))] = _describe_call(
                entry
            )
    return {group: FlightRecord(group, found) for group, found in calls.items()}


def flight_culprit(
    flights: Mapping[int, Mapping[str, FlightRecord]],
) -> CulpritRank | None:
    """The rank that differs from the others of some process group; None where none does."""
    groups = dict.fromkeys(group for found in flights.values() for group in found)
    for group in groups:
        members = {rank: found[group] for rank, found in flights.items() if group in found}
        culprit = _different_in_group(group, members) or _behind_in_group(group, members)
        if culprit is not None:
            return culprit
    return None


def _different_in_group(group: str, members: Mapping[int, FlightRecord]) -> CulpritRank | None:
    common = _common(flight.calls for flight in members.values())
    for number in sorted(common):
        at = {rank: flight.calls[number] for rank, flight in members.items()}
        kinds = Counter(at.values())
        usual, count = kinds.most_common(1)[0]
        if len(kinds) > 1 and count * 2 > len(members):
            culprit = tuple(rank for rank, call in at.items() if call != usual)
            text = f"entered {at[culprit[0]]} where the others entered {usual}"
            return CulpritRank(culprit, f"as number {number} of group {group} it {text}")
        if len(kinds) > 1:
            text = "; ".join(f"rank {rank}: {call}" for rank, call in at.items())
            return CulpritRank(
                (), f"number {number} of group {group} is not the same everywhere: {text}"
            )
    return None


def _behind_in_group(group: str, members: Mapping[int, FlightRecord]) -> CulpritRank | None:
    furthest = max(flight.last for flight in members.values())
    behind = tuple(rank for rank, flight in members.items() if flight.last < furthest)
    if not behind:
        return None
    there = next(flight for flight in members.values() if flight.last == furthest)
    return CulpritRank(
        behind,
        f"has not entered collective number {furthest} of group {group},"
        f" {there.calls[furthest]}, in which the others wait",
    )


def _common(calls: Iterable[Mapping[int, str]]) -> set[int]:
    sets = [set(one) for one in calls]
    return set.intersection(*sets) if sets else set()


def _describe_call(entry: Mapping[str, Any]) -> str:
    name = str(entry.get("profiling_name", "?"))
    if name.rpartition(":")[2] in ROOTED:
        return name
    return f"{name} {entry.get('input_dtypes', [])} {entry.get('input_sizes', [])}"
