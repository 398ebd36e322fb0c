"""Every way to compute a step, trained side by side: python3 tests/gpu/same_losses.py DATA OUT.json

500 steps of 32,768 tokens on a built data set of real text, same seed and order, compared on the
mean loss of the last 50 steps: bf16 with fp32, float8 and 8-bit moments with bf16, fused loss and
attention kernels with plain ones. Several runs share the device, because one alone leaves it idle
while it starts. What OUT.json holds is not repeated, and with --seconds the runs at work are told
to save and end, and go on where the script is started again on the same machine. Ends with 1 where
a limit is exceeded, with 3 where runs are left.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

LAST, LEAST_NOISE = 50, 0.001
MODELS = ("clm-60m", "depth-12")
BASE = {
    "train.kernels.attention": "cudnn",
    "train.kernels.mlp": "plain",
    "train.batch-size": "16",
    "train.seq-len": "2048",
}
"""Kernels are named: beside other runs, the fastest one is found by chance."""
VARIANTS: dict[str, dict[str, str]] = {
    "fp32": {"train.dtype": "fp32", "train.kernels.attention": "efficient"},
    "bf16": {},
    "float8 tensorwise": {"train.float8": "tensorwise"},
    "8-bit AdamW": {"optim.name": "adamw8bit"},
    "plain loss": {"train.kernels.loss": "plain"},
    "fused feed-forward": {"train.kernels.mlp": "fused"},
    "attention flash": {"train.kernels.attention": "flash"},
    "attention efficient": {"train.kernels.attention": "efficient"},
    "attention flex": {"train.kernels.attention": "flex"},
    "attention flash4": {"train.kernels.attention": "flash4"},
    "another seed": {"train.seed": "2"},
    "float8 rowwise": {"train.float8": "rowwise"},
    "attention math": {"train.kernels.attention": "math", "train.batch-size": "4"},
    "eager": {"train.compile": "off"},
}
"""What each changes, what matters most first. Another seed shows what noise is."""
ONLY = {"8-bit AdamW": "clm-60m", "fused feed-forward": "depth-12"}
"""The other model has another optimizer, or another activation."""
AGAINST: dict[str, tuple[str, float | None]] = {
    "bf16": ("fp32", 0.003),
    "float8 tensorwise": ("bf16", 0.005),
    "float8 rowwise": ("bf16", 0.005),
    "8-bit AdamW": ("bf16", 0.005),
    "another seed": ("bf16", 1.0),
    **dict.fromkeys(("plain loss", "fused feed-forward", "eager"), ("bf16", None)),
    **{name: ("bf16", None) for name in VARIANTS if name.startswith("attention ")},
}
"""With which run it is compared, and how far off it may be; None: no further than noise."""


@dataclass
class Run:
    """One variant of one model, in a process of its own."""

    model: str
    variant: str
    folder: Path
    command: list[str]
    began: float = field(default_factory=time.monotonic)
    process: "subprocess.Popen[str] | None" = None

    @property
    def name(self) -> str:
        return f"{self.model} {self.variant}"

    def start(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, text=True)

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def is_done(self, steps: int) -> bool:
        """Whether every step was taken and nothing went wrong."""
        ended = self.process is not None and self.process.returncode == 0
        return ended and len(self.losses()) == steps

    def losses(self) -> list[float]:
        """Of every step; those after a checkpoint may have been taken twice."""
        found: dict[int, float] = {}
        metrics = self.folder / "metrics.jsonl"
        for text in metrics.read_text().splitlines() if metrics.is_file() else ():
            line = json.loads(text)
            found[line["step"]] = line["loss"]
        return [found[step] for step in sorted(found)]


def plan_run(model: str, variant: str, options: argparse.Namespace) -> Run:
    """The command that trains, or goes on."""
    folder = options.work / f"{model}-{variant.replace(' ', '-')}-{options.steps}"
    settings = {
        "data.sources": json.dumps({str(options.data.resolve()): 1.0}),
        "data.allow-repeat": "100",
        "train.horizon": str(options.steps),
        "train.global-batch-tokens": "32768",
        "eval.every": "0",
        "checkpoint.every": str(options.steps),
        "log.every": "100",
        **BASE,
        **VARIANTS[variant],
        **dict(text.split("=", 1) for text in options.set),
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    start = [sys.executable, "-W", "ignore", "-m", "foundling", "train", model]
    return Run(model, variant, folder, [*start, "--run", str(folder), *words])


def compared(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Each run beside the one that it is held to."""
    means = {name: mean(losses[-LAST:]) for name, losses in found.items()}
    noise = LEAST_NOISE
    if {"bf16", "another seed"} <= means.keys():
        noise = max(noise, abs(means["another seed"] / means["bf16"] - 1))
    rows = []
    for variant, (other, limit) in AGAINST.items():
        if variant in means and other in means:
            off, most = means[variant] / means[other] - 1, noise if limit is None else limit
            row = {"variant": variant, "loss": means[variant], "against": other}
            row |= {"other": means[other], "off": off, "limit": most, "held": abs(off) <= most}
            rows.append(row)
    return rows


