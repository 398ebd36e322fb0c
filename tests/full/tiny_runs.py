"""Small real runs for the checks of launching: data, settings, pace, and what "the same" means."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROCESSES = 2
SETTINGS = {
    "model.vocab-size": "0",
    "model.dim": "64",
    "model.layers": "2",
    "model.heads": "2",
    "model.ffn-dim": "128",
    "data.allow-repeat": "1000",
    "train.seq-len": "64",
    "train.batch-size": "4",
    "train.global-batch-tokens": "1024",
    "train.threads": "1",
    "train.device": "cpu",
    "checkpoint.every": "500",
    "eval.every": "0",
    "eval.tokens": "65536",
    "log.every": "50",
    "log.tensorboard": "false",
}


def build_data(home: Path) -> Path:
    """A little of Hamlet."""
    tokenizer, text = home / "tokenizer", home / "text"
    learn = ["tokenizer", "train", "hamlet", "-o", str(tokenizer), "--vocab-size", "400"]
    foundling(*learn, "--bytes", "200000")
    build = ["data", "build", "hamlet", "--tokenizer", str(tokenizer), "-o", str(text)]
    foundling(*build, "--tokens", "400000")
    return text


def foundling(*words: str, env: dict[str, str] | None = None) -> str:
    """Run a command that must succeed; what it printed."""
    command = [sys.executable, "-m", "foundling", *words]
    environment = env or {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-500:]} {done.stderr[-2000:]}"
    return done.stdout


def flags(text: Path, steps: int) -> list[str]:
    """The settings of such a run, as words of a command line."""
    settings = {**SETTINGS, "data.sources": str(text), "train.horizon": str(steps)}
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


def steps_per_second(home: Path, text: Path) -> float:
    """The pace of two processes on this machine, now."""
    words = ["train", "hamlet", "--run", str(home / "pace"), "--nproc", str(PROCESSES)]
    foundling(*words, *flags(text, 200))
    lines = (home / "pace" / "metrics.jsonl").read_text().splitlines()
    return 100 / sum(json.loads(line)["step_s"] for line in lines[100:])


def steps_of(run: Path) -> int:
    """Steps that a run has written down."""
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def assert_same(one: Path, other: Path) -> None:
    """Raise unless the two runs did the same thing, to the bit."""
    sys.path.insert(0, str(ROOT / "tests" / "chaos"))
    from compare_runs import assert_same_run

    assert_same_run(one, other)
