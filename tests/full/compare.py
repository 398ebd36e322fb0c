"""`compare` on models that are equal by construction: how often it cries wolf."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from foundling.eval.comparison import compare
from tests.unit.eval.compare_samples import Scores, equal_models, write_scores

TRIES = 400
LEAST, MOST = 0.03, 0.07
Drawn = tuple[dict[str, Scores], dict[str, Scores], dict[str, Scores], str]


def calibration() -> dict[str, Any]:
    """400 comparisons of equals for each kind of score: p < 0.05 in 3% to 7% of them."""
    figures = {}
    for number, (kind, draw) in enumerate(KINDS.items()):
        found = _tried(draw, np.random.default_rng([2026, number]))
        figures[kind] = found
        print(f"  {kind}: {found}", flush=True)
    for kind, found in figures.items():
        for what, share in found.items():
            assert LEAST <= share <= MOST, f"{kind}, {what}: {share}"
    return {"tries": TRIES, "shares of p < 0.05": figures}


def _tried(draw: Callable[[np.random.Generator], Drawn], rng: np.random.Generator) -> Any:
    alarms: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(TRIES):
            a, b, weights, metric = draw(rng)
            folders = []
            for name, tasks in (("a", a), ("b", b)):
                folder = Path(scratch) / name
                folders.append(write_scores(folder, tasks, metric=metric, weights=weights))
            found = compare([str(folders[0])], [str(folders[1])])
            judged = {**found["tasks"], "in all": found["all"]}
            for task, entry in judged.items():
                alarms[task] = alarms.get(task, 0) + (entry["p"] < 0.05)
    return {task: count / TRIES for task, count in alarms.items()}


def _questions(rng: np.random.Generator) -> Drawn:
    """Right and wrong: three tasks of other sizes and difficulties."""
    drawn = {
        "of 100": equal_models(rng, 100, 0.4),
        "of 300": equal_models(rng, 300, 0.25),
        "of 1000": equal_models(rng, 1000, 0.7),
    }
    return {k: v[0] for k, v in drawn.items()}, {k: v[1] for k, v in drawn.items()}, {}, "accuracy"


def _texts(rng: np.random.Generator) -> Drawn:
    """Bits per byte: documents of very different lengths, deviations with heavy tails."""
    size = rng.lognormal(7, 1, 150)
    level = rng.normal(1.0, 0.3, 150)
    a, b = (level + 0.02 * rng.standard_t(3, 150) for _ in "ab")
    return {"text": a}, {"text": b}, {"text": size}, "bpb"


def _parts(rng: np.random.Generator) -> Drawn:
    """Shares between right and wrong, such as token F1, of which many are 0 or 1."""
    chance = rng.beta(1, 1, 120)
    a, b = (np.clip(np.round(rng.normal(chance, 0.4), 2), 0, 1) for _ in "ab")
    return {"f1": a}, {"f1": b}, {}, "f1"


KINDS: dict[str, Callable[[np.random.Generator], Drawn]] = {
    "right and wrong": _questions,
    "bits per byte": _texts,
    "F1": _parts,
}
