"""What is measured while training: held-out scores and samples, each on its own clock.

Every evaluation scores the same held-out documents, the first `eval.tokens` of each source; the
last one scores all of them as well, under names that begin with `full_`. Rejected: reading more at
the end under the same name, which makes a curve that turns where only the documents changed.

Both are written down by step, so that a run killed between a checkpoint and its evaluation makes
up for it when it continues. Neither can end a run: a failure is told and training goes on.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from foundling.checkpoint.ranks import on_main
from foundling.config.phases import token_shares
from foundling.data import held_out
from foundling.eval import BpbScore, LossScore, headline, held_out_bpb, held_out_loss
from foundling.generate import Engine, Sampling
from foundling.parallel import whole_weights
from foundling.runtime import points
from foundling.runtime.rundir import read_lines
from foundling.train.memory import forget_peak
from foundling.train.step import step_seed

if TYPE_CHECKING:
    from foundling.train.stages import Job

SHOWN = ("bpb", "floor_bpb", "loss", "full_bpb", "full_loss")
"""Scores on the screen, in TensorBoard and in W&B."""


def evaluate_if_due(job: "Job") -> None:
    """Score the fixed part of the held-out split, and at the last step all of it as well."""
    every = job.config.eval.every
    if _due(job, every, job.run.evals_path):
        _safely(job, "evaluation", _evaluate)


def evaluation_is_due(job: "Job") -> bool:
    """Whether this step is one of those that are scored."""
    return _on_clock(job, job.config.eval.every)


def last_score_is_missing(job: "Job") -> bool:
    """Whether the evaluation or the sample of this step was due and was not done; collective."""
    due = [(job.config.eval.every, job.run.evals_path)]
    if job.config.eval.prompts:
        due.append((job.config.eval.sample_every, job.run.samples_path))
    return on_main(
        lambda: any(_on_clock(job, every) and _missing(job, path) for every, path in due)
    )


def sample_if_due(job: "Job") -> None:
    """Continue the fixed prompts, so that one can watch it learn to speak."""
    if job.config.eval.prompts and _due(job, job.config.eval.sample_every, job.run.samples_path):
        _safely(job, "sampling", _sample)


def _on_clock(job: "Job", every: int) -> bool:
    step = job.state.step
    return every > 0 and step > 0 and (step % every == 0 or step == job.horizon.steps)


def _due(job: "Job", every: int, path: Path) -> bool:
    if not _on_clock(job, every):
        return False
    if job.state.mesh.is_sharded:
        # No process has the whole model: all take part, and the main one knows what is missing.
        return on_main(lambda: _missing(job, path))
    return job.state.world.is_main and _missing(job, path)


def _missing(job: "Job", path: Path) -> bool:
    return not any(line["step"] == job.state.step for line in read_lines(path))


def _safely(job: "Job", what: str, action: Callable[["Job"], None]) -> None:
    def do() -> None:
        job.attempts.go_on()
        with whole_weights(job.state.module):
            action(job)

    forget_peak(job.state.device)
    job.attempts.attempt(what, job.state.step, do)
    forget_peak(job.state.device)


def _evaluate(job: "Job") -> None:
    started = time.perf_counter()
    points.at("evaluate")
    part = _held_out(job, job.config.eval.tokens)
    full = _held_out(job, 0) if job.state.step == job.horizon.steps else None
    if not job.state.world.is_main:
        return
    step, best_by = job.state.step, part.ranked_by
    line: dict[str, Any] = {
        "step": step,
        "total_tokens": job.state.ledger.total.tokens,
        **part.headline,
        "best_by": best_by,
        "measure": part.measure,
        "sources": part.sources,
        **({f"full_{name}": value for name, value in full.headline.items()} if full else {}),
        **({"full_sources": full.sources} if full else {}),
        "seconds": round(time.perf_counter() - started, 3),
        "memory_eval_peak": job.state.memory()["memory_peak"],
    }
    before = read_lines(job.run.evals_path)
    job.run.append(job.run.evals_path, line)
    if before and before[-1]["measure"] != part.measure:
        job.saver.forget_scores()
        job.metrics.note(
            f"  held-out scores before step {step} were of other documents, weights or context"
            " length; checkpoint.keep_best ranks from here on"
        )
    if (score := part.headline[best_by]) is not None:
        job.saver.score(step, score)
    numbers = {name: line[name] for name in SHOWN if line.get(name) is not None}
    job.metrics.scores(step, numbers)
    told = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
    if part.without:
        told += f"  (nothing is held out of {', '.join(part.without)})"
    job.metrics.note(f"  held out at step {step}: {told}")


@dataclass(frozen=True)
class _Scored:
    """Scores of the held-out documents of a run's sources."""

    headline: dict[str, float | None]
    sources: dict[str, Any]
    ranked_by: Literal["bpb", "loss"]
    without: list[str]
    """Sources too small to hold anything out."""
    measure: str
    """Digest of what was read and how: scores are comparable where it is the same."""


def _held_out(job: "Job", limit: int) -> _Scored:
    """Score so many held-out tokens of each source; 0: all of them."""
    # As long as the rows that it was just trained on.
    window = job.feed.segment(job.state.step - 1).seq_len
    data, datasets = job.config.data, job.feed.datasets
    measure = hashlib.sha256(f"{window} {data.sources} {data.weights_by}".encode())
    scores: dict[str, BpbScore | LossScore] = {}
    for name, dataset in datasets.items():
        documents = list(job.attempts.agreed(held_out(dataset, limit)))
        if not documents:
            continue
        for document in documents:
            measure.update(document.tokens.tobytes())
        score = held_out_bpb if dataset.manifest.kind == "text" else held_out_loss
        scores[name] = score(
            job.state.model,
            documents,
            job.state.device,
            dtype=job.state.dtype,
            window=window,
            between=job.attempts.go_on,
        )
    stored = {name: dataset.stored for name, dataset in datasets.items()}
    found = headline(scores, token_shares(data.sources, data.weights_by, stored))
    is_text = all(isinstance(score, BpbScore) for score in scores.values())
    return _Scored(
        headline=found,
        sources={name: asdict(score) for name, score in scores.items()},
        # Bits per byte know nothing of conversations: where there are any, the loss ranks.
        ranked_by="bpb" if is_text else "loss",
        without=[name for name in datasets if name not in scores],
        measure=measure.hexdigest()[:16],
    )


def _sample(job: "Job") -> None:
    started = time.perf_counter()
    sampling = Sampling(
        temperature=0.7, top_p=0.95, seed=step_seed(job.config.train.seed, job.state.step, 0)
    )
    tokenizer, prompts = job.tokenizer, job.config.eval.prompts
    if job.config.train.stage == "finetune":
        ids = [tokenizer.prompt([{"role": "user", "content": text}]) for text in prompts]
    else:
        ids = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in prompts]
    # In training's arithmetic: its attention kernels may take no other.
    dtype = None if job.state.dtype == torch.float32 else job.state.dtype
    cached = job.state.mesh.layout.tensor == 1
    engine = Engine(job.state.model, job.state.device, dtype=dtype, cached=cached)
    replies = engine.generate(ids, job.config.eval.sample_tokens, sampling, tokenizer.stop_ids)
    samples = [
        {"prompt": prompt, "text": tokenizer.decode(reply.ids, skip_special=True)}
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    if not job.state.world.is_main:
        return
    seconds = round(time.perf_counter() - started, 3)
    line = {"step": job.state.step, "samples": samples, "seconds": seconds}
    job.run.append(job.run.samples_path, line)
    job.metrics.note(f"  sample: {samples[0]['prompt']}{samples[0]['text']!r}")
