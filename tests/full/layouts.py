"""Every layout against one process and against every other, in processes that stay."""

import shutil
import sys
import time
from pathlib import Path
from typing import Any

from tests.full.tiny_runs import ROOT, build_data

sys.path.insert(0, str(ROOT / "tests" / "dist"))

from layout_checks import (
    ALONE,
    LAYOUTS,
    TINY,
    TOLERANCE,
    Proving,
    farthest,
    same_bits,
    same_data,
)
from worlds import worlds

STEPS, SAVES = 60, (25, 50)
"""All that is compared at 50 steps and more is within the tolerance; saved on the way."""
RESIZED = (
    [ALONE, "ddp 4", "ddp 2", "ddp 3"],
    [ALONE, "fsdp x tensor 2 x 2", "fsdp1 2", "fsdp 3"],
    [ALONE, "hsdp 2 x 2", "tensor 2", "fsdp 3"],
)


def layouts() -> dict[str, Any]:
    """Eleven layouts: as one process, saved under each, loaded under each, resumed to the bit."""
    home = ROOT / "runs" / "full" / "layouts"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    config = _config(home)
    with worlds((1, 2, 3, 4), home) as opened:
        prove = Proving(home / "runs", config, opened)
        prove.home.mkdir()
        runs = {name: prove.whole(name) for name in LAYOUTS}
        whole = {name: _compared(runs[ALONE], runs[name]) for name in LAYOUTS}
        print(f"  {STEPS} steps under each: {whole}", flush=True)
        for name in LAYOUTS:
            for step in SAVES:
                same_bits(runs[name], prove.moved(name, name, step))
        print(f"  resumed to the bit under each, at {SAVES}", flush=True)
        matrix = {one: _row(prove, runs, one) for one in LAYOUTS}
        resized = {" -> ".join(names): _resized(prove, runs, names) for names in RESIZED}
    farthest_of_all = max(max(row.values()) for row in matrix.values())
    return {
        "steps": STEPS,
        "tolerance": TOLERANCE,
        "loss_difference_of_whole_runs": whole,
        "pairs": sum(len(row) for row in matrix.values()),
        "loss_difference_of_pairs_at_most": farthest_of_all,
        "saved_under_loaded_under": matrix,
        "resumed_bit_exact": {name: list(SAVES) for name in LAYOUTS},
        "resized": resized,
    }


def _config(home: Path) -> Any:
    """Two villages, mixed; evaluations on."""
    from foundling.config.load import load_config
    from foundling.data.build.build import build
    from foundling.data.open_source import open_source
    from foundling.tokenizer.tokenizer import Tokenizer

    first, second = build_data(home), home / "second"
    source = open_source("hamlet", seed=2, val_share=0.05)
    tokenizer = Tokenizer.load(home / "tokenizer")
    build(source, tokenizer, second, name=source.name, kind=source.kind, max_tokens=100_000)
    clock = {"train.horizon": str(STEPS), "checkpoint.every": "25", "eval.every": "30"}
    config = load_config("hamlet", {**TINY, **clock})
    return config.replace(data={"sources": {str(first): 0.7, str(second): 0.3}})


def _compared(one: Path, other: Path) -> float:
    """How far two runs that ate the same are apart, which must not be far."""
    same_data(one, other)
    found = farthest(one, other)
    assert found < TOLERANCE, f"{other.name} is {found} from {one.name}"
    return float(f"{found:.2g}")


def _row(prove: Proving, runs: dict[str, Path], one: str) -> dict[str, float]:
    """What `one` saved at 50, loaded under every layout and trained on."""
    began, found = time.monotonic(), {}
    for other in LAYOUTS:
        place = prove.moved(one, other, 50) if other != one else None
        if place is None:
            continue  # the same layout goes on to the bit, which was seen before
        found[other] = _compared(runs[ALONE], place)
        shutil.rmtree(place)
    print(f"  saved under {one}: {found} ({time.monotonic() - began:.0f} s)", flush=True)
    return found


def _resized(prove: Proving, runs: dict[str, Path], names: list[str]) -> dict[str, Any]:
    """One run over four numbers of processes: the same samples in every step."""
    run = prove.resized(names, STEPS // len(names))
    rows = same_data(runs[ALONE], run)
    return {"rows": rows, "loss_difference": _compared(runs[ALONE], run)}
