"""The literal `lm_eval --model foundling` beside `lm_eval --model hf`, as two commands."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from foundling.config.load import load_config
from foundling.data.build.build import build
from foundling.data.open_source import open_source, training_texts
from foundling.eval.lm_eval_run import register
from foundling.tokenizer.bpe_trainer import train_tokenizer
from tests.parity.lm_eval_scene import TASKS, export, train_run, write_tasks

START = "import site, sys; site.addsitedir(sys.argv.pop(1))"
COMMAND = f"{START}; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"


def lm_eval() -> dict[str, Any]:
    """Five local tasks: loglikelihoods to 1e-3, greedy texts and every metric exactly."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        run = _run(home)
        tasks = write_tasks(home / "tasks")
        folder = export(run, home / "hf")
        register(home)
        ours = _evaluated(home, tasks, "foundling", f"path={run}")
        theirs = _evaluated(home, tasks, "hf", f"pretrained={folder},dtype=float32")
    figures = {name: _compared(ours[name], theirs[name]) for name in TASKS}
    for name, got in figures.items():
        assert got["largest difference"] < 1e-3, f"{name}: {got}"
        assert got["texts that differ"] == 0, f"{name}: {got}"
    return figures


def _run(home: Path) -> Path:
    tokenizer = train_tokenizer(training_texts(["hamlet"], max_bytes=100_000), 400)
    source = open_source("hamlet", val_share=0.05)
    build(source, tokenizer, home / "text", name="text", kind="text", max_tokens=40_000)
    shape = {"dim": "64", "layers": "3", "heads": "4", "ffn-dim": "128", "vocab-size": "0"}
    settings = {f"model.{name}": value for name, value in shape.items()}
    settings |= {
        "data.sources": json.dumps({str(home / "text"): 1.0}),
        "train.batch-size": "4",
        "train.horizon": "2",
    }
    return train_run(load_config("hamlet", settings), home / "run")


def _evaluated(home: Path, tasks: Path, model: str, where: str) -> dict[str, list[Any]]:
    out = home / model
    words = ["--model", model, "--model_args", where, "--tasks", ",".join(TASKS), "--device", "cpu"]
    words += ["--include_path", str(tasks), "--output_path", str(out), "--log_samples"]
    quiet = {"HF_HOME": str(home / "hf-home"), "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, "-c", COMMAND, str(home), *words],
        env={**os.environ, **quiet},
        check=True,
        capture_output=True,
    )
    found = {}
    for name in TASKS:
        (path,) = out.rglob(f"samples_{name}_*.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[name] = [line["resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
    return found


def _compared(mine: Any, other: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {"answers": 0, "largest difference": 0.0, "texts that differ": 0}

    def walk(a: Any, b: Any) -> None:
        if isinstance(a, list):
            assert len(a) == len(b)
            for pair in zip(a, b, strict=True):
                walk(*pair)
            return
        figures["answers"] += 1
        try:  # the harness writes numbers down as text
            figures["largest difference"] = max(
                figures["largest difference"], abs(float(a) - float(b))
            )
        except (TypeError, ValueError):
            figures["texts that differ"] += a != b

    walk(mine, other)
    return figures
