"""Whether two commits compute the same losses, bit for bit, on this machine.

    python -m tests.golden.compare_commits [COMMIT]

Runs tests/golden/losses.py of COMMIT (default: the parent of HEAD) and of the working tree with the
same interpreter, and names the first step of each config that differs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def losses_of(tree: Path) -> dict[str, list[str]]:
    """The losses that a tree computes, as hexadecimal floats."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.losses"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def main(commit: str) -> int:
    """Print a line a config; 1 where any differs."""
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", str(before), commit], cwd=ROOT, check=True
        )
        try:
            old, new = losses_of(before), losses_of(ROOT)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=ROOT)
    differ = 0
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name, []), new.get(name, [])
        step = next((n for n, pair in enumerate(zip(a, b, strict=False)) if len(set(pair)) > 1), -1)
        same = a == b
        differ += not same
        print(f"{name}: " + ("bit-equal" if same else f"differs from step {step + 1}"))
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "HEAD^"))
