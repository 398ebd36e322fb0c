"""Tasks scored while training, on a clock of their own: CORE and whatever else is asked for.

Ranks that each have the whole model share the examples; ranks that have parts compute together.
What is done is kept batch by batch in RUN/evals/step-N, so a run that is stopped in the middle goes
on there; a line of task_scores.jsonl says that a step is finished. Nothing here ends a run.
"""

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from foundling.checkpoint.ranks import is_main, on_main
from foundling.config import ConfigError
from foundling.config.phases import token_shares
from foundling.config.sections import EvalConfig
from foundling.data import DataSet, held_out
from foundling.eval.generative import Asking
from foundling.eval.results import TOKENS, TRAINING, Results
from foundling.eval.suite import Exam, HeldOutText, Subject, check_asked, examine
from foundling.parallel import whole_weights
from foundling.runtime.pulse import PULSE
from foundling.runtime.rundir import read_lines
from foundling.runtime.signals import is_told
from foundling.tasks import CORE_TASKS, Registry
from foundling.tasks.registry import BPB, CORE
from foundling.train.attempt import GivenUpError
from foundling.train.memory import forget_peak

if TYPE_CHECKING:
    from foundling.train.stages import Job


def check_tasks(config: EvalConfig, datasets: Mapping[str, DataSet]) -> None:
    """What means nothing, is not there or cannot be asked stops a run before it begins."""
    if not config.tasks:
        return
    tasks = Registry().find(config.tasks)
    check_asked(tasks, config.tasks_limit)
    if BPB in tasks and all(data.manifest.kind != "text" for data in datasets.values()):
        raise ConfigError(
            "eval.tasks asks for bpb, and no source of this run is text; leave it out."
        )


def tasks_are_due(job: "Job") -> bool:
    """Whether this step's tasks are to be scored and are not yet; collective."""
    config, step = job.config.eval, job.state.step
    every = config.tasks_every if config.tasks else 0
    if not every or step < 1 or (step % every and step != job.horizon.steps):
        return False
    path = job.run.task_scores_path
    return on_main(lambda: all(line["step"] != step for line in read_lines(path)))


def score_tasks_if_due(job: "Job") -> None:
    """Score the tasks; a failure is told and training goes on."""
    if not tasks_are_due(job):
        return
    forget_peak(job.state.device)
    job.together.attempt("tasks", job.state.step, lambda: _score(job))
    forget_peak(job.state.device)


def _score(job: "Job") -> None:
    began = time.perf_counter()
    config, state = job.config.eval, job.state
    registry = Registry()
    # A file may be missing on one machine only: then no rank goes on to where they wait.
    (tasks,) = job.together.agreed(registry.find(words) for words in [config.tasks])
    results = Results(
        job.run.path / "evals" / f"step-{state.step}",
        source=str(job.run.path),
        step=state.step,
        # After a rollback the same step has other weights.
        stamp=f"{TRAINING}course {len(job.guard.record)}",
        more={"total_tokens": state.ledger.total.tokens},
    )
    exam = Exam(
        tasks=tasks,
        baselines=registry.core.baselines if CORE in tasks else {},
        documents=lambda: _documents(job),
        limit=config.tasks_limit,
        max_tokens=job.config.train.batch_size * job.config.train.seq_len,
        asking=Asking(as_text=job.config.train.stage == "pretrain"),
        split=not state.mesh.is_sharded,
        between=job.together.go_on if state.mesh.is_sharded else _go_on,
    )
    subject = Subject(
        model=state.model,
        tokenizer=job.tokenizer,
        device=state.device,
        dtype=state.dtype,
        window=job.feed.segment(state.step - 1).seq_len,
        whole=state.mesh.layout.tensor > 1,
    )
    with whole_weights(state.module):
        examine(subject, exam, results)
    if is_main():
        _write_down(job, results, time.perf_counter() - began)


def _go_on() -> None:
    """Ranks that work apart hear a signal apart; the others learn of it when all come together."""
    PULSE.move("evaluate")  # every batch is progress, however long all of them take
    if is_told():
        raise GivenUpError


def _documents(job: "Job") -> HeldOutText:
    """The documents that every evaluation reads."""
    data = job.config.data
    stored = {name: dataset.stored for name, dataset in job.feed.datasets.items()}
    shares = token_shares(data.sources, data.weights_by, stored)
    sources = {
        name: list(held_out(dataset, job.config.eval.tokens))
        for name, dataset in job.feed.datasets.items()
        if dataset.manifest.kind == "text" and name in shares
    }
    return HeldOutText(sources=sources, shares=shares, name="bpb")


def _write_down(job: "Job", results: Results, seconds: float) -> None:
    kept = ("value", "stderr", "n", "centered", "metric")
    line: dict[str, Any] = {
        "step": job.state.step,
        "total_tokens": job.state.ledger.total.tokens,
        "tasks": {
            name: {field: entry[field] for field in kept if field in entry}
            for name, entry in results.tasks.items()
        },
        "core": results.core,
        "seconds": round(seconds, 3),
    }
    job.run.append(job.run.task_scores_path, line)
    numbers = {f"task/{name}": float(entry["value"]) for name, entry in results.tasks.items()}
    if results.core:
        numbers[results.core["name"]] = results.core["value"]
    job.metrics.scores(job.state.step, numbers)
    told = "  ".join(_told(results))
    job.metrics.note(f"  tasks at step {job.state.step}: {told} ({seconds:.0f} s)")


def _told(results: Results) -> Iterator[str]:
    """CORE instead of its 22 tasks, then every other one, each with what it rests on."""
    core = {results.core["name"]: results.core} if results.core else {}
    others = {
        name: entry
        for name, entry in results.tasks.items()
        if entry["metric"] != TOKENS and not (core and name in CORE_TASKS)
    }
    for name, entry in {**core, **others}.items():
        yield f"{name} {entry['value']:.4f} ±{entry['stderr']:.4f} of {entry['n']:,}"
