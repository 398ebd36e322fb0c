"""`python -m benchmarks.ladder`: account 004's ladder, rung by rung, ours beside theirs.

They climbed from plain fp32 to everything recomputed on one H100 and wrote down, at the largest
batch that fitted, seconds, memory and tokens a second. Each rung is a process of its own, so that
none inherits another's memory. Ours differs where it must: blocks and loss are compiled each by
itself and not the whole model. The loss has whole logits as theirs had, fused ones would not be
their ladder; attention in fp32 keeps every score, as theirs did without a word, and in bf16 the
fastest kernel is taken.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from foundling.cli.main import main_of
from foundling.cli.options import (
    JSON,
    TARGET,
    Option,
    Options,
    Verb,
    positive,
    positive_float,
    positive_ints,
    print_json,
    print_lines,
    refuse_given,
    say_on_stderr,
)
from foundling.runtime.processes import ChildResult, run_child

if TYPE_CHECKING:
    from foundling.config.run import RunConfig

WORDS = ("-m", "benchmarks.ladder_rung")


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One row of theirs, and how ours is set."""

    name: str
    batch: int
    """The largest that fitted into their 80 GiB."""
    step_s: float
    memory_gb: float
    tokens_per_s: float
    bf16: bool = True
    compiled: bool = True
    fused: bool = True
    """AdamW in one pass over memory."""
    recompute: str = "none"

    def config(self, config: "RunConfig") -> "RunConfig":
        """The target's config on this rung."""
        from foundling.bench.loss_check import plain

        base = plain(config)
        # auto: bf16 on a GPU, and fp32 on a CPU, where the ladder is only tried out.
        train = base.train.replace(dtype="auto" if self.bf16 else "fp32")
        if self.bf16:
            train = train.replace(kernels={"attention": "auto", "attention_masked": "auto"})
        train = train.replace(compile="blocks" if self.compiled else "off")
        return base.replace(train=train, parallel={"recompute": self.recompute})


