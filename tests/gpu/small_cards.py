"""The presets for small cards under a cap on memory: python3 tests/gpu/small_cards.py OUT.json

Each through the product's own bench in this one process: ten timed steps and a loss check at the
preset's own rows, with no more memory than the card has. The buckets of the first are timed at
their shortest and longest rows too. `--rehearse` takes tiny models and no cap, where there is no
GPU. Ends with 1 where a case does not fit, or its loss check fails.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from foundling.bench.batch_size import cap_memory
from foundling.bench.train import BenchOptions, bench_train
from foundling.config.data import packing_spec_of
from foundling.config.errors import UserError
from foundling.config.load import load_config
from foundling.config.run import RunConfig
from foundling.profiling.step_runner import RandomRows, StepRunner
from foundling.runtime.device import choose_device, device_name, free_cached_memory

CASES = {"qwen2-0.5b-gpt2-24gb": 24.0, "tinygpt-524m-16gb": 16.0, "llama-1.24b-24gb": 24.0}
"""GB of each card."""
STEPS, CHECK_STEPS = 10, 6
USUAL_EDGE = 2048
"""The bucket that is benched in full: most documents of web text are not longer."""


def config_of(preset: str, *, tiny: bool) -> RunConfig:
    """The preset, or a model of two small layers with everything else of it."""
    config = load_config(preset)
    if not tiny:
        return config
    small = {"dim": 64, "layers": 2, "heads": 4, "head_dim": 16, "ffn_dim": 128, "vocab_size": 500}
    kv_heads = 2 if config.model.num_kv_heads < config.model.heads else 4
    return config.replace(model={**small, "kv_heads": kv_heads})


def measure(preset: str, gigabytes: float, *, tiny: bool) -> dict[str, Any]:
    """One case: figures, memory against the cap, and the loss check."""
    config, began = config_of(preset, tiny=tiny), time.perf_counter()
    cut = packing_spec_of(config.train.seq_len, config.data.packing, config.data)
    benched = config
    if cut.packing == "bucket":
        rows = cut.rows_in(USUAL_EDGE)
        train = config.train.replace(seq_len=USUAL_EDGE, batch_size=rows)
        benched = config.replace(train=train)
    if tiny:
        benched = benched.replace(train={"seq_len": 64})
    cap = 0.0 if tiny else gigabytes
    asked = BenchOptions(
        steps=STEPS, check_steps=CHECK_STEPS, check_rows=0, micro_steps=2, memory=cap
    )
    bench = bench_train(benched, asked, tell=lambda text: print(f"  {text}", flush=True))
    ours, check = bench.ours, bench.check
    assert check is not None
    most = max(ours.reserved, ours.allocated)
    found = {
        "cap_bytes": gigabytes * 1e9,
        "rows": ours.rows,
        "micro_steps": ours.micro_steps,
        "seq_len": benched.train.seq_len,
        "tokens_per_s": ours.tokens_per_s,
        "mfu": ours.mfu,
        "allocated": ours.allocated,
        "reserved": ours.reserved,
        "how": ours.how,
        "loss_off": check.loss_off,
        "losses": [check.ours.losses[0], check.ours.losses[-1]],
        "reference_losses": [check.reference.losses[0], check.reference.losses[-1]],
        "problems": check.problems,
    }
    if cut.packing == "bucket":
        found["buckets"] = buckets(config, cap, tiny=tiny)
        most = max(most, *(one["reserved"] for one in found["buckets"].values()))
    found["fits"] = tiny or most <= gigabytes * 1e9
    found["seconds"] = time.perf_counter() - began
    return found


def buckets(config: RunConfig, cap: float, *, tiny: bool) -> dict[str, Any]:
    """Full micro-batches of the shortest and of the longest rows, one after the other as they come
    in a run: what one leaves in the allocator's cache is in the way of the other."""
    choice = choose_device(config.train.device, config.train.dtype)
    cap_memory(choice.device, cap)
    cut = packing_spec_of(config.train.seq_len, config.data.packing, config.data)
    runner, found = StepRunner(config, choice), {}
    for edge in (cut.edges[0], cut.edges[-1]):
        width = edge // 64 if tiny else edge
        rows = RandomRows(config.model.vocab_size, width, 1)
        timed = runner.timed(rows, 5, size=cut.rows_in(edge), micro_steps=2)
        found[str(edge)] = {
            "rows": timed.rows,
            "tokens_per_s": timed.tokens_per_s,
            "allocated": timed.allocated,
            "reserved": timed.reserved,
        }
    del runner
    free_cached_memory()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="tiny models, no cap")
    parser.add_argument("--only", help="one preset of them")
    options = parser.parse_args()
    device = choose_device("auto", "auto").device
    report: dict[str, Any] = {"device": device_name(device), "torch": torch.__version__}
    report |= {"rehearsed": options.rehearse, "cases": {}}
    for preset, gigabytes in CASES.items():
        if options.only in (None, preset):
            print(f"{preset} in {gigabytes:g} GB", flush=True)
            try:
                report["cases"][preset] = measure(preset, gigabytes, tiny=options.rehearse)
            except (UserError, torch.OutOfMemoryError) as error:
                report["cases"][preset] = {"fits": False, "problems": [str(error)]}
            free_cached_memory()
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            print(json.dumps(report["cases"][preset]), flush=True)
    failed = [n for n, one in report["cases"].items() if one["problems"] or not one["fits"]]
    print(f"failed: {', '.join(failed)}" if failed else "all fit and learn as the reference does")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
