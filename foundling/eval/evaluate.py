"""The whole evaluation of a run: what to measure is read from the run, so nobody can pick.

Bits per byte are measured on the whole held-out split of the run's own text, each source by its
share of the mixture; `full_` tells them from those that a run scores on its clock, which are of a
part. A fine-tuned run has only conversations, so it is measured on the text of the run it came
from: that shows what fine-tuning cost. A run raised on Hamlet is put to the quiz of its own
village.

The result is a plain dict; whoever called decides where it is kept.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foundling.checkpoint import Bundle
from foundling.config import DataError, Manifest, RunConfig
from foundling.config.packed import stored_in
from foundling.config.phases import token_shares
from foundling.data import DataSet, held_out
from foundling.eval.bpb import BpbScore, headline, held_out_bpb, kinds_of
from foundling.eval.quiz import run_quiz
from foundling.generate import Engine
from foundling.runtime import RunDir
from foundling.tasks import HamletQuiz

QUIZ_SEED = 0
"""Always the same questions about a village, so that runs can be compared."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Material:
    """What a run is to be measured on."""

    text: Mapping[str, float]
    """Folders of built text, each with its share of the mixture's tokens."""
    village: int | None
    """Seed of the village that the run was raised on, if it was."""
    lost: tuple[str, ...] = ()
    """The run's own data sets that are not there any more, where other data was asked for."""


def evaluate(
    bundle: Bundle,
    *,
    device: torch.device,
    data_path: str | None = None,
    quiz_questions: int = 500,
    dtype: torch.dtype = torch.float32,
    say: Progress | None = None,
) -> dict[str, Any]:
    """Measure a model: `full_bpb` and `full_floor_bpb` (None without text), `quiz` (None off
    Hamlet). `data_path` replaces the run's own text; `quiz_questions` 0 leaves the quiz out."""
    started = time.time()
    tell = say or (lambda text: None)
    model = bundle.model.to(device)
    material = find_material(bundle, data_path)
    result: dict[str, Any] = {
        "stage": bundle.config.train.stage,
        "step": bundle.step,
        "time": started,
        "data": list(material.text),
        "full_bpb": None,
        "full_floor_bpb": None,
        "quiz": None,
    }
    if material.text:
        tell(f"held-out text of {', '.join(material.text)}")
        result |= _measure_text(bundle, material.text, device, dtype)
    if material.village is not None and quiz_questions:
        tell(f"a quiz of {quiz_questions} questions")
        engine = Engine(model, device, dtype=None if dtype == torch.float32 else dtype)
        task = HamletQuiz(material.village, QUIZ_SEED, quiz_questions)
        as_text = bundle.config.train.stage == "pretrain"
        score = run_quiz(engine, bundle.tokenizer, task, as_text=as_text)
        result["quiz"] = {**score.to_json(), "asked": "as text" if as_text else "as chat"}
    elif material.lost and quiz_questions:
        tell(f"no quiz: {', '.join(material.lost)}, which would name a village, cannot be read")
    result["seconds"] = round(time.time() - started, 3)
    return result


def describe_scores(scores: Mapping[str, Any]) -> list[str]:
    """The scores for a person, each with what it rests on."""
    lines = []
    if (bits := scores["full_bpb"]) is not None:
        floor = scores["full_floor_bpb"]
        above = "" if floor is None else f", {bits - floor:.4f} above the floor {floor:.4f}"
        size = f"all {scores['bytes']:,} bytes held out"
        lines.append(f"bits per byte  {bits:.4f}{above} ({size})")
        for kind, score in scores["by_kind"].items():
            floor = score["floor_bpb"]
            told = "" if floor is None else f"  (floor {floor:.4f})"
            lines.append(f"  {kind:<12} {score['bpb']:.4f}{told}")
    if scores["quiz"]:
        quiz = scores["quiz"]
        lines.append(
            f"quiz           {quiz['accuracy']:.1%} of {quiz['n']} right (± {quiz['stderr']:.1%})"
        )
        # A share of nothing is None: a short quiz may have no question of a kind.
        lines += [
            f"  {name.replace('_', ' ')} {quiz[name]:.1%} of {quiz[f'{name}_n']}"
            for name in ("documents_only", "unknown_declined", "known_wrongly_declined")
            if quiz[name] is not None
        ]
    return lines


def _measure_text(
    bundle: Bundle, shares: Mapping[str, float], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The score of each folder, and of all by their shares."""
    scores: dict[str, BpbScore] = {}
    for folder in shares:
        data = DataSet(folder, tokenizer=bundle.tokenizer.fingerprint)
        if documents := list(held_out(data)):
            scores[folder] = held_out_bpb(
                bundle.model, documents, device, dtype=dtype, window=bundle.context
            )
    found = headline(scores, shares)
    sizes = ("bytes", "tokens", "documents")
    return {
        "full_bpb": found["bpb"],
        "full_floor_bpb": found["floor_bpb"],
        "by_kind": kinds_of(scores, shares),
        **{size: sum(getattr(score, size) for score in scores.values()) for size in sizes},
        "by_source": {folder: score.to_json() for folder, score in scores.items()},
    }


def find_material(bundle: Bundle, data_path: str | None = None) -> Material:
    """The text and the village of a run, from its own config or its nearest ancestor's; where other
    data is named, nothing of the run's own need be there."""
    manifests: dict[str, Manifest] = {}
    shares: dict[str, float] = {}
    lost: list[str] = []
    for config in _configs(bundle):
        for path in config.data.sources:
            try:
                manifests[path] = Manifest.load(Path(path))
            except DataError:
                if data_path is None:
                    raise
                lost.append(path)
        weights = {p: w for p, w in config.data.sources.items() if p in manifests}
        if text := {p: w for p, w in weights.items() if manifests[p].kind == "text"}:
            stored = {path: stored_in(manifests[path]) for path in text}
            shares = token_shares(text, config.data.weights_by, stored)
            break
    villages = [seed for m in manifests.values() if (seed := village_of(m)) is not None]
    return Material(
        {data_path: 1.0} if data_path else shares, villages[0] if villages else None, tuple(lost)
    )


def village_of(manifest: Manifest) -> int | None:
    """Seed of the village that a data set was written by, if it was."""
    # A build records its source's own recipe under "source", beside how it was built.
    recipe = manifest.recipe.get("source", {})
    return int(recipe["seed"]) if recipe.get("source") in ("hamlet", "hamlet:chat") else None


def _configs(bundle: Bundle) -> list[RunConfig]:
    """The run's config and those of its ancestors that are still there, nearest first."""
    from foundling.config.resolve import load_run_config

    run: RunDir | None = RunDir(bundle.run.resolve())
    configs, seen = [bundle.config], set[Path]()
    while run is not None and run.exists and run.path not in seen:
        seen.add(run.path)
        run = run.parent()
        if run is not None and run.config_path.is_file():
            configs.append(load_run_config(run.config_path))
    return configs
