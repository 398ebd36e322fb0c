"""The report of a job that stands still: the odd one out first, then everybody, alike together."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foundling.runtime.beats import Beat, Odd, Seen, find_odd
from foundling.runtime.flights import odd_by_flight, read_flights
from foundling.runtime.stacks import process_state

SHOWN = 12
"""Frames of a stack that are shown; the rest is in the file."""


@dataclass(frozen=True)
class Report:
    """What is told of a hang."""

    odd: tuple[int, ...]
    sentence: str
    text: str


def make_report(why: str, seen: Seen, folder: Path) -> Report:
    """Work out who holds the job up, from the beats and from torch's flight recorder."""
    odd = find_odd(seen)
    flight = odd_by_flight({rank: read_flights(folder, rank) for rank in seen.beats})
    if odd is None or not odd.ranks:
        odd = flight or odd
    sentence = _sentence(why, seen, odd)
    lines = [f"watchdog: {sentence}"]
    if flight is not None and flight is not odd:
        lines.append(f"flight recorder: {_who(flight)}{flight.why}")
    first = [rank for rank in (odd.ranks if odd else ()) if rank in seen.beats]
    rest = [rank for rank in sorted(seen.beats) if rank not in first]
    for ranks in [*([rank] for rank in first), *_alike(seen, rest)]:
        lines += ["", *_about(seen, ranks)]
        if ranks[0] in first:
            lines += _own_stacks(folder, ranks[0])
    for rank in seen.missing:
        lines += ["", f"rank {rank}: never heard of"]
    lines += ["", f"all threads of every rank, and the flight recorder: {folder}"]
    return Report(odd.ranks if odd else (), sentence, "\n".join(lines))


def _sentence(why: str, seen: Seen, odd: Odd | None) -> str:
    if odd is None and seen.size > 1:
        return f"{why}; no rank differs from the others: look at the links with foundling doctor"
    if odd is None:
        place = next((beat.place() for beat in seen.beats.values()), "nowhere")
        return f"{why}; the process is {place}"
    if not odd.ranks:
        return f"{why}; {odd.why}"
    places = [seen.beats[rank].place() for rank in odd.ranks if rank in seen.beats]
    where = f"; it was {places[0]}" if places else ""
    return f"{why}; the odd one out is {_who(odd)}{odd.why}{where}"


def _who(odd: Odd) -> str:
    if not odd.ranks:
        return ""
    return f"{ranks_told(odd.ranks)}: "


def _alike(seen: Seen, ranks: Sequence[int]) -> list[list[int]]:
    """Ranks at the same place are told of once."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank in ranks:
        beat = seen.beats[rank]
        inside = (beat.inside.name, beat.inside.number) if beat.inside else None
        key = (beat.stack, beat.phase, beat.step, inside, beat.ended, _state(seen, rank))
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _about(seen: Seen, ranks: Sequence[int]) -> list[str]:
    beat = seen.beats[ranks[0]]
    who = ranks_told(ranks)
    state = _state(seen, ranks[0])
    lines = [f"{who}{state}: {beat.place()}, not moved for {beat.stall_s:.1f} s{_process(beat)}"]
    lines += [f"  ended: {beat.ended}"] if beat.ended else []
    hidden = len(beat.stack) - SHOWN
    lines += [f"  ... {hidden} frames further out"] if hidden > 0 else []
    return [*lines, *(f"  {frame}" for frame in beat.stack[-SHOWN:])]


def _process(beat: Beat) -> str:
    return f" (process {beat.pid} on {beat.host})"


def _state(seen: Seen, rank: int) -> str:
    if rank in seen.dead:
        return " (gone)"
    if rank in seen.silent:
        state = process_state(seen.beats[rank].pid)
        return " (stopped)" if state in ("T", "t") else " (does not answer)"
    return ""


def ranks_told(ranks: Sequence[int]) -> str:
    """Their numbers, the first few of many."""
    named = ", ".join(map(str, ranks[:16])) + (" and others" if len(ranks) > 16 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def _own_stacks(folder: Path, rank: int) -> list[str]:
    """What the odd one's own process wrote: every thread as it answered, or its last words."""
    lines: list[str] = []
    for place in (folder, folder.parent):
        with contextlib.suppress(OSError):
            lines += (place / f"rank-{rank:05d}.stacks").read_text(errors="replace").splitlines()
    return ["  every thread of it:", *(f"    {line}" for line in lines[:60])] if lines else []
