"""What saving costs a training of the 1.24B model on one GPU: the copy, and the writing behind it.

    python3 tests/gpu/save_cost.py OUT.json [--every 100] [--rounds 2] [--cpu-rehearsal]

Rounds of `every` steps without and with one save at their beginning, in turn; the figure is how
much longer the rounds with a save took, the first one too. The disk is the one under the folder of
OUT.json.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from foundling.checkpoint.manager import CheckpointManager
from foundling.config.load import load_config
from foundling.config.run import CheckpointConfig
from foundling.profiling.step_runner import StepRunner, random_rows
from foundling.runtime.device import choose_device
from foundling.runtime.dist import World

SETTINGS = {
    "train.global-batch-tokens": "0",
    "train.horizon": "1000",
    "train.seq-len": "2048",
    "train.batch-size": "24",
    "train.dtype": "bf16",
    "eval.every": "0",
    "log.every": "50",
}
SMALL = {
    "model.dim": "64",
    "model.layers": "2",
    "model.ffn-dim": "128",
    "model.vocab-size": "512",
    "train.seq-len": "64",
    "train.batch-size": "2",
    "train.dtype": "fp32",
}


def measure(every: int, rounds: int, rehearsal: bool, home: Path) -> dict[str, Any]:
    """Rounds in turn; means over them."""
    config = load_config("llama-1.24b", {**SETTINGS, **(SMALL if rehearsal else {})})
    bench = StepRunner(config, choose_device(config.train.device, config.train.dtype))
    rows, size = random_rows(bench.config), config.train.batch_size

    def timed(count: int) -> list[float]:
        return bench.timed(rows, count, size=size, warmup=0).step_s

    timed(5)
    plain, saved, results = [], [], []
    with CheckpointManager(
        home / "run" / "checkpoints", CheckpointConfig(keep=1), World()
    ) as saver:
        began = time.perf_counter()
        saver.prepare(bench.state.tensors())
        prepare_s = time.perf_counter() - began
        for number in range(rounds):
            plain.append(timed(every))
            stall = saver.save(number + 1, bench.state.tensors(), {"step": number + 1})
            times = timed(every)
            saved.append([stall + times[0], *times[1:]])
            saver._wait()
            results += saver.poll()
        saver.finish()
    without, with_save = (statistics.mean(map(sum, each)) for each in (plain, saved))
    return {
        "steps_between_saves": every,
        "prepare_s": prepare_s,
        "step_s": statistics.median(x for each in plain for x in each),
        "round_s": without,
        "round_with_save_s": with_save,
        "adds": with_save / without - 1,
        "stall_s": [result.stall_s for result in results],
        "write_s": [result.write_s for result in results],
        "checkpoint_gb": results[-1].bytes / 1e9,
        "errors": [result.error for result in results if result.error],
    }


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cpu-rehearsal", action="store_true")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(dir=options.out.parent))
    try:
        found = measure(options.every, options.rounds, options.cpu_rehearsal, home)
    finally:
        shutil.rmtree(home)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
