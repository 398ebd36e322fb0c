"""The plan against the device: a grid of configurations, predicted first and then measured.

    python3 tests/gpu/plan_grid.py OUT.jsonl [--budget 540] [--only NAME,...] [--role fit]
    python3 tests/gpu/plan_grid.py OUT.jsonl --summary
    python3 tests/gpu/plan_grid.py OUT.jsonl --cpu-rehearsal

One JSON line a configuration is added to OUT; what is there already is not run again, so the grid
grows over as many calls as it takes. Each runs in a process of its own with a minute to live, and
its prediction is made before, from ceilings that were stored before. Coefficients may be fitted on
the lines whose role is `fit`; the errors of the `held` lines are the result.

Needs torch, numpy, yaml and pydantic, and none of foundling's other
dependencies.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LIMIT_S = 60
Line = dict[str, Any]


class Case(NamedTuple):
    """One configuration: a preset and what is changed in it."""

    target: str
    role: str
    batch: int
    seq: int
    dtype: str = "bf16"
    recompute: str = "none"
    loss: str = "fused"
    compile: bool = False
    accumulation: int = 1

    @property
    def name(self) -> str:
        words = [self.target, f"b{self.batch}", f"s{self.seq}", self.dtype, self.recompute]
        words += [self.loss] + ["compiled"] * self.compile
        return "-".join(words) + (f"-x{self.accumulation}" if self.accumulation > 1 else "")

    def overrides(self) -> dict[str, str]:
        """As `--section.field value` would say it."""
        return {
            "train.batch-size": str(self.batch),
            "train.seq-len": str(self.seq),
            "train.global-batch-tokens": str(self.batch * self.seq * self.accumulation),
            "train.dtype": self.dtype,
            "train.kernels.loss": self.loss,
            "train.compile": str(self.compile).lower(),
            "parallel.recompute": self.recompute,
            "train.horizon": "1000",
            # Training alone is weighed: no evaluation, no copies for update ratios.
            "eval.every": "0",
            "eval.tokens": "65536",
            "log.every": "50",
        }

    def tiny(self) -> "Case":
        """The same case at a size for a laptop."""
        return self._replace(
            batch=min(self.batch, 2), seq=self.seq // 64, dtype="fp32", compile=False
        )


GRID = (
    Case("clm-60m", "fit", 48, 2048),
    Case("clm-60m", "fit", 16, 1024),
    Case("clm-60m", "held", 16, 1024, "fp32"),
    Case("clm-60m", "fit", 16, 2048, loss="plain"),
    Case("clm-60m", "fit", 4, 8192, recompute="per-op"),
    Case("clm-400m", "fit", 16, 2048),
    Case("clm-400m", "held", 16, 2048, recompute="every-2"),
    Case("clm-400m", "fit", 32, 2048, recompute="all"),
    Case("clm-400m", "held", 8, 4096, recompute="per-op"),
    Case("clm-400m", "held", 4, 1024, "fp32", loss="plain"),
    Case("clm-400m", "held", 8, 2048, compile=True),
    Case("llama-1.24b", "fit", 16, 2048),
    Case("llama-1.24b", "held", 16, 2048, recompute="every-2"),
    Case("llama-1.24b", "held", 64, 2048, recompute="all"),
    Case("llama-1.24b", "fit", 16, 2048, recompute="per-op"),
    Case("llama-1.24b", "fit", 3, 2048, "fp32"),
    Case("llama-1.24b", "held", 4, 8192),
    Case("llama-1.24b", "held", 8, 2048, loss="plain"),
    Case("llama-1.24b", "fit", 16, 2048, compile=True),
    Case("llama-1.24b", "fit", 8, 2048, recompute="per-op", compile=True),
    Case("llama-1.24b", "held", 8, 2048, accumulation=2),
    Case("depth-12", "fit", 16, 2048),
    Case("depth-12", "held", 32, 1024, recompute="every-2"),
    Case("depth-20", "held", 16, 2048),
    Case("depth-20", "held", 8, 4096, recompute="all"),
    Case("clm-200m", "held", 16, 2048),
    Case("clm-200m", "held", 8, 1024, recompute="per-op"),
    Case("clm-60m", "held", 32, 1024, recompute="every-2"),
    Case("clm-60m", "held", 16, 4096, compile=True),
)
# Small in every direction, on one thread: a rehearsal shows that the script works, no more.
CPU_SHAPE = {
    "model.dim": "64",
    "model.layers": "4",
    "model.heads": "4",
    "model.kv-heads": "2",
    "model.head-dim": "16",
    "model.ffn-dim": "128",
    "model.vocab-size": "512",
    "train.device": "cpu",
    "train.threads": "1",
}


def main() -> None:
    options = _options()
    if options.one:
        print(json.dumps(run_one(_case(options.one), options.cpu_rehearsal)))
        return
    if options.summary:
        summarise(_read(options.out))
        return
    os.environ.setdefault("FOUNDLING_HOME", str(options.out.with_suffix(".home").resolve()))
    ensure_ceilings(options.cpu_rehearsal)
    done = {line["name"] for line in _read(options.out) if not line.get("error")}
    wanted = [case.name for case in GRID if options.role in ("", case.role)]
    wanted = options.only.split(",") if options.only else wanted
    started = time.monotonic()
    for name in wanted:
        if name in done:
            continue
        if time.monotonic() - started > options.budget - LIMIT_S:
            print("the budget is used up; call again to go on")
            break
        line = run_apart(name, options.cpu_rehearsal)
        _append(options.out, line)
        print(_told(line), flush=True)
    summarise(_read(options.out))


def run_apart(name: str, rehearsal: bool) -> Line:
    """One case in a process of its own; a rehearsal stays here, where torch is loaded already."""
    case = _case(name)
    if rehearsal:
        return run_one(case, rehearsal)
    base: Line = {"name": name, "role": case.role}
    command = [sys.executable, __file__, "-", "--one", name]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    except subprocess.TimeoutExpired:
        return {**base, "error": f"took more than {LIMIT_S} s"}
    except subprocess.CalledProcessError as error:
        return {**base, "error": error.stderr.strip()[-2000:] or f"exit code {error.returncode}"}
    found: Line = json.loads(child.stdout.splitlines()[-1])
    return found


def run_one(case: Case, rehearsal: bool) -> Line:
    """Predict, then measure."""
    from foundling.config.errors import RunError
    from foundling.config.load import load_config
    from foundling.profiling.probe import probe

    overrides = case.overrides()
    if rehearsal:
        overrides = case.tiny().overrides() | CPU_SHAPE
    config = load_config(case.target, overrides)
    line: Line = {
        "name": case.name,
        "role": case.role,
        "target": case.target,
        "overrides": overrides,
        "predicted": predict(config, rehearsal),
        "measured": None,
        "oom": False,
    }
    try:
        line["measured"] = probe(config, steps=3 if rehearsal else 5).to_json()
    except RunError as error:
        line.update(oom=True, told=str(error))
    return line


def predict(config: Any, rehearsal: bool) -> Line:
    """What the plan says."""
    from foundling.plan.hardware import find_gpu
    from foundling.plan.layout import lay_out
    from foundling.plan.memory import plan_memory
    from foundling.plan.speed import plan_speed
    from foundling.plan.workload import work_of

    gpu = find_gpu("cpu" if rehearsal else _gpu_name())
    work = work_of(config, lay_out(config.parallel, 1), gpu)
    memory, speed = plan_memory(work, gpu), plan_speed(work, gpu)
    return {
        "gpu": gpu.name,
        "peak_bytes": memory.peak,
        "moment": memory.moment,
        "moments": memory.moments,
        "step_s": speed.step_s,
        "parts": speed.parts,
    }


def ensure_ceilings(rehearsal: bool) -> None:
    """Measure the device once and store it, in a process of its own, before anything is planned."""
    from foundling.plan.hardware import known_ceilings

    if known_ceilings():
        return
    device = "cpu" if rehearsal else "cuda"
    code = (
        "import torch; from foundling.profiling.ceilings import measure_ceilings;"
        "from foundling.plan.hardware import save_ceilings;"
        f"print(save_ceilings(measure_ceilings(torch.device({device!r}), quick={rehearsal})))"
    )
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})


def summarise(lines: Iterable[Line]) -> None:
    """Errors line by line, then their median and worst by role."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        print(_told(line))
        if line.get("measured"):
            errors.setdefault(line["role"], []).append(_errors(line))
    for role, pairs in sorted(errors.items()):
        for index, what in enumerate(("peak memory", "step time")):
            sizes = [abs(pair[index]) for pair in pairs]
            middle, worst = statistics.median(sizes), max(sizes)
            print(f"{role} ({len(pairs)}): {what} median {middle:.1%}, worst {worst:.1%}")


