"""Short real runs of the presets for small cards: python3 tests/gpu/capped_runs.py DATA OUT.json

Each trains under its card's cap on memory, is stopped and started again, scores held-out text,
speaks, and saves. `--rehearse` takes tiny models and no cap, where there is no GPU; with `--only`
the others' results are left in OUT.json. Ends with 1 where a run does not end well.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import read_events

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from small_cards import CASES

HALF, STEPS = 6, 12
CAPPED = """
import sys
gigabytes = float(sys.argv.pop(1))
from foundling.bench.batch_size import cap_memory
from foundling.runtime.device import choose_device
if gigabytes:
    cap_memory(choose_device("cuda", "auto").device, gigabytes)
from foundling.cli.main import main
sys.exit(main())
"""
TINY = {
    "model.dim": 64,
    "model.layers": 2,
    "model.heads": 4,
    "model.head-dim": 16,
    "model.kv-heads": 2,
    "model.ffn-dim": 128,
    "train.seq-len": 256,
    "train.batch-size": 2,
}


def train(
    preset: str, gigabytes: float, folder: Path, settings: dict[str, Any], *, stop_at: int = 0
) -> str:
    """One start of the run; what it said where it failed, else nothing. With `stop_at` it is told
    to stop after so many steps, which is no failure."""
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-W", "ignore", "-c", CAPPED, str(gigabytes), "train", preset]
    with tempfile.TemporaryFile("w+") as said:
        run = subprocess.Popen(
            [*command, "--run", str(folder), *words],
            stdout=said,
            stderr=said,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            while run.poll() is None:
                time.sleep(0.2)
                if stop_at and len(lines(folder / "metrics.jsonl")) >= stop_at:
                    run.send_signal(signal.SIGTERM)
                    stop_at = 0
        finally:
            run.kill()  # whoever stops this script wants the device for something else
        said.seek(0)
        return "" if run.returncode in (0, 75) else f"({run.returncode}) {said.read()[-800:]}"


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a file of one JSON value a line; none where it is missing."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.is_file() else []


def measure(
    preset: str, gigabytes: float, data: Path, folder: Path, *, tiny: bool
) -> dict[str, Any]:
    """Begin, stop after three steps, and go on in another process."""
    settings: dict[str, Any] = {
        "data.sources": json.dumps({str(data.resolve()): 1.0}),
        "data.allow-repeat": 100,
        "train.horizon": STEPS,
        "train.global-batch-tokens": 4 * 14336 if "qwen" in preset else 1024 if tiny else 65536,
        "eval.prompts": '["The village"]',
        "eval.tokens": 20000,
        "optim.warmup": 2,
        "eval.every": HALF,
        "checkpoint.every": HALF,
        **(TINY if tiny else {}),
    }
    problems = [train(preset, gigabytes, folder, settings, stop_at=3)]
    begun = len(lines(folder / "metrics.jsonl"))
    problems.append(train(preset, gigabytes, folder, settings))
    measured = read_events(RunDir(folder)).measured
    steps, scores = lines(folder / "metrics.jsonl"), measured["evaluated"]
    found = {
        "cap_bytes": gigabytes * 1e9,
        "steps_before_the_stop": begun,
        "steps": len(steps),
        "scores": len(scores),
        "samples": len(measured["sampled"]),
        "checkpoints": len(list((folder / "checkpoints").glob("*"))),
        "losses": [line["loss"] for line in steps],
        "reserved": max((line["memory_peak_reserved"] for line in steps), default=0),
        "eval_peak": max((line["memory_eval_peak"] for line in scores), default=0),
    }
    counts = {"steps": STEPS, "scores": 2, "samples": 2}
    problems += [f"{found[name]} {name}" for name, count in counts.items() if found[name] < count]
    if not tiny and found["reserved"] > gigabytes * 1e9:
        problems.append("more was reserved than the card has")
    return {**found, "problems": [problem for problem in problems if problem]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="tiny models, no cap")
    parser.add_argument("--only", choices=sorted(CASES), help="this preset alone")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    report: dict[str, Any] = {"rehearsed": options.rehearse, "cases": {}}
    if options.only and options.out.is_file():
        report = json.loads(options.out.read_text())
    for preset, gigabytes in CASES.items():
        if options.only not in (None, preset):
            continue
        cap = 0.0 if options.rehearse else gigabytes
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder) / "run"
            found = measure(preset, cap, options.data, home, tiny=options.rehearse)
        report["cases"][preset] = found
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        print(preset, json.dumps(found), flush=True)
    return 1 if any(one["problems"] for one in report["cases"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
