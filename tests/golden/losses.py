"""Losses of six small runs, each with other mathematics, as JSON: `python -m tests.golden.losses`.

Printed as hexadecimal floats, so that two trees can be compared bit for bit (compare_commits.py).
"""

import json
import sys
import tempfile
from pathlib import Path

from foundling.config.load import load_config
from foundling.runtime.run_dir import RunDir, read_lines
from tests.village import TINY, Village, build_village

SPEED_RECIPE = {
    "model.activation": "relu2",
    "model.norm": "rms-unscaled",
    "model.qk-norm": "true",
    "model.embed-norm": "true",
    "model.value-embeds": "true",
    "model.residual-scales": "true",
    "model.logit-softcap": "15",
    "model.windows": "16,0",
    "optim.name": "muon",
    "optim.lr": "0.02",
    "optim.cautious-decay": "true",
}
CONFIGS: dict[str, dict[str, str]] = {
    "adamw": {},
    "muon, windows, softcap": SPEED_RECIPE,
    "8-bit, accumulation, recompute": {
        "optim.name": "adamw8bit",
        "train.global-batch-tokens": "512",
        "parallel.recompute": "all",
    },
    "buckets, GPT-2 shape, dropout": {
        "data.packing": "bucket",
        "data.buckets": "[16, 32]",
        "data.bucket-tokens": "128",
        "model.norm": "layer",
        "model.bias": "all",
        "model.activation": "gelu",
        "model.positions": "64",
        "model.dropout": "0.1",
        "train.z-loss": "0.001",
    },
    "fine-tuning, two sources, masked documents": {
        "train.start": "",
        "data.document-mask": "true",
    },
    "phases, concat, grouped queries, tied": {
        "data.packing": "concat",
        "data.phases": '[{"at": 0.5, "seq_len": 32}]',
        "model.kv-heads": "1",
        "model.tie-embeddings": "true",
        "optim.schedule": "wsd",
        "optim.decay-share": "0.5",
    },
}


def losses(name: str, village: Village, folder: Path) -> list[float]:
    """The training loss of every step of one of the configs."""
    from foundling.train.loop import train

    shape = {key: value for key, value in TINY.items() if key.startswith(("model.", "train."))}
    settings = {**shape, "eval.every": "1000", **CONFIGS[name]}
    is_tuned = "train.start" in settings
    if is_tuned:
        parent = folder.with_name(f"{folder.name}-parent")
        settings["train.start"] = str(parent)
        losses("adamw", village, parent)
    config = load_config("hamlet", settings)
    sources = {str(village.text): 1.0}
    if is_tuned:
        sources[str(village.chat)] = 1.0
    train(config.replace(data={"sources": sources}), RunDir(folder))
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl")]


def main() -> None:
    """Run all and print them to stdout; what training says goes to stderr."""
    out, sys.stdout = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory() as home:
        village = build_village(Path(home))
        found = {
            name: [loss.hex() for loss in losses(name, village, Path(home) / f"run-{number}")]
            for number, name in enumerate(CONFIGS)
        }
    print(json.dumps(found, indent=1), file=out)


if __name__ == "__main__":
    main()