LADDER = (
    Rung(
        name="fp32, eager",
        batch=3,
        step_s=1.234,
        memory_gb=72.3,
        tokens_per_s=5.0e3,
        bf16=False,
        compiled=False,
        fused=False,
    ),
    Rung(
        name="+ compile",
        batch=4,
        step_s=1.480,
        memory_gb=82.9,
        tokens_per_s=5.5e3,
        bf16=False,
        fused=False,
    ),
    Rung(name="+ bf16", batch=16, step_s=0.525, memory_gb=78.6, tokens_per_s=62.4e3, fused=False),
    Rung(name="+ fused AdamW", batch=16, step_s=0.504, memory_gb=73.6, tokens_per_s=65.0e3),
    Rung(
        name="recompute every second",
        batch=16,
        step_s=0.568,
        memory_gb=49.7,
        tokens_per_s=57.7e3,
        recompute="every-2",
    ),
    Rung(
        name="recompute all",
        batch=16,
        step_s=0.600,
        memory_gb=29.7,
        tokens_per_s=54.6e3,
        recompute="all",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Climbed:
    """One rung, by us."""

    name: str
    refusal: str = ""
    theirs: dict[str, float] = field(default_factory=dict)
    same: dict[str, float] | None = None
    """At their batch: rows, step_s, allocated, reserved, tokens_per_s; None: it does not fit."""
    largest: dict[str, float] | None = None
    """At the largest batch that fits here."""
    chosen: tuple[str, ...] = ()
    """Which kernels were taken, and why."""
    dtype: str = ""
    """Of the products."""
    bounded: bool = False
    """Whether the largest batch is only the largest that was allowed."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


Start = Callable[[str], ChildResult]


def bench_ladder(
    config: "RunConfig",
    *,
    steps: int,
    most: int,
    memory_gb: float,
    limit_s: float,
    only: tuple[int, ...] = (),
    start: Start | None = None,
) -> Iterator[Climbed]:
    """Climb; a rung that fails says why and the next is tried. `most` bounds the batch."""
    from foundling.bench.batch_size import refuse_unknown

    refuse_unknown(only, range(1, len(LADDER) + 1))
    go = start or (lambda given: run_child(WORDS, limit_s=limit_s, stdin=given))
    for number, rung in enumerate(LADDER, 1):
        if only and number not in only:
            continue
        given = {
            "config": rung.config(config).model_dump_json(),
            "fused": rung.fused,
            "batch": min(rung.batch, most),
            "most": most,
            "steps": steps,
            "memory_gb": memory_gb,
        }
        yield _climbed(rung, go(json.dumps(given)), most)


def _climbed(rung: Rung, ended: ChildResult, most: int) -> Climbed:
    theirs = {"rows": rung.batch, "step_s": rung.step_s, "memory_gb": rung.memory_gb}
    theirs["tokens_per_s"] = rung.tokens_per_s
    if not ended.is_good:
        return Climbed(name=rung.name, refusal=ended.reason, theirs=theirs)
    found = json.loads(ended.out.splitlines()[-1])
    return Climbed(
        name=rung.name,
        refusal="" if found["largest"] else "not even one row fits into the device's memory",
        theirs=theirs,
        same=found["same"],
        largest=found["largest"],
        chosen=tuple(found["chosen"]),
        dtype=found["dtype"],
        bounded=bool(found["largest"]) and found["largest"]["rows"] >= most,
    )


def describe_ladder(rungs: list[Climbed], device: str) -> list[str]:
    """The table as text."""
    from foundling.runtime.console import size, table

    head = ["rung", "theirs: rows", "s", "GB", "tokens/s", "ours at theirs: s", "tokens/s"]
    rows = [[*head, "largest: rows", "s", "reserved", "tokens/s"]]
    for one in rungs:
        theirs = [f"{one.theirs['rows']:.0f}", f"{one.theirs['step_s']:.3f}"]
        theirs += [f"{one.theirs['memory_gb']:.1f}", f"{one.theirs['tokens_per_s']:,.0f}"]
        same, largest = ["-", "-"], ["-", "-", "-", "-"]
        if one.same:
            same = [f"{one.same['step_s']:.3f}", f"{one.same['tokens_per_s']:,.0f}"]
            if one.same["rows"] != one.theirs["rows"]:
                same[0] += f" [{one.same['rows']:.0f} rows]"
        if one.largest:
            rows_there = f"{one.largest['rows']:.0f}{' (--most)' if one.bounded else ''}"
            largest = [rows_there, f"{one.largest['step_s']:.3f}"]
            largest += [size(one.largest["reserved"]), f"{one.largest['tokens_per_s']:,.0f}"]
        rows.append([one.name, *theirs, *same, *largest])
    return [
        f"theirs: one H100 of 80 GiB, account 004; ours: {device}",
        *table(rows),
        *(f"{one.name}: {one.refusal}" for one in rungs if one.refusal),
        *_not_theirs(rungs),
        "ours: blocks and loss compiled one by one (theirs: the whole model), whole logits as"
        " theirs; every score kept in fp32, as theirs",
    ]


def _not_theirs(rungs: list[Climbed]) -> list[str]:
    """Where the device has another arithmetic than theirs."""
    wanted = {rung.name for rung in LADDER if rung.bf16}
    found = {one.dtype for one in rungs if one.name in wanted and one.dtype} - {"bfloat16"}
    return [f"{dtype} stands in for bf16: the default on this device" for dtype in sorted(found)]


OPTIONS = (
    TARGET,
    Option("--steps", "steps that are timed", positive, 5),
    Option("--only", "some rungs, such as 1,4", positive_ints),
    Option("--most", "rows to try at most", positive, 256),
    Option("--limit-gb", "GB to use at most; 85: an H100 of 80 GiB", positive_float),
    Option("--limit", "seconds that a rung may take", positive_float, 900.0),
    JSON,
)


def _run(options: Options) -> None:
    # Not at the top: what imports torch comes after the command has said how long it takes.
    from foundling.bench.batch_size import alone, refuse_cap
    from foundling.cli.bench import sized_config
    from foundling.runtime.console import warn
    from foundling.runtime.device import choose_device, device_name

    config = sized_config(options)
    alone(config)
    there = choose_device(config.train.device, config.train.dtype).device
    refuse_cap(there, options.limit_gb or 0.0)
    _refuse_set_by_rungs(options)
    climbed = bench_ladder(
        config,
        steps=options.steps,
        most=options.most,
        memory_gb=options.limit_gb or 0.0,
        limit_s=options.limit,
        only=options.only or (),
    )
    rungs = _told(climbed, len(options.only or LADDER))
    if options.json:
        print_json([rung.to_json() for rung in rungs])
    else:
        print_lines(describe_ladder(rungs, device_name(there)))
    if all(rung.refusal for rung in rungs):
        warn("no rung could be climbed; the lines above say why.")
        raise SystemExit(1)


def _refuse_set_by_rungs(options: Options) -> None:
    from foundling.bench.loss_check import PLAIN

    own = {*(f"train.{name}" for name in (*PLAIN, "batch_size")), "parallel.recompute"}
    own |= {"model.dropout", "optim.name"}
    refuse_given(options, sorted(own), "on a ladder, whose rungs set it")


def _told(rungs: Iterable[Climbed], total: int) -> list[Climbed]:
    """Collect, and say which kernels were taken and about how long the rest takes."""
    from foundling.profiling.step_runner import tell_chosen

    found: list[Climbed] = []
    began = time.monotonic()
    for rung in rungs:
        found.append(rung)
        tell_chosen(rung.chosen, say_on_stderr)
        left = (time.monotonic() - began) / len(found) * (total - len(found))
        more = f"; about {left:.0f} s left" if total > len(found) else ""
        say_on_stderr(f"{rung.name} {rung.refusal}".strip() + more)
    return found


def _duration_hint(options: Options) -> str:
    rungs = len(options.only) if options.only else "six"
    return f"{rungs} rungs, 10 s each for a small model, {options.limit:g} s at most"


PROGRAM = Verb(
    "from plain fp32 to recompute, beside a published climb",
    OPTIONS,
    _run,
    True,
    duration_hint=_duration_hint,
)


if __name__ == "__main__":
    main_of("benchmarks.ladder", PROGRAM)
