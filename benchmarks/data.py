"""`python -m benchmarks.data`: build, load and resume beside the usual libraries, on one corpus.

Every measurement is a child process of its own; rounds go through all contenders in turn, so that
whatever else the machine does is shared fairly, and the median of the rounds counts. Of the ways a
contender's documentation offers to run its loader, the fastest counts.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contender import CONTENDERS, Job, Settings, contender
from foundling.cli.main import main_of
from foundling.cli.options import (
    JSON,
    Option,
    Options,
    Verb,
    comma_list,
    positive,
    positive_float,
    print_json,
    print_lines,
    say_on_stderr,
)
from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.corpus import Corpus

OURS = "foundling"
TIMEOUT = 1800
BUSY = 0.25
"""Load a core above which times are worth little."""
Say = Callable[[str], None]


def chosen(only: Sequence[str]) -> list[str]:
    """The contenders to measure; ours always is."""
    unknown = [name for name in only if name not in CONTENDERS]
    if unknown:
        raise ConfigError(
            f"no contender is called {unknown[0]}; there are {', '.join(CONTENDERS)}."
        )
    return [OURS, *(name for name in CONTENDERS if name != OURS and (not only or name in only))]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is measured, the same for all."""

    workers: int = 0
    """Processes of a build; 0: as many as there are cores."""
    seq_len: int = 2048
    rows: int = 16
    """Rows of a batch."""
    rounds: int = 3
    seconds: float = 2.0
    """Time of a load."""
    times: int = 16
    """How often the corpus is repeated before a resume at its middle: what it costs to find one's
    place shows only in data of some size."""


def bench_data(
    corpus: "Corpus",
    folder: Path,
    shape: Shape,
    *,
    only: Sequence[str] = (),
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Measure; the result is plain JSON."""
    shape = replace(shape, workers=shape.workers or os.cpu_count() or 1)
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    table: dict[str, dict[str, Any]] = {}
    for name in chosen(only):
        absent = [one for one in contender(name).NEEDS if not _is_there(one)]
        table[name] = {"absent": f"{absent[0]} is not installed"} if absent else {}
    bench = _Bench(corpus, folder, shape, say)
    present = {name: found for name, found in table.items() if not found}
    for measure in (bench.build, bench.load, bench.resume):
        for number in range(shape.rounds):
            for name, found in present.items():
                if "failed" not in found:
                    measure(name, number, found)
    for found in present.values():
        _summarise(found, corpus)
    return {
        "text_bytes": corpus.text_bytes,
        **asdict(shape),
        "load_average_per_core": busy,
        "contenders": table,
        "bars": bars(table),
    }


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


class _Bench:
    """One run of the bench: where it works and what it asks of the children."""

    def __init__(self, corpus: "Corpus", folder: Path, shape: Shape, say: Say) -> None:
        self.corpus, self.folder, self.shape, self.say = corpus, folder, shape, say

    def build(self, name: str, number: int, found: dict[str, Any]) -> None:
        """Build once more; who brings no build is made ready once and not timed."""
        if number and not contender(name).BUILDS:
            return
        done = self._child(name, "prepare", {}, found, number)
        if done is not None and contender(name).BUILDS:
            found.setdefault("builds", []).append(done["seconds"])
            found.setdefault("builds_cpu", []).append(done["cpu_seconds"])
            self.say(f"{name}: built in {done['seconds']:.2f} s")

    def load(self, name: str, number: int, found: dict[str, Any]) -> None:
        """Load once more under each of the contender's settings."""
        loads, by_cpu = found.setdefault("loads", {}), found.setdefault("loads_cpu", {})
        for settings in contender(name).SETTINGS:
            done = self._child(name, "load", settings, found)
            if done is None:
                return
            rate = done["tokens_per_second"]
            loads.setdefault(_label(settings), []).append(rate)
            by_cpu.setdefault(_label(settings), []).append(done["per_cpu_second"])
            self.say(f"{name} ({_label(settings)}): {rate / 1e6:.1f} M tokens/s")

    def resume(self, name: str, number: int, found: dict[str, Any]) -> None:
        """Resume once more, under the settings that loaded fastest."""
        best = _best(found["loads"])
        settings = next(one for one in contender(name).SETTINGS if _label(one) == best)
        if not number and self._child(name, "middle", settings, found) is None:
            return
        done = self._child(name, "resume", settings, found)
        if done is not None:
            found.setdefault("resumes", []).append(done["seconds"])
            found.setdefault("resumes_cpu", []).append(done["cpu_seconds"])
            found["resume_exact"] = found.get("resume_exact", True) and done["same"]
            self.say(f"{name}: back at the middle in {1000 * done['seconds']:.1f} ms")

    def _child(
        self, name: str, task: str, settings: Settings, found: dict[str, Any], number: int = 0
    ) -> dict[str, Any] | None:
        """What a child measured; None, and why in `found`, if it did not come through."""
        work = self.folder / name.replace(" ", "-") / str(number)
        work.mkdir(parents=True, exist_ok=True)
        job = Job(
            files=self.corpus.files,
            tokenizer=self.corpus.tokenizer,
            work=str(work),
            workers=self.shape.workers,
            seq_len=self.shape.seq_len,
            rows=self.shape.rows,
        )
        asked = {
            "contender": name,
            "task": task,
            "job": job.to_json(),
            "settings": dict(settings),
            "seconds": self.shape.seconds,
            "times": self.shape.times,
        }
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "benchmarks.child"],
                input=json.dumps(asked),
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            found["failed"] = f"{task} took more than {TIMEOUT} s"
            return None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            found["failed"] = f"{task}: {last[:200]}"
            self.say(f"{name}: {found['failed']}")
            return None
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return result


