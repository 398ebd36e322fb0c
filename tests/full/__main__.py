"""Every figure an issue asks for, at full size: `make test-full`, or `ONLY=demo make test-full`.

Each check writes docs/evidence/NAME.json with the commit, the command and its counts. A check whose
evidence was written at this commit is not run again, so the whole can be interrupted and continued.
Figures of speed are only worth something on a machine that does nothing else.
"""

import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.full.checks import CHECKS

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "docs" / "evidence"


def main(names: list[str]) -> int:
    """Run the named checks, or all of them; the exit code counts those that failed."""
    unknown = set(names) - set(CHECKS)
    if unknown:
        print(f"no check is called {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
        return 2
    passed, failed = 0, 0
    for name in names or CHECKS:
        if _is_done(name):
            print(f"{name}: evidence of this commit is there")
            passed += 1
            continue
        began = time.monotonic()
        print(f"{name}: {(CHECKS[name].__doc__ or '').splitlines()[0]}", flush=True)
        result = _run(name)
        result["seconds"] = round(time.monotonic() - began, 1)
        EVIDENCE.mkdir(parents=True, exist_ok=True)
        (EVIDENCE / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
        print(f"{name}: {'passed' if result['passed'] else 'FAILED'} in {result['seconds']} s")
        passed, failed = passed + result["passed"], failed + (not result["passed"])
    print(f"{passed} passed, {failed} failed")
    return failed


def _run(name: str) -> dict[str, Any]:
    frame = {
        "commit": _commit(),
        "clean": not _git("status", "--porcelain", "--", "foundling", "tests"),
        "command": f"make test-full ONLY={name}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }
    try:
        return {**frame, "passed": True, "figures": CHECKS[name]()}
    except (AssertionError, subprocess.SubprocessError, OSError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
        return {**frame, "passed": False, **found, "figures": getattr(error, "figures", {})}


def _is_done(name: str) -> bool:
    path = EVIDENCE / f"{name}.json"
    if not path.is_file():
        return False
    evidence = json.loads(path.read_text())
    return bool(evidence["passed"] and evidence["clean"] and evidence["commit"] == _commit())


def _commit() -> str:
    return _git("rev-parse", "HEAD")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
