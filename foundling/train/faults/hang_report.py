"""HangReport: the culprit rank by heartbeats, stacks and the flight recorder."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundling.train.faults.heartbeat import FINISHED, Heartbeat, collective_in_words, process_state


@dataclass(frozen=True)
class Culprit:
    """The ranks that differ from the others, and in what."""

    ranks: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        return f"{name_ranks(self.ranks)}: {self.why}" if self.ranks else self.why


@dataclass
class RankStates:
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


def find_culprit(states: RankStates) -> Culprit | None:
    """The ranks that hold up the others; None where no rank differs. Causes come before their
    consequences: a rank in another collective (others may crash of it), a dead rank, a silent one,
    one that the others wait for."""
    if states.size < 2:
        return None
    if (culprit := _different_collective(states.beats)) is not None:
        return culprit
    left = {r: b.ended for r, b in states.beats.items() if b.ended and b.ended != FINISHED}
    if states.dead:
        return Culprit(tuple(sorted(states.dead)), "gone without a word: killed, or out of memory")
    if left:
        # A rank that only lost a peer left later, or says so.
        first = min(left, key=lambda rank: (_is_lost_peer(left[rank]), rank))
        return Culprit((first,), f"ended with {left[first]}")
    if states.missing:
        return Culprit(tuple(states.missing), "never heard of: it did not start, or not this far")
    if states.silent:
        return Culprit(tuple(sorted(states.silent)), "alive or not, it has stopped answering")
    return _rank_waited_for({r: b for r, b in states.beats.items() if not b.ended})


def _different_collective(beats: Mapping[int, Heartbeat]) -> Culprit | None:
    """Ranks that entered another collective than the others under the same number: they left one
    out, or made one too many."""
    entered = {rank: {one.number: one for one in beat.entered} for rank, beat in beats.items()}
    common = sorted(set.intersection(*map(set, entered.values()))) if entered else []
    for place, number in enumerate(common):
        at = {rank: by_number[number] for rank, by_number in entered.items()}
        kinds = Counter((one.name, one.step) for one in at.values())
        if len(kinds) == 1:
            continue
        # The larger party is right; of two equal ones the one that is not a step ahead, and within
        # one step the one that does what came next before.
        past = [next(iter(entered.values()))[n].name for n in common[:place]]
        usual = max(kinds, key=lambda kind: (kinds[kind], -kind[1], _precedent(past, kind[0])))
        culprits = [rank for rank, one in at.items() if (one.name, one.step) != usual]
        other = at[culprits[0]]
        return Culprit(
            tuple(culprits),
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


def _rank_waited_for(beats: Mapping[int, Heartbeat]) -> Culprit | None:
    waiting = {rank: beat.inside for rank, beat in beats.items() if beat.inside is not None}
    if not waiting:
        return None
    absent = tuple(rank for rank in beats if rank not in waiting)
    last = max(waiting.values(), key=lambda entered: entered.number)
    if absent:
        others = "the other waits" if len(waiting) == 1 else f"{len(waiting)} others wait"
        return Culprit(absent, f"in no collective, while {others} in {collective_in_words(last)}")
    behind = tuple(rank for rank, entered in waiting.items() if entered.number < last.number)
    if behind:
        return Culprit(
            behind, f"behind: the others have come as far as {collective_in_words(last)}"
        )
    return None


def _is_lost_peer(ending: str) -> bool:
    """Whether an error only says that another rank went away."""
    lower = ending.lower()
    signs = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed")
    return any(sign in lower for sign in (*signs, "nccl", "remote process"))


# The report of a job that stands still: the culprit first, then the other ranks, those at one place
# together.

SHOWN_FRAMES = 12
"""Frames of a stack that are shown; the rest is in the file."""


@dataclass(frozen=True)
class HangReport:
    """The report of a hang: the culprit ranks, one sentence, and the full text."""

    culprit: tuple[int, ...]
    sentence: str
    text: str


def make_report(why: str, states: RankStates, folder: Path) -> HangReport:
    """Find the culprit of a hang from the heartbeats and from torch's flight recorder."""
    culprit = find_culprit(states)
    flight = flight_culprit({rank: read_flights(folder, rank) for rank in states.beats})
    if culprit is None:
        culprit, flight = flight, None
    first = [rank for rank in (culprit.ranks if culprit else ()) if rank in states.beats]
    sentence = f"{why}; {_finding(states, culprit, first)}"
    lines = [f"watchdog: {sentence}"]
    if flight is not None:
        lines.append(f"flight recorder: {flight}")
    for rank in first:
        lines += ["", *_about(states, [rank]), *_own_stacks(folder, rank)]
    for ranks in _alike(states, [rank for rank in sorted(states.beats) if rank not in first]):
        lines += ["", *_about(states, ranks)]
    for rank in states.missing:
        lines += ["", f"rank {rank}: never heard of"]
    lines += ["", f"all threads of every rank, and the flight recorder: {folder}"]
    return HangReport(culprit.ranks if culprit else (), sentence, "\n".join(lines))