def _label(settings: Settings) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def _best(loads: Mapping[str, Sequence[float]]) -> str:
    return max(loads, key=lambda label: statistics.median(loads[label]))


def _summarise(found: dict[str, Any], corpus: "Corpus") -> None:
    """Add medians to what was measured."""
    megabytes = corpus.text_bytes / 1e6
    if found.get("builds"):
        found["build_mb_per_second"] = megabytes / statistics.median(found["builds"])
        found["build_mb_per_cpu_second"] = megabytes / statistics.median(found["builds_cpu"])
    if found.get("loads"):
        best = found["load_settings"] = _best(found["loads"])
        found["load_tokens_per_second"] = statistics.median(found["loads"][best])
        found["load_tokens_per_cpu_second"] = statistics.median(found["loads_cpu"][best])
    if found.get("resumes"):
        found["resume_seconds"] = statistics.median(found["resumes"])
        found["resume_cpu_seconds"] = statistics.median(found["resumes_cpu"])


def bars(table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Where foundling stands: its figure over the best of the others, and whether that will do.

    The clock on the wall decides; the processor's is given beside it, for a machine that was busy.
    """
    result: dict[str, Any] = {}
    for what, key, cpu_key, more, slack in (
        ("build", "build_mb_per_second", "build_mb_per_cpu_second", True, 1.0),
        ("load", "load_tokens_per_second", "load_tokens_per_cpu_second", True, 0.9),
        ("resume", "resume_seconds", "resume_cpu_seconds", False, 1.0),
    ):
        found = _beside_the_best(table, key, more)
        if found is None:
            continue
        best, ratio = found
        by_cpu = _beside_the_best(table, cpu_key, more)
        result[what] = {
            "times_the_best": ratio,
            "the_best": best,
            "met": ratio >= slack,
            "by_cpu": by_cpu and by_cpu[1],
        }
    return result


def _beside_the_best(
    table: dict[str, dict[str, Any]], key: str, more: bool
) -> tuple[str, float] | None:
    """The best of the others, and how many times as good we are."""
    others = {name: t[key] for name, t in table.items() if name != OURS and key in t}
    if key not in table[OURS] or not others:
        return None
    best = (max if more else min)(others, key=lambda name: others[name])
    ours = table[OURS][key]
    return best, ours / others[best] if more else others[best] / ours


def describe_bench(result: dict[str, Any]) -> list[str]:
    """The same as a table for a person."""
    lines = [
        f"{result['text_bytes'] / 1e6:.1f} MB of text, {result['workers']} processes to build,"
        f" batches of {result['rows']} x {result['seq_len']}, resume at the middle of"
        f" {result['times']} times the corpus, median of {result['rounds']}",
        f"{'':<20}{'build MB/s':>12}{'load Mtok/s':>13}{'resume ms':>11}  same batch  settings",
    ]
    for name, found in result["contenders"].items():
        if "absent" in found or "failed" in found:
            lines.append(f"{name:<20}  {found.get('absent') or found['failed']}")
            continue
        build = found.get("build_mb_per_second")
        lines.append(
            f"{name:<20}{'-' if build is None else f'{build:.2f}':>12}"
            f"{found['load_tokens_per_second'] / 1e6:>13.1f}"
            f"{1000 * found['resume_seconds']:>11.1f}"
            f"  {'yes' if found['resume_exact'] else 'NO':<10}  {found['load_settings']}"
        )
    if result["load_average_per_core"] > BUSY:
        lines.append("the machine was busy with other work when this began: measure again")
    for what, bar in result["bars"].items():
        by_cpu = "" if bar["by_cpu"] is None else f", {bar['by_cpu']:.2f} by processor time"
        lines.append(
            f"{what}: {bar['times_the_best']:.2f} times the best of the others"
            f" ({bar['the_best']}){by_cpu}"
        )
    return lines


OPTIONS = (
    Option("--source", "text to measure with", default="hamlet"),
    Option("--bytes", "how much of it", positive, "20M"),
    Option("--tokenizer", "folder (default: one is trained)", Path),
    Option("--only", "contenders besides foundling, such as grain,litdata", comma_list, ""),
    Option("--workers", "processes to build (default: all cores)", positive),
    Option("--seq-len", "tokens of a row", positive, 2048),
    Option("--rows", "rows of a batch", positive, 16),
    Option("--rounds", "repeats; the median counts", positive, 3),
    Option("--seconds", "time of a load", positive_float, 2.0),
    Option("--times", "repeats of the text before a resume", positive, 16),
    Option("--work", "folder to work in and leave (default: none)", Path),
    JSON,
)


def _run(options: Options) -> None:
    chosen(options.only)  # a misspelt name is refused before minutes of work
    # Not at the top: what imports torch comes after the command has said how long it takes.
    from benchmarks.corpus import make_corpus

    with tempfile.TemporaryDirectory(prefix="foundling-bench-") as scratch:
        folder = options.work or Path(scratch)
        corpus = make_corpus(options.source, options.bytes, options.tokenizer, folder)
        result = bench_data(
            corpus,
            folder,
            Shape(
                workers=options.workers or 0,
                seq_len=options.seq_len,
                rows=options.rows,
                rounds=options.rounds,
                seconds=options.seconds,
                times=options.times,
            ),
            only=options.only,
            say=say_on_stderr,
        )
    print_json(result) if options.json else print_lines(describe_bench(result))


PROGRAM = Verb(
    "build and load beside other libraries",
    OPTIONS,
    _run,
    duration_hint=lambda o: (
        f"{o.rounds} rounds of building {o.bytes / 1e6:,.0f} MB and loading it, some minutes a"
        " library"
    ),
)


if __name__ == "__main__":
    main_of("benchmarks.data", PROGRAM)
