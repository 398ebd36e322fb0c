"""How a launcher ends when its ranks do not: code, sentence and what is left behind."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from foundling.launch.logs import tries
from foundling.runtime.exits import Exit
from foundling.runtime.lock import is_locked, read_holder

ROOT = Path(__file__).parents[3]
LAUNCH = """
import sys
from pathlib import Path
from foundling.launch.launcher import LaunchSpec as Job, launch
from foundling.runtime.exits import EndOfRun
run, restarts, words = Path(sys.argv[1]), int(sys.argv[2]), (sys.argv[1], *sys.argv[3:])
try:
    job = Job(run=run, processes=2, command=("fake_training", *words), restarts=restarts, grace_s=1)
    launch(job)
except EndOfRun as end:
    print(f"told: {end}", flush=True)
    sys.exit(end.code)
"""


@dataclass(frozen=True)
class Case:
    """What is planted, what the launcher is told, and how it must end."""

    code: Exit
    sentence: str
    faults: tuple[str, ...]
    restarts: int = 0
    signals: tuple[signal.Signals, ...] = ()
    tries: int = 1
    saved: int = 10
    room: int = resource.RLIM_INFINITY
    """Bytes that a file may have: a stand-in for a full disk."""


CASES = {
    "crashes": Case(
        Exit.CRASH, "ValueError: planted", ("crash:0:12", "crash:0:10"), restarts=1, tries=2
    ),
    "hangs": Case(Exit.WATCHDOG, "exit code 76", ("hang:0:12",)),
    "has no room for another try": Case(
        Exit.UNSAVED, "File too large; make room there", ("crash:0:12",), restarts=1, room=8 << 10
    ),
    "is deaf": Case(
        Exit.KILLED,
        "did not end within 1 s and was killed",
        ("deaf:0:12", "deaf:1:12"),
        0,
        (signal.SIGTERM,),
    ),
    "is interrupted twice": Case(
        Exit.INTERRUPTED,
        "interrupted twice: nothing was saved after the first",
        ("deaf:0:12", "deaf:1:12"),
        0,
        (signal.SIGINT, signal.SIGINT),
    ),
}


@pytest.fixture(scope="module")
def jobs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[Path, subprocess.Popen[str]]]]:
    """All of them at once: most of a launch is imports."""
    home = tmp_path_factory.mktemp("ends")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    found = {}
    for name, case in CASES.items():
        run = home / name.replace(" ", "-")
        words = [str(run), str(case.restarts), "--steps", "100000"]
        words += [word for fault in case.faults for word in ("--fault", fault)]
        job = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *words],
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (case.room, case.room)),
        )
        found[name] = (run, job)
    yield found
    for _, job in found.values():
        job.kill()
        job.communicate()


@pytest.mark.parametrize("name", CASES)
def test_a_launcher_ends_with_its_code_and_a_sentence(
    name: str, jobs: dict[str, tuple[Path, subprocess.Popen[str]]]
) -> None:
    case, (run, job) = CASES[name], jobs[name]
    for number in case.signals:
        wait_for_faults(run, case.faults)
        job.send_signal(number)
        time.sleep(0.2)
    out, _ = job.communicate(timeout=120)
    assert job.returncode == case.code, out
    assert case.sentence in out
    assert out.count("told:") == 1, "one last word"
    assert f"every rank's output is in {run / 'logs'}" in out
    assert len(tries(run)) == case.tries
    # What is left: the last save, nobody who works on it, and no lock.
    assert max(int(path.name[5:]) for path in run.glob("checkpoints/step-*")) == case.saved
    for path in run.glob("logs/*/try-*/rank-*.pid"):
        assert not Path(f"/proc/{path.read_text()}").exists(), "a rank lives on"
    assert not is_locked(run)
    assert read_holder(run) is None


def wait_for_faults(run: Path, faults: tuple[str, ...]) -> None:
    last = time.monotonic() + 90
    while any(not (run / f"fault-{fault.replace(':', '-')}").exists() for fault in faults):
        assert time.monotonic() < last, "it never came"
        time.sleep(0.02)