def _errors(line: Line) -> tuple[float, float]:
    """Predicted over measured, less one: peak bytes and step seconds."""
    predicted, measured = line["predicted"], line["measured"]
    peak = predicted["peak_bytes"] / measured["peak_bytes"] - 1
    return peak, predicted["step_s"] / measured["planned_step_s"] - 1


def _told(line: Line) -> str:
    head = f"{line['name']:<44} {line['role']:<4}"
    if line.get("error"):
        return f"{head} failed: {line['error'].splitlines()[-1]}"
    measured = line["measured"]
    if measured is None:
        return f"{head} out of memory"
    told = f"{head} {measured['peak_bytes'] / 2**30:8.2f} GiB {measured['step_s'] * 1e3:9.1f} ms"
    return told + " predicted {:+.1%} {:+.1%}".format(*_errors(line))


def _gpu_name() -> str:
    """The plan's name of the GPU at hand: the longest that its own name contains."""
    import torch

    from foundling.plan.hardware import device_slug, hardware

    slug = device_slug(torch.cuda.get_device_name())
    names = [name for name in hardware() if name in slug]
    names += [name for name in hardware() if name.partition("-")[0] in slug]
    if not names:
        raise SystemExit(f"{slug} is not in the plan's table of GPUs; add it to hardware.yaml.")
    return max(names, key=len)


def _case(name: str) -> Case:
    for case in GRID:
        if case.name == name:
            return case
    raise SystemExit(f"{name} is not in the grid: {', '.join(case.name for case in GRID)}")


def _read(path: Path) -> list[Line]:
    if not path.is_file():
        return []
    newest = {}  # a failed case that is run again has two lines
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        newest[line["name"]] = line
    return list(newest.values())


def _append(path: Path, line: Line) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path, help="file of JSON lines to add to")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which to stop")
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    parser.add_argument("--role", default="", choices=("", "fit", "held"), help="only these cases")
    parser.add_argument("--summary", action="store_true", help="only print what OUT holds")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