def _finding(states: RankStates, culprit: Culprit | None, first: Sequence[int]) -> str:
    if culprit is None and states.size > 1:
        return "no rank differs from the others: look at the links with foundling doctor"
    if culprit is None:
        return f"the process is {states.beats[0].place() if 0 in states.beats else 'nowhere'}"
    if not culprit.ranks:
        return culprit.why
    where = f"; it was {states.beats[first[0]].place()}" if first else ""
    return f"the culprit is {culprit}{where}"


def _alike(states: RankStates, ranks: Sequence[int]) -> list[list[int]]:
    """Ranks at the same place, which the report lists once."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank in ranks:
        beat = states.beats[rank]
        inside = (beat.inside.name, beat.inside.number) if beat.inside else None
        key = (beat.stack, beat.phase, beat.step, inside, beat.ended, _state(states, rank))
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _about(states: RankStates, ranks: Sequence[int]) -> Iterator[str]:
    beat = states.beats[ranks[0]]
    process = f"(process {beat.pid} on {beat.host})"
    yield (
        f"{name_ranks(ranks)}{_state(states, ranks[0])}: {beat.place()}, not moved for"
        f" {beat.stall_s:.1f} s {process}"
    )
    if beat.ended:
        yield f"  ended: {beat.ended}"
    if (hidden := len(beat.stack) - SHOWN_FRAMES) > 0:
        yield f"  ... {hidden} frames further out"
    yield from (f"  {frame}" for frame in beat.stack[-SHOWN_FRAMES:])


def _state(states: RankStates, rank: int) -> str:
    if rank in states.dead:
        return " (gone)"
    if rank in states.silent:
        is_stopped = process_state(states.beats[rank].pid) in ("T", "t")
        return " (stopped)" if is_stopped else " (does not answer)"
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


# torch's flight recorder knows every collective of every process group, those inside DDP and FSDP
# too, which our own progress does not see; it does not know steps. Its files are JSON of torch's
# making: what is not understood is left out.

NAMES = ("gloo.json", "nccl.json")
ROOTED = ("scatter", "gather", "broadcast", "reduce")
"""One rank gives or gets what the others do not: their tensors need not be alike."""
Calls = Mapping[str, Mapping[int, str]]
"""A rank's collectives: by process group and their number there, in words."""


def flight_path(folder: Path, rank: int, name: str) -> Path:
    """Where a rank keeps one form of its record."""
    return folder / f"rank-{rank:05d}.{name}"


def read_flights(folder: Path, rank: int) -> Calls:
    """What a rank's flight recorder has kept."""
    calls: dict[str, dict[int, str]] = {}
    for name in NAMES:
        try:
            entries = json.loads(flight_path(folder, rank, name).read_text())["entries"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        for entry in entries:
            if not entry.get("is_p2p"):
                group = " ".join(str(part) for part in entry.get("process_group", ["?"]))
                number = int(entry.get("collective_seq_id", 0))
                calls.setdefault(group, {})[number] = _describe_call(entry)
    return calls


def _describe_call(entry: Mapping[str, Any]) -> str:
    name = str(entry.get("profiling_name", "?"))
    if name.rpartition(":")[2] in ROOTED:
        return name
    return f"{name} {entry.get('input_dtypes', [])} {entry.get('input_sizes', [])}"


def flight_culprit(flights: Mapping[int, Calls]) -> Culprit | None:
    """The rank that differs from the others of some process group; None where none does."""
    for group in dict.fromkeys(group for calls in flights.values() for group in calls):
        members = {rank: calls[group] for rank, calls in flights.items() if group in calls}
        culprit = _different_in_group(group, members) or _behind_in_group(group, members)
        if culprit is not None:
            return culprit
    return None


def _different_in_group(group: str, members: Mapping[int, Mapping[int, str]]) -> Culprit | None:
    for number in sorted(set.intersection(*map(set, members.values()))):
        at = {rank: calls[number] for rank, calls in members.items()}
        ((usual, count), *others) = Counter(at.values()).most_common()
        if not others:
            continue
        if count * 2 > len(members):
            ranks = tuple(rank for rank, call in at.items() if call != usual)
            text = f"entered {at[ranks[0]]} where the others entered {usual}"
            return Culprit(ranks, f"as number {number} of group {group} it {text}")
        text = "; ".join(f"rank {rank}: {call}" for rank, call in at.items())
        return Culprit((), f"number {number} of group {group} is not the same everywhere: {text}")
    return None


def _behind_in_group(group: str, members: Mapping[int, Mapping[int, str]]) -> Culprit | None:
    last = {rank: max(calls, default=0) for rank, calls in members.items()}
    furthest = max(last.values())
    behind = tuple(rank for rank, number in last.items() if number < furthest)
    if not behind:
        return None
    call = next(calls[furthest] for calls in members.values() if furthest in calls)
    return Culprit(
        behind,
        f"has not entered collective number {furthest} of group {group}, {call}, in which the"
        " others wait",
    )
