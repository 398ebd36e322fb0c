"""Builds that are killed with SIGKILL, again and again, until they are through.

Run as a program it is the victim: one build of a small source, killed by itself at the n-th rename
of a file, or by whoever started it. Imported it is the killer.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SAMPLES = HERE.parent / "unit" / "data" / "build"
START_S = 60.0


def kill_until_done(
    folder: Path, tokenizer: Path, rng: random.Random, kills: int, **how: Any
) -> int:
    """Build into `folder`, killing at random moments, `kills` times at most; how often it hit."""
    hits = 0
    whole_s = 1.0
    while True:
        by_itself = rng.random() < 0.5 and hits < kills
        countdown = rng.randint(1, 40) if by_itself else 0
        process = _start(folder, tokenizer, countdown, rng.choice(["before", "after"]), how)
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        began = time.monotonic()
        if hits < kills and not by_itself:
            time.sleep(rng.uniform(0, whole_s))
            process.kill()  # the whole family: workers must follow by themselves
        process.communicate(timeout=START_S)
        if process.returncode == 0:
            return hits
        assert process.returncode == -signal.SIGKILL, process.returncode
        whole_s = max(0.2, 0.5 * whole_s + 0.5 * (time.monotonic() - began))
        hits += 1


def _start(
    folder: Path, tokenizer: Path, countdown: int, when: str, how: dict[str, Any]
) -> "subprocess.Popen[str]":
    words = [str(folder), str(tokenizer), str(countdown), when, repr(how)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SAMPLES), *sys.path])}
    return subprocess.Popen(
        [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, env=environment
    )


def main(folder: str, tokenizer: str, countdown: str, when: str, how: str) -> None:
    """Build, and die at the rename that is asked for."""
    from foundling.tokenizer.tokenizer import Tokenizer

    left = int(countdown)
    replace = os.replace

    def counted(*paths: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = counted  # type: ignore[assignment]
    loaded = Tokenizer.load(tokenizer)
    print("go", flush=True)
    build_here(Path(folder), loaded, **eval(how))


def build_here(folder: Path, tokenizer: Any, **how: Any) -> None:
    """The build in question, in this process."""
    from build_samples import Numbers, make

    from foundling.data.build import encode

    rows, encode.PART_ROWS = encode.PART_ROWS, 50
    try:
        make(Numbers(count=900, piece=150), tokenizer, folder, **how)
    finally:
        encode.PART_ROWS = rows


if __name__ == "__main__":
    main(*sys.argv[1:])
