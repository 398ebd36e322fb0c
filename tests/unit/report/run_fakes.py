"""Made-up run directories for the report's tests."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from foundling.config.load import dump_yaml
from foundling.config.presets import hamlet, hamlet_chat
from foundling.runtime.run_dir import RunDir

EVIL = '</script><script>alert("x")</script> & <b>bold</b>'


def make_run(folder: Path, *, chat: bool = False, parent: Any = None, steps: int = 30) -> RunDir:
    """A run of so many steps with everything a run can hold."""
    run = RunDir(folder)
    folder.mkdir(parents=True)
    config = hamlet_chat() if chat else hamlet()
    run.config_path.write_text(dump_yaml(config.replace(eval={"prompts": (EVIL,)})))
    plan = {
        "predicted": {"parameters": 1000, "train_s": 100.0, "tokens": 3000, "memory_bytes": 5e8},
        "measured": {"parameters": 1000, "train_s": 110.0, "tokens": 2991},
    }
    run.write_info(
        {
            "chat": chat,
            "status": "finished",
            "parent": parent,
            "plan": plan,
        }
    )
    changed = {"step": 0, "changes": {"a": [1, 2]}}
    events: list[dict[str, Any]] = [
        {"time": 1.7e9, "event": "begun", "note": EVIL},
        {"time": 1.7e9 + 9, "event": "resumed", **changed},
    ]
    for step in range(10, steps + 1, 10):
        scores = {"loss": 9.0 / step, "floor_loss": 0.25, "bpb": 5.0 / step, "floor_bpb": 0.125}
        samples = [{"prompt": EVIL, "text": f"said at {step} {EVIL}"}]
        events += [
            {"event": "evaluated", "step": step, **scores},
            {"event": "sampled", "step": step, "samples": samples},
        ]
    write_lines(run.events_path, events)
    write_lines(run.metrics_path, map(metrics_line, range(1, steps + 1)))
    return run


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def metrics_line(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 8.0 / step,
        "lr": 1e-3,
        "grad_norm": 1.0 + (99.0 if step == 17 else 0.0),
        "update_ratio": 1e-3 if step % 5 == 0 else None,
        "tokens": 100,
        "total_tokens": 100 * step,
        "tokens_per_s": 1234.5,
        "non_padding": 0.97,
        "step_s": 0.5,
        "sources": {},
    }


def write_final(run: RunDir) -> None:
    """The result of an evaluation."""
    reply = {"prompt": EVIL, "answer": "yes", "reply": EVIL, "correct": False, "kind": "age"}
    quiz = {
        "accuracy": 0.9625,
        "n": 400,
        "stderr": 0.0095,
        "documents_only": 0.91,
        "documents_only_n": 150,
        "documents_only_stderr": 0.0234,
        "sums": None,
        "sums_n": 0,
        "by_kind": {"age": {"accuracy": 0.5, "n": 2, "stderr": 0.35}},
        "replies": [reply, {**reply, "correct": True}],
    }
    kinds = {"letter": {"bpb": 0.5, "floor_bpb": 0.4, "bytes": 1000, "documents": 3}}
    final = {
        "step": 30,
        "full_bpb": 0.51,
        "full_floor_bpb": 0.41,
        "bytes": 1000,
        "by_kind": kinds,
        "quiz": quiz,
    }
    run.durable_event("evaluated_by_hand", **final)
