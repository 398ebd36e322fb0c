"""The GPU tests, several processes at a time: python3 tests/gpu/side_by_side.py [OUT.json]

One process spends most of a test compiling on one core. What measures time (marker `alone`) comes
last, when the others are done. OUT.json is written after each part: what passed there, at this
commit, is not run again, so that a machine that is lent for minutes gets through. Exit code 1 where
a test failed or was left no time to run, 2 where there is no GPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PYTEST = [sys.executable, "-W", "ignore", "-m", "pytest", "-c", str(ROOT / "tests/gpu/pytest.ini")]
PYTEST += ["--rootdir", str(ROOT), "--confcutdir", str(ROOT / "tests"), "-p", "no:cacheprovider"]
PYTEST += ["-q", "--tb=short"]
TOGETHER = 12
"""Tests of one file that share a process."""
TOLD = 12
"""Lines of a failure."""


def main() -> int:
    """Run what is asked for, and tell what became of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?", help="where results are kept")
    parser.add_argument("tests", nargs="*", default=["tests/gpu"], help="files, or tests by name")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--seconds", type=float, default=3600.0, help="then stop")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    if not torch.cuda.is_available():
        print("torch sees no GPU here, and these tests need one")
        return 2
    report = _begun(options.out)
    alone = set(_collected(options.tests, "alone"))
    rest = [name for name in _collected(options.tests, "not alone") if not _passed(report, name)]
    left = [name for name in sorted(alone) if not _passed(report, name)]
    _run_all(_parts(rest), options.jobs, until, report, options.out)
    _run_all(_parts(left), 1, until, report, options.out)
    return _told(report, [*rest, *left])


def _begun(out: Path | None) -> dict[str, Any]:
    commit = _said("git", "describe", "--always", "--dirty", "--exclude=*") or "dirty"
    device = _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if out is not None and out.is_file():
        found: dict[str, Any] = json.loads(out.read_text())
        if found["commit"] == commit and "dirty" not in commit:
            return found
    return {"commit": commit, "device": device, "command": "make test-gpu", "tests": {}}


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _passed(report: dict[str, Any], name: str) -> bool:
    return bool(report["tests"].get(name, "").startswith(("passed", "skipped")))


def _collected(tests: list[str], which: str) -> list[str]:
    command = [*PYTEST, "--collect-only", "-m", which, *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 5):  # 5: there are none
        sys.exit(f"the tests cannot be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def _parts(names: list[str]) -> list[list[str]]:
    """Of one file each, the longest first."""
    parts = []
    for _, group in groupby(names, key=lambda name: name.split("::")[0]):
        tests = list(group)
        parts += [tests[at : at + TOGETHER] for at in range(0, len(tests), TOGETHER)]
    return sorted(parts, key=len, reverse=True)


def _run_all(
    parts: list[list[str]], jobs: int, until: float, report: dict[str, Any], out: Path | None
) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed(pool.submit(_run, part, until) for part in parts):
            found, seconds = future.result()
            report["tests"] |= found
            if out is not None:
                out.write_text(json.dumps(report, indent=1) + "\n")
            file = next(iter(found)).split("::")[0]
            print(f"{file}: {_counted(found)} in {seconds:.0f} s", flush=True)


def _run(names: list[str], until: float) -> tuple[dict[str, str], float]:
    """What became of each, and how long they took together."""
    began = time.monotonic()
    if until - began < 1:
        return dict.fromkeys(names, "not run"), 0.0
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "results.xml"
        process = subprocess.Popen(
            [*PYTEST, f"--junitxml={kept}", *names],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, said = process.communicate(timeout=until - began)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that a test has started
            process.wait()
            return dict.fromkeys(names, "not run"), time.monotonic() - began
        found = _outcomes(kept) if kept.is_file() else {}
    lost = f"failed\nits process ended ({process.returncode}) before it did: {said[-400:]}"
    return {name: found.get(name, lost) for name in names}, time.monotonic() - began


def _outcomes(path: Path) -> dict[str, str]:
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        if bad is not None:
            lines = (bad.text or bad.get("message") or "").strip().splitlines()
            found[name] = "\n".join(["failed", *lines[-TOLD:]])
        elif skipped is not None:
            found[name] = f"skipped: {skipped.get('message')}"
        else:
            found[name] = "passed"
    return found


def _told(report: dict[str, Any], names: list[str]) -> int:
    outcomes = report["tests"]
    for name, told in sorted(outcomes.items()):
        if told.startswith("failed"):
            print(f"\n{name}: {told}")
    print(_counted(outcomes), flush=True)
    return 0 if all(_passed(report, name) for name in names) else 1


def _counted(outcomes: dict[str, str]) -> str:
    kinds = [told.split("\n")[0].split(":")[0] for told in outcomes.values()]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


if __name__ == "__main__":
    sys.exit(main())
