"""The whole evaluation of a run: what to measure is read from the run, so nobody can pick.

Bits per byte are measured on the held-out split of the run's own text. A fine-tuned run has only
conversations, so it is measured on the text of the run it came from: that shows what fine-tuning
cost. A run raised on Hamlet is put to the quiz of its own village.

The result is a plain dict; whoever called decides where it is kept.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foundling.checkpoint import Bundle
from foundling.config import Manifest, RunConfig
from foundling.data import DataSet, held_out
from foundling.eval.bpb import BpbScore, HeldOut, held_out_bpb
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

    text: tuple[str, ...]
    """Folders of built text."""
    village: int | None
    """Seed of the village that the run was raised on, if it was."""


def evaluate(
    bundle: Bundle,
    *,
    device: torch.device,
    data_path: str | None = None,
    quiz_questions: int = 500,
    dtype: torch.dtype = torch.float32,
    max_tokens: int = 0,
    say: Progress | None = None,
) -> dict[str, Any]:
    """Measure a model: `bpb` and `floor_bpb` (None without text), `quiz` (None off Hamlet).

    `data_path` replaces the run's own text; `quiz_questions` 0 leaves the quiz out; `max_tokens`
    limits the held-out tokens read per data set (0: all).
    """
    started = time.time()
    tell = say or (lambda text: None)
    model = bundle.model.to(device)
    material = find_material(bundle, data_path)
    result: dict[str, Any] = {
        "stage": bundle.config.train.stage,
        "step": bundle.step,
        "time": started,
        "data": list(material.text),
        "bpb": None,
        "floor_bpb": None,
        "quiz": None,
    }
    if material.text:
        tell(f"held-out text of {', '.join(material.text)}")
        result |= _measure_text(bundle, material.text, device, dtype, max_tokens)
    if material.village is not None and quiz_questions:
        tell(f"a quiz of {quiz_questions} questions")
        engine = Engine(model, device, dtype=None if dtype == torch.float32 else dtype)
        task = HamletQuiz(material.village, QUIZ_SEED, quiz_questions)
        as_text = bundle.config.train.stage == "pretrain"
        score = run_quiz(engine, bundle.tokenizer, task, as_text=as_text)
        result["quiz"] = {**score.to_json(), "asked": "as text" if as_text else "as chat"}
    result["seconds"] = round(time.time() - started, 3)
    return result


def describe_scores(scores: Mapping[str, Any]) -> list[str]:
    """The scores for a person, each with what it rests on."""
    lines = []
    if scores["bpb"] is not None:
        floor = scores["floor_bpb"]
        above = (
            "" if floor is None else f", {scores['bpb'] - floor:.4f} above the floor {floor:.4f}"
        )
        lines.append(f"bits per byte  {scores['bpb']:.4f}{above} ({scores['bytes']:,} bytes)")
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
    bundle: Bundle,
    folders: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    max_tokens: int,
) -> dict[str, Any]:
    """The score over all folders together, and of each if there are several."""

    def score(documents: list[HeldOut]) -> BpbScore:
        window = bundle.context
        return held_out_bpb(bundle.model, documents, device, dtype=dtype, window=window)

    read: dict[str, list[HeldOut]] = {
        folder: list(held_out(DataSet(folder, tokenizer=bundle.tokenizer.fingerprint), max_tokens))
        for folder in folders
    }
    found = score([document for documents in read.values() for document in documents]).to_json()
    if len(read) > 1:
        found["by_source"] = {name: score(documents).to_json() for name, documents in read.items()}
    return found


def find_material(bundle: Bundle, data_path: str | None = None) -> Material:
    """The text and the village of a run, from its own config or its nearest ancestor's."""
    manifests: dict[str, Manifest] = {}
    for config in _configs(bundle):
        manifests |= {path: Manifest.load(Path(path)) for path in config.data.sources}
        if any(manifest.kind == "text" for manifest in manifests.values()):
            break
    text = tuple(path for path, manifest in manifests.items() if manifest.kind == "text")
    villages = [seed for m in manifests.values() if (seed := village_of(m)) is not None]
    return Material((data_path,) if data_path else text, villages[0] if villages else None)


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
