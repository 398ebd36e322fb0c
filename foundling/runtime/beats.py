"""A file a rank that says where it stands, and who is the odd one out when all stand still.

Files on the disk that every rank shares, because a rank that hangs or is dead answers no message.
Whether a rank still beats is seen from its file changing, never from comparing two machines'
clocks. Of a process that was killed, the last beat is all that is known: it is at most five seconds
old. Rejected: a file mapped into memory that holds the last collectives to the moment, because a
full disk ends whoever writes to it with SIGBUS.
"""

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foundling.runtime.pulse import Entered, Pulse
from foundling.runtime.stacks import main_stack, process_state, started_at

FINE = "finished"
"""How a rank ends that has nothing to complain of."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Where one rank stands."""

    rank: int
    host: str
    pid: int
    born: str
    """When the process began, in its kernel's count."""
    number: int
    """Beats so far: it changes as long as the process lives."""
    step: int
    phase: str
    stall_s: float
    inside: Entered | None
    """The collective it is in."""
    entered: tuple[Entered, ...]
    """The last collectives it entered, this one included."""
    stack: tuple[str, ...]
    """The main thread's Python frames, the innermost last."""
    ended: str = ""
    """How the process left, in its own words; empty while it is there, or if it was killed."""

    def place(self) -> str:
        """In words."""
        where = f"in phase '{self.phase}' of step {self.step + 1}"
        if self.inside is not None:
            return f"{where}, inside {_named(self.inside)}"
        last = f", last collective {_named(self.entered[-1])}" if self.entered else ""
        return f"{where}, in no collective{last}"


@dataclass(frozen=True)
class Odd:
    """The ranks that differ from the others, and in what."""

    ranks: tuple[int, ...]
    why: str


@dataclass
class Seen:
    """What is known of the ranks of a job at one moment."""

    beats: dict[int, Beat]
    size: int
    dead: set[int] = field(default_factory=set)
    """Whose process is gone without a word."""
    silent: set[int] = field(default_factory=set)
    """Whose process has stopped beating."""

    @property
    def missing(self) -> list[int]:
        """Who has never been heard of."""
        return [rank for rank in range(self.size) if rank not in self.beats]


def take_beat(rank: int, number: int, pulse: Pulse, ended: str = "", stack: Any = None) -> Beat:
    """This process's own."""
    return Beat(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        born=started_at(os.getpid()),
        number=number,
        step=pulse.step,
        phase=pulse.phase,
        stall_s=round(pulse.stall_s(), 3),
        inside=pulse.inside,
        entered=tuple(pulse.entered),
        stack=tuple(main_stack() if stack is None else stack),
        ended=ended,
    )


def beat_path(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank:05d}.json"


def write_beat(folder: Path, beat: Beat) -> None:
    """Replace the rank's file; not forced to the disk, which would be a load on a shared one."""
    path = beat_path(folder, beat.rank)
    temporary = path.with_suffix(f".tmp-{beat.pid}")
    temporary.write_text(json.dumps(asdict(beat)))
    os.replace(temporary, path)


def read_beat(path: Path) -> Beat | None:
    """A rank's file; None where there is none, or one of another version."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        inside = data["inside"]
        return Beat(
            **{
                **data,
                "inside": Entered(**inside) if inside else None,
                "entered": tuple(Entered(**one) for one in data["entered"]),
                "stack": tuple(data["stack"]),
            }
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_gone(beat: Beat) -> bool:
    """Whether the process of a beat of this machine is no more (or only its name is)."""
    return process_state(beat.pid) in ("", "Z") or started_at(beat.pid) != beat.born


def find_odd(seen: Seen) -> Odd | None:
    """Who holds the others up; None where nobody differs. Causes come before their consequences:
    who took another turn (others may crash of it), who is gone, who does not answer, who is waited
    for."""
    if seen.size < 2:
        return None
    turned = _who_turned(seen.beats)
    if turned is not None:
        return turned
    left = {r: b for r, b in seen.beats.items() if b.ended and b.ended != FINE}
    if seen.dead:
        return Odd(tuple(sorted(seen.dead)), "gone without a word: killed, or out of memory")
    if left:
        # Those who only lost a peer left later, or say so.
        first = min(left, key=lambda rank: (_is_lost_peer(left[rank].ended), rank))
        return Odd((first,), f"ended with {left[first].ended}")
    if seen.missing:
        return Odd(tuple(seen.missing), "never heard of: it did not start, or not this far")
    if seen.silent:
        return Odd(tuple(sorted(seen.silent)), "alive or not, it has stopped answering")
    return _who_is_waited_for({r: b for r, b in seen.beats.items() if not b.ended})


def _who_turned(beats: Mapping[int, Beat]) -> Odd | None:
    """Ranks whose collective of some number is another than the others' of that number: with the
    same count and further on, they left one out."""
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
        odd = [rank for rank, one in at.items() if (one.name, one.step) != usual]
        other = at[odd[0]]
        return Odd(
            tuple(odd),
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


def _who_is_waited_for(beats: Mapping[int, Beat]) -> Odd | None:
    waiting = {rank: beat.inside for rank, beat in beats.items() if beat.inside is not None}
    if not waiting:
        return None
    absent = [rank for rank in beats if rank not in waiting]
    one = max(waiting.values(), key=lambda entered: entered.number)
    if absent:
        others = "the other waits" if len(waiting) == 1 else f"{len(waiting)} others wait"
        return Odd(tuple(absent), f"in no collective, while {others} in {_named(one)}")
    behind = [rank for rank, entered in waiting.items() if entered.number < one.number]
    if behind:
        return Odd(tuple(behind), f"behind: the others have come as far as {_named(one)}")
    return None


def _is_lost_peer(told: str) -> bool:
    """Whether an error only tells that somebody else went away."""
    lower = told.lower()
    signs = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed")
    return any(sign in lower for sign in (*signs, "nccl", "remote process"))


def _named(entered: Entered) -> str:
    return f"'{entered.name}' (number {entered.number}, step {entered.step + 1})"
