"""`auto` against brute force: is what it picks safe, and how far from the fastest there is?

    python3 tests/gpu/auto_check.py OUT.jsonl [--budget 540] [--safe]
    python3 tests/gpu/auto_check.py OUT.jsonl --summary

For each base, `auto` picks batch and recompute policy from the plan; then every batch in powers of
two with every policy is tried until it runs out of memory. --safe only runs what auto picks, over
every shape of plan_grid.py. One JSON line a trial; what is there already is not run again.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from plan_grid import CPU_SHAPE, GRID, _append, _gpu_name, ensure_ceilings

POLICIES = ("none", "every-2", "per-op", "all")
BASES = {
    "llama-1.24b 2048": ("llama-1.24b", {"train.seq-len": "2048"}),
    "llama-1.24b 8192": ("llama-1.24b", {"train.seq-len": "8192"}),
    "clm-400m 2048": ("clm-400m", {"train.seq-len": "2048"}),
    "depth-20 2048": ("depth-20", {"train.seq-len": "2048"}),
}
FIXED = {
    "train.global-batch-tokens": "0",
    "train.horizon": "1000",
    "train.dtype": "bf16",
    "eval.every": "0",
    "eval.tokens": "65536",
    "log.every": "50",
}
AUTO = {"train.batch-size": "auto", "parallel.recompute": "auto"}
Line = dict[str, Any]


def shapes() -> dict[str, tuple[str, dict[str, str]]]:
    """Every target, length, dtype, loss and compile mode of the grid, once."""
    found = {}
    for case in GRID:
        words = (case.target, case.seq, case.dtype, case.loss, case.compile)
        settings = {
            "train.seq-len": str(case.seq),
            "train.dtype": case.dtype,
            "train.kernels.loss": case.loss,
            "train.compile": str(case.compile).lower(),
        }
        found[" ".join(map(str, words))] = (case.target, settings)
    return found


def pick(target: str, settings: dict[str, str], rehearsal: bool) -> tuple[int, str]:
    """Batch and policy that auto takes."""
    from foundling.config.load import load_config
    from foundling.plan.hardware import find_gpu
    from foundling.plan.layout import Machine
    from foundling.plan.resolve import resolve

    gpu = find_gpu("cpu" if rehearsal else _gpu_name())
    config = load_config(target, {**FIXED, **settings, **AUTO, **(CPU_SHAPE if rehearsal else {})})
    choice = resolve(config, Machine(gpu=gpu, nodes=1, per_node=1)).config
    return choice.train.batch_size, choice.parallel.recompute


class Bench:
    """One model under one policy, tried with batch after batch."""

    def __init__(self, target: str, settings: dict[str, str], policy: str) -> None:
        from foundling.config.load import load_config
        from foundling.profiling.step_runner import StepRunner
        from foundling.runtime.device import choose_device

        own = {"train.batch-size": "1", "parallel.recompute": policy}
        config = load_config(target, {**FIXED, **settings, **own})
        self.bench = StepRunner(config, choose_device(config.train.device, config.train.dtype))

    def rate(self, batch: int) -> float | None:
        """Positions a second of a step of one micro-batch; None where it does not fit."""
        import torch

        from foundling.profiling.step_runner import random_rows

        bench = self.bench
        try:
            rows = random_rows(bench.config)
            best = min(bench.timed(rows, 2, size=batch, warmup=1).step_s)
        except torch.OutOfMemoryError:
            return None
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return batch * bench.config.train.seq_len / best


def worker(name: str, rehearsal: bool) -> None:
    """All trials of one base, in a process of its own; one JSON line each on stdout."""
    target, settings = BASES[name]
    if rehearsal:
        settings = {**settings, **CPU_SHAPE, "train.seq-len": "32", "train.dtype": "fp32"}
    chosen = pick(target, settings, rehearsal)
    batch, policy = chosen
    tell(name, "auto", batch, policy, Bench(target, settings, policy).rate(batch))
    for policy in POLICIES:
        bench = Bench(target, settings, policy)
        batch = 1
        while batch <= (2 if rehearsal else 1024):
            rate = bench.rate(batch)
            tell(name, "tried", batch, policy, rate)
            if rate is None:
                break
            batch *= 2
        del bench


def safe_worker(name: str, rehearsal: bool) -> None:
    """Only what auto picks."""
    target, settings = shapes()[name]
    if rehearsal:
        settings = {**settings, **CPU_SHAPE, "train.seq-len": "32", "train.dtype": "fp32"}
        settings["train.compile"] = "false"
    batch, policy = pick(target, settings, rehearsal)
    batch = min(batch, 2) if rehearsal else batch
    tell(name, "safe", batch, policy, Bench(target, settings, policy).rate(batch))


def tell(name: str, what: str, batch: int, policy: str, rate: float | None) -> None:
    line = {
        "name": name,
        "what": what,
        "batch": batch,
        "recompute": policy,
        "positions_per_s": rate,
    }
    print(json.dumps(line), flush=True)


def summarise(lines: list[Line]) -> None:
    for name in BASES:
        of_base = [line for line in lines if line["name"] == name]
        tried = [line for line in of_base if line["what"] == "tried" and line["positions_per_s"]]
        auto = [line for line in of_base if line["what"] == "auto"]
        if not tried or not auto:
            continue
        best = max(tried, key=lambda line: line["positions_per_s"])
        mine = auto[-1]["positions_per_s"]
        share = "out of memory" if mine is None else f"{mine / best['positions_per_s']:.1%} of it"
        print(
            f"{name}: fastest of {len(tried)} that fit is batch {best['batch']} {best['recompute']}"
            f" ({best['positions_per_s']:,.0f}/s); auto takes batch {auto[-1]['batch']}"
            f" {auto[-1]['recompute']}: {share}"
        )
    safe = [line for line in lines if line["what"] in ("safe", "auto")]
    failed = [line["name"] for line in safe if line["positions_per_s"] is None]
    print(f"auto ran {len(safe)} times, out of memory {len(failed)} times {failed or ''}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=1e9)
    parser.add_argument("--safe", action="store_true")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--cpu-rehearsal", action="store_true")
    parser.add_argument("--only", default="", help="names of bases, separated by commas")
    parser.add_argument("--one", default="")
    options = parser.parse_args()
    if options.one:
        work = safe_worker if options.safe else worker
        return work(options.one, options.cpu_rehearsal)
    lines = read(options.out)
    if not options.summary:
        ensure_ceilings(options.cpu_rehearsal)
        done = {line["name"] for line in lines}
        started = time.monotonic()
        for name in shapes() if options.safe else BASES:
            if options.only and name not in options.only.split(","):
                continue
            if name in done or time.monotonic() - started > options.budget:
                continue
            extra = ["--safe"] * options.safe + ["--cpu-rehearsal"] * options.cpu_rehearsal
            command = [sys.executable, __file__, "-", "--one", name, *extra]
            child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            for text in child.stdout.splitlines():
                _append(options.out, json.loads(text))
    summarise(read(options.out))
    return None


def read(path: Path) -> list[Line]:
    if not path.is_file():
        return []
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
