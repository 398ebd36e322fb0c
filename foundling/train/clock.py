"""What is measured while training: held-out scores and samples, each on its own clock.

Both are written down by step, so that a run killed between a checkpoint and its evaluation makes
up for it when it continues. Neither can end a run: a failure is told and training goes on.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foundling.checkpoint.ranks import on_main
from foundling.data import held_out
from foundling.eval import held_out_bpb, held_out_loss
from foundling.generate import Engine, Sampling
from foundling.parallel import whole_weights
from foundling.runtime import points
from foundling.runtime.rundir import read_lines
from foundling.train.memory import forget_peak
from foundling.train.step import step_seed

if TYPE_CHECKING:
    from foundling.train.stages import Job


def evaluate_if_due(job: "Job") -> None:
    """Score the held-out split; the last evaluation reads all of it."""
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
    final = job.state.step == job.horizon.steps
    limit = 0 if final else job.config.eval.tokens
    scores: dict[str, Any] = {}
    points.at("evaluate")
    # As long as the rows that it was just trained on.
    window = job.feed.segment(job.state.step - 1).seq_len
    for name, dataset in job.feed.datasets.items():
        documents = job.attempts.agreed(held_out(dataset, limit))
        score = held_out_bpb if dataset.manifest.kind == "text" else held_out_loss
        result = score(
            job.state.model,
            documents,
            job.state.device,
            dtype=job.state.dtype,
            window=window,
            between=job.attempts.go_on,
        )
        scores[name] = asdict(result)
    if not job.state.world.is_main:
        return
    # One source is the common case, and its numbers are what curves are drawn of.
    main = scores[next(iter(scores))]
    line = {
        "step": job.state.step,
        "total_tokens": job.state.ledger.total.tokens,
        **main,
        "sources": scores,
        "seconds": round(time.perf_counter() - started, 3),
        "memory_eval_peak": job.state.memory()["memory_peak"],
    }
    job.run.append(job.run.evals_path, line)
    if (score := main.get("bpb", main.get("loss"))) is not None:
        job.saver.score(job.state.step, score)
    numbers = {k: main[k] for k in ("bpb", "floor_bpb", "loss") if main.get(k) is not None}
    job.metrics.scores(job.state.step, numbers)
    told = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
    job.metrics.note(f"  held out at step {job.state.step}: {told}")


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
