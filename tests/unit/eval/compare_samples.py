"""Evaluations written by hand, as `foundling eval` leaves them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Scores = Sequence[float] | NDArray[Any]


def write_scores(
    folder: Path,
    tasks: Mapping[str, Scores],
    *,
    metric: str = "accuracy",
    weights: Mapping[str, Scores] | None = None,
    more: Mapping[str, Mapping[int, Mapping[str, Any]]] | None = None,
    shots: int = 0,
    first: int = 0,
) -> Path:
    """scores.json and a file a task; `more` adds fields to single lines."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = {}
    for name, scores in tasks.items():
        heavy = (weights or {}).get(name, [1.0] * len(scores))
        extra = (more or {}).get(name, {})
        lines = [
            {"id": f"{name}-{first + n}", "score": float(s), "weight": float(w), **extra.get(n, {})}
            for n, (s, w) in enumerate(zip(scores, heavy, strict=True))
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
        value = float(np.average(np.asarray(scores), weights=np.asarray(heavy)))
        entries[name] = {"value": value, "metric": metric, "n": len(scores), "shots": shots}
    head = {"schema": 1, "source": str(folder), "step": 5, "time": 0.0, "core": None}
    (folder / "scores.json").write_text(json.dumps({**head, "tasks": entries}))
    return folder


def equal_models(rng: np.random.Generator, n: int, ease: float) -> tuple[Scores, Scores]:
    """Right and wrong of two models that have the same chance on every question."""
    chance = rng.beta(2 * ease, 2 * (1 - ease), n)
    return (rng.random(n) < chance) * 1.0, (rng.random(n) < chance) * 1.0