def train_all(todo: list[Run], options: argparse.Namespace, results: dict[str, Any]) -> list[Run]:
    """Train, a few at a time; returns what is left when the time is over."""
    began, at_work, left = time.monotonic(), [], []
    while todo or at_work:
        over = options.seconds and time.monotonic() - began > options.seconds
        while todo and len(at_work) < options.at_once and not over:
            at_work.append(todo.pop(0))
            at_work[-1].start()
        if over:
            left = at_work + todo
            for run in at_work:  # they save, end, and go on another time
                run.process.send_signal(signal.SIGTERM)
            for run in at_work:
                try:
                    run.process.wait(60)
                except subprocess.TimeoutExpired:  # what it has not saved is lost
                    run.process.kill()
                if run.is_done(options.steps):  # it was at its end already
                    left.remove(run)
                    finish(run, options, results)
                else:
                    print(f"{run.name}: cut off", flush=True)
            break
        time.sleep(0.2)
        for run in [run for run in at_work if run.process.poll() is not None]:
            at_work.remove(run)
            finish(run, options, results)
    return left


def finish(run: Run, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Keep the losses of a run that is done, or say why it failed."""
    assert run.process is not None
    if run.process.returncode:
        told = run.log.read_text()[-1500:]
        print(f"{run.name} FAILED ({run.process.returncode}):\n{told}", flush=True)
        return
    losses = run.losses()
    assert len(losses) == options.steps, (run.name, len(losses))
    results.setdefault(run.model, {}).setdefault("losses", {})[run.variant] = losses
    options.out.write_text(json.dumps(results) + "\n")
    subprocess.run(["rm", "-rf", str(run.folder)], check=False)
    took = time.monotonic() - run.began
    print(f"{run.name}: {mean(losses[-LAST:]):.4f} ({took:.0f} s)", flush=True)


def main() -> int:
    """Train what is missing, compare everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--models", default=",".join(MODELS))
    variants = dict(VARIANTS)
    if not (find_spec("flash_attn") and find_spec("flash_attn.cute")):
        del variants["attention flash4"]
    parser.add_argument("--variants", default=",".join(variants))
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0, help="end after; 0: never")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "same-losses")
    parser.add_argument("--set", action="append", default=[], help="a setting of every run, A=B")
    options = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    results = json.loads(options.out.read_text()) if options.out.is_file() else {}
    wanted = [
        plan_run(model, variant, options)
        for model in options.models.split(",")
        for variant in options.variants.split(",")
        if variant not in results.get(model, {}).get("losses", {})
        and ONLY.get(variant, model) == model
    ]
    left = train_all(list(wanted), options, results)
    for model, found in results.items():
        found["compared"] = compared(found["losses"])
        for row in found["compared"]:
            told = f"{row['variant']} {row['loss']:.4f}, {row['off']:+.3%} of {row['against']}"
            print(
                f"{model}: {told} ({row['limit']:.2%} allowed){'' if row['held'] else ' EXCEEDED'}"
            )
    options.out.write_text(json.dumps(results) + "\n")
    done = [run for run in wanted if run.variant in results.get(run.model, {}).get("losses", {})]
    if left:
        print(f"left: {', '.join(run.name for run in left)}")
    held = all(row["held"] for found in results.values() for row in found["compared"])
    return 3 if left else 0 if held and len(done) == len(wanted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
