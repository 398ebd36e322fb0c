"""Every way to compute a step, trained side by side: python3 tests/gpu/same_losses.py DATA OUT.json

500 steps of 32,768 tokens on a built data set of real text, same seed and order, compared on the
mean loss of the last 50 steps: bf16 with fp32, float8 and 8-bit moments with bf16, fused loss and
attention kernels with plain ones. Runs that OUT.json holds already are not repeated, so that the
script can be cut off and started again.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

STEPS, LAST = 500, 50
MODELS: dict[str, list[str]] = {
    "clm-60m": ["--train.batch-size", "16"],
    "depth-12": ["--train.batch-size", "16"],
}
VARIANTS: dict[str, list[str]] = {
    "bf16": [],
    "fp32": ["--train.dtype", "fp32"],
    "float8 tensorwise": ["--train.float8", "tensorwise"],
    "float8 rowwise": ["--train.float8", "rowwise"],
    "8-bit AdamW": ["--optim.name", "adamw8bit"],
    "AdamW": ["--optim.name", "adamw"],
    "eager": ["--train.compile", "off"],
    "plain loss": ["--train.loss", "plain"],
    "attention flash": ["--train.attention", "flash"],
    "attention efficient": ["--train.attention", "efficient"],
    "attention flex": ["--train.attention", "flex"],
    "another seed": ["--train.seed", "2"],
}
"""What each changes. Another seed shows what noise is."""
AGAINST: dict[str, tuple[str, float | None]] = {
    "bf16": ("fp32", 0.003),
    "float8 tensorwise": ("bf16", 0.005),
    "float8 rowwise": ("bf16", 0.005),
    "8-bit AdamW": ("AdamW", 0.005),
    "eager": ("bf16", None),
    "plain loss": ("bf16", None),
    "attention flash": ("bf16", None),
    "attention efficient": ("bf16", None),
    "attention flex": ("bf16", None),
    "another seed": ("bf16", None),
}
"""With which run it is compared, and how far off it may be; None: it is only told."""


def train(model: str, variant: str, data: str, steps: int, folder: Path) -> list[float]:
    """The loss of every step."""
    run = folder / f"{model}-{variant.replace(' ', '-')}"
    command = [
        *(sys.executable, "-W", "ignore", "-m", "foundling.cli", "train", model),
        *("--run", str(run), "--data.sources", json.dumps({data: 1.0})),
        *("--data.allow-repeat", "100", "--train.tokens-per-param", "0"),
        *("--train.steps", str(steps), "--train.seq-len", "2048"),
        *("--train.global-batch-tokens", "32768", "--eval.every", "0", "--eval.sample-every", "0"),
        *("--checkpoint.every", str(steps), "--log.every", "100", *MODELS[model]),
        *VARIANTS[variant],
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def compared(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Each run beside the one that it is held to."""
    rows = []
    for variant, (other, limit) in AGAINST.items():
        if variant in found and other in found:
            ours, theirs = (mean(found[name][-LAST:]) for name in (variant, other))
            off = ours / theirs - 1
            held = limit is None or off <= limit
            row = {"variant": variant, "loss": ours, "against": other, "other": theirs}
            rows.append({**row, "off": off, "limit": limit, "held": held})
    return rows


def main() -> None:
    """Train what is missing, compare everything, fail where a limit is exceeded."""
    data, out = sys.argv[1], Path(sys.argv[2])
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else STEPS
    wanted = sys.argv[4].split(",") if len(sys.argv) > 4 else list(VARIANTS)
    results: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    failed = False
    for model in MODELS:
        losses = results.setdefault(model, {"losses": {}})["losses"]
        with tempfile.TemporaryDirectory() as folder:
            for variant in wanted:
                if variant not in losses:
                    losses[variant] = train(model, variant, data, steps, Path(folder))
                    out.write_text(json.dumps(results))
        results[model]["compared"] = compared(losses)
        for row in results[model]["compared"]:
            failed |= not row["held"]
            print(
                f"{model}: {row['variant']} {row['loss']:.4f}, {row['off']:+.3%} of"
                f" {row['against']}"
            )
    out.write_text(json.dumps(results))
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
