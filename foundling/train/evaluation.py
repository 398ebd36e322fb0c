"""Evaluation while training: held-out scores, samples and tasks on one clock; failures that end no
run."""

import contextlib
import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from foundling.checkpoint.manager import CheckpointManager
from foundling.config.data import DataConfig, token_shares
from foundling.config.errors import ConfigError
from foundling.config.run import SAMPLE_TOKENS, EvalConfig
from foundling.config.train import TrainConfig
from foundling.data.dataset import DataSet, held_out
from foundling.eval.bits_per_byte import BpbScore, LossScore, headline, held_out_bpb, held_out_loss
from foundling.eval.results import TOKENS, TRAINING, Results
from foundling.eval.suite import Exam, HeldOutText, Subject, check_asked, examine
from foundling.eval.task_scoring import Asking, evaluation_engine, reply_request
from foundling.generate.sampling import Sampling, derived_seed
from foundling.parallel.apply import whole_weights
from foundling.plan.serving import PROMPT_TOKENS
from foundling.runtime import files
from foundling.runtime.console import say, warn
from foundling.runtime.device import reset_peak_memory
from foundling.runtime.dist import (
    Group,
    has_ranks,
    is_main,
    max_over_ranks,
    new_gloo_group,
    on_main,
)
from foundling.runtime.exits import StoppingError
from foundling.runtime.files import write_text_atomic
from foundling.runtime.processes import StopAgreement, stop_requested_here
from foundling.runtime.progress import PROGRESS
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import read_events
from foundling.tasks.core import CORE_TASKS
from foundling.tasks.registry import BPB, CORE, Registry
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.train.dataloader import DataLoader
from foundling.train.faults.anomaly import AnomalyGuard
from foundling.train.metrics import Metrics
from foundling.train.state import TrainState
from foundling.train.step import step_seed

# Every evaluation scores the same held-out documents, the first `eval.tokens` of each source; the
# last one scores all of them as well, under names that begin with `full_`. Rejected: reading more
# at the end under the same name, which makes a curve that turns where only the documents changed.
#
# All are written down by step, so that a run killed between a checkpoint and its evaluation makes
# up for it when it continues. Neither can end a run: a failure is reported and training goes on.

SHOWN_SCORES = ("bpb", "floor_bpb", "loss", "full_bpb", "full_loss")
"""Scores on the screen, in TensorBoard and in W&B."""


# Evaluations and samples, which may fail without ending the run.
#
# On one rank a failure is reported and training goes on. Where every rank takes part, all must come
# to the same end: what can fail outside the model (a file, a text) goes through
# `same_on_all_ranks`, which raises one rank's failure on all ranks before the next collective; a
# rank that fails inside the model leaves the others in a collective that cannot be cancelled, so
# the job ends and starts again. What has ended the job twice is not tried a third time.

TRIES = 2
T = TypeVar("T")


class PeerFailedError(RuntimeError):
    """Another rank could not do its part, and this one did not begin what would need it."""


class NonFatal:
    """Work that may fail without ending the run: counts attempts, agrees on failures over ranks."""

    def __init__(self, run: RunDir, *, collective: bool, limit_s: float) -> None:
        """`collective`: all ranks take part, as where none has the whole model; otherwise only rank
        0 calls this. A rank that waits for the others longer than `limit_s` ends the job."""
        self._run, self._collective, self._limit_s = run, collective and has_ranks(), limit_s
        self._group: Group = None
        self._path = run.path / "tried.json"

    def attempt(self, what: str, step: int, action: Callable[[], None]) -> None:
        """Do `action`, if it has not ended the job before; a failure becomes an event."""
        if not self._on_main(lambda: self._may_try(what, step)):
            return
        error: Exception | None = None
        given_up = False
        with PROGRESS.during("evaluate"):
            try:
                action()
            except StoppingError:
                given_up = True
            except Exception as failure:
                error = failure
            failed = self._worst(int(error is not None))
        if given_up:
            say(f"{what} at step {step} is left for the next start")
        if failed:
            text = str(error) if error is not None else "another rank failed"
            warn(f"{what} at step {step} failed ({text}); training goes on.")
            self._on_main(lambda: self._run.event("failed", what=what, step=step, error=text))
        self._on_main(lambda: self._forget(what, step))

    def raise_if_stopping(self) -> None:
        """StoppingError if the job is to stop: called now and then by work that takes long, which
        would otherwise be killed when the grace time is over. The same on every rank that takes
        part; where rank 0 works alone, only its own signals count."""
        PROGRESS.move("evaluate")  # every batch is progress, however long all of them take
        if self._worst(int(stop_requested_here())):
            raise StoppingError

    def same_on_all_ranks(self, items: Iterable[T]) -> Iterator[T]:
        """The same items; where one cannot be made on any rank, no rank goes on with it."""
        iterator, ended = iter(items), object()
        while True:
            error: Exception | None = None
            item: Any = ended
            try:
                item = next(iterator, ended)
            except Exception as failure:
                error = failure
            if self._worst(int(error is not None)):
                raise error or PeerFailedError("another rank failed")
            if item is ended:
                return
            yield item

    def _worst(self, value: int) -> int:
        """The largest of all ranks' numbers, on a group of its own: it cannot meet a collective of
        the model that another rank is still in."""
        if not self._collective:
            return value
        if self._group is None:
            self._group = new_gloo_group(self._limit_s)
        return max_over_ranks(value, self._group, "agreement on an attempt")

    def _on_main(self, work: Callable[[], T]) -> T:
        return on_main(work) if self._collective else work()

    def _may_try(self, what: str, step: int) -> bool:
        tried = self._read()
        times = tried.get(f"{what}@{step}", 0)
        if times >= TRIES:
            warn(f"{what} at step {step} has ended the job {times} times and is left out.")
            self._run.event("failed", what=what, step=step, error=f"it ended the job {times} times")
            return False
        self._write({**tried, f"{what}@{step}": times + 1})
        return True

    def _forget(self, what: str, step: int) -> None:
        tried = self._read()
        self._write({name: times for name, times in tried.items() if name != f"{what}@{step}"})

    def _read(self) -> dict[str, int]:
        try:
            found: dict[str, int] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return found

    def _write(self, tried: dict[str, int]) -> None:
        with contextlib.suppress(OSError):  # on a full disk it is not counted
            if tried:
                write_text_atomic(self._path, json.dumps(tried) + "\n")
            else:
                self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _HeldOutScores:
    """Scores of the held-out documents of a run's sources."""

    headline: dict[str, float | None]
    sources: dict[str, Any]
    ranked_by: Literal["bpb", "loss"]
    without: list[str]
    """Sources too small to hold anything out."""
    measure: str
    """Digest of what was read and how: scores are comparable where it is the same."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out scores, samples and tasks of a run, each due on a clock of steps."""

    settings: EvalConfig
    train: TrainConfig
    data: DataConfig
    run: RunDir
    is_chat: bool
    """Whether the model has been trained on conversations, here or by the run it came from."""
    last_step: int
    tokenizer: Tokenizer
    loader: DataLoader
    guard: AnomalyGuard
    checkpoints: CheckpointManager
    metrics: Metrics
    stop: StopAgreement
    nonfatal: NonFatal
    nonfatal_on_all_ranks: NonFatal
    """The same for work that all ranks share, whether or not each has the whole model."""

    def held_out_is_due(self, step: int) -> bool:
        """Whether the held-out documents are scored at this step, by the clock alone."""
        return self._on_clock(step, self.settings.every)

    def tasks_are_due(self, step: int) -> bool:
        """Whether this step's tasks are to be scored and are not yet; collective."""
        if not self.settings.tasks or not self._on_clock(step, self.settings.tasks_every):
            return False
        return on_main(lambda: self._is_unrecorded(step, "scored"))

    def last_score_is_missing(self, step: int) -> bool:
        """Whether anything that was due at this step was not done; collective."""
        kinds = ["evaluated", *(["sampled"] if self.settings.prompts else [])]
        return self.tasks_are_due(step) or (
            self.held_out_is_due(step)
            and on_main(lambda: any(self._is_unrecorded(step, k) for k in kinds))
        )

    def run_if_due(self, state: TrainState) -> None:
        """Measure what is due at this step and was not measured yet, unless the job is to stop; no
        failure ends the run."""
        settings = self.settings
        clocks = (settings.every, settings.tasks_every if settings.tasks else 0)
        if not any(self._on_clock(state.step, every) for every in clocks) or self.stop.agreed():
            return
        if self._takes_part(state, "evaluated"):
            self._attempt("evaluation", state, self._evaluate, self.nonfatal)
        if settings.prompts and self._takes_part(state, "sampled"):
            self._attempt("sampling", state, self._sample, self.nonfatal)
        if self.tasks_are_due(state.step):
            self._attempt("tasks", state, self._score, self.nonfatal_on_all_ranks)
        gc.collect()  # automatic collection is off: cycles of an evaluation would hold its memory

    def _on_clock(self, step: int, every: int) -> bool:
        return every > 0 and step > 0 and (step % every == 0 or step == self.last_step)

    def _is_unrecorded(self, step: int, kind: str) -> bool:
        """Whether events.jsonl has no such line of the step (rank 0)."""
        done = read_events(self.run).measured[kind]
        return all(line["step"] != step for line in done)

    def _takes_part(self, state: TrainState, kind: str) -> bool:
        """Whether this rank does what is due and unrecorded; collective where none has the whole
        model."""
        if not self.held_out_is_due(state.step):
            return False
        if state.mesh.is_sharded:
            return on_main(lambda: self._is_unrecorded(state.step, kind))
        return state.world.is_main and self._is_unrecorded(state.step, kind)

    def _attempt(
        self,
        what: str,
        state: TrainState,
        action: Callable[[TrainState], None],
        nonfatal: NonFatal,
    ) -> None:
        def work() -> None:
            nonfatal.raise_if_stopping()
            with whole_weights(state.module):
                action(state)

        reset_peak_memory(state.device)
        nonfatal.attempt(what, state.step, work)
        reset_peak_memory(state.device)

    def _evaluate(self, state: TrainState) -> None:
        started = time.perf_counter()
        files.failpoint("evaluate")
        part = self._held_out(state, self.settings.tokens)
        full = self._held_out(state, 0) if state.step == self.last_step else None
        if not state.world.is_main:
            return
        step, best_by = state.step, part.ranked_by
        line: dict[str, Any] = {
            "step": step,
            "total_tokens": state.ledger.total.tokens,
            **part.headline,
            "best_by": best_by,
            "measure": part.measure,
            "sources": part.sources,
            **({f"full_{name}": value for name, value in full.headline.items()} if full else {}),
            **({"full_sources": full.sources} if full else {}),
            "seconds": round(time.perf_counter() - started, 3),
            "memory_eval_peak": state.memory()["memory_peak"],
        }
        before = read_events(self.run).measured["evaluated"]
        self.run.event("evaluated", **line)
        if before and before[-1]["measure"] != part.measure:
            self.checkpoints.forget_scores()
            say(
                f"  held-out scores before step {step} were of other documents, weights or context"
                " length; checkpoint.keep_best ranks from here on"
            )
        if (score := part.headline[best_by]) is not None:
            self.checkpoints.score(step, score)
        numbers = {name: line[name] for name in SHOWN_SCORES if line.get(name) is not None}
        self.metrics.scores(step, numbers)
        text = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        if part.without:
            text += f"  (nothing is held out of {', '.join(part.without)})"
        say(f"  held out at step {step}: {text}")

    def _held_out(self, state: TrainState, limit: int) -> _HeldOutScores:
        """Score so many held-out tokens of each source; 0: all of them."""
        # As long as the rows that it was just trained on.
        window = self.loader.segment(state.step - 1).seq_len
        data, datasets = self.data, self.loader.datasets
        measure = hashlib.sha256(f"{window} {data.sources} {data.weights_by}".encode())
        scores: dict[str, BpbScore | LossScore] = {}
        for name, dataset in datasets.items():
            documents = list(self.nonfatal.same_on_all_ranks(held_out(dataset, limit)))
            if not documents:
                continue
            for document in documents:
                measure.update(document.tokens.tobytes())
            score = held_out_bpb if dataset.manifest.kind == "text" else held_out_loss
            scores[name] = score(
                state.model,
                documents,
                state.device,
                dtype=state.dtype,
                window=window,
                between=self.nonfatal.raise_if_stopping,
            )
        stored = {name: dataset.stored for name, dataset in datasets.items()}
        found = headline(scores, token_shares(data.sources, data.weights_by, stored))
        is_text = all(isinstance(score, BpbScore) for score in scores.values())
        return _HeldOutScores(
            headline=found,
            sources={name: asdict(score) for name, score in scores.items()},
            # Bits per byte know nothing of conversations: where there are any, the loss ranks.
            ranked_by="bpb" if is_text else "loss",
            without=[name for name in datasets if name not in scores],
            measure=measure.hexdigest()[:16],
        )

    def _sample(self, state: TrainState) -> None:
        started = time.perf_counter()
        seed = step_seed(self.train.seed, state.step, 0)
        tokenizer, prompts = self.tokenizer, self.settings.prompts
        if self.is_chat:
            ids = [tokenizer.prompt([{"role": "user", "content": text}]) for text in prompts]
        else:
            ids = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in prompts]
        engine = evaluation_engine(
            state.model,
            state.device,
            dtype=state.dtype,
            max_tokens=PROMPT_TOKENS,
            longest=max(map(len, ids), default=0) + SAMPLE_TOKENS,
        )
        replies = engine.complete(
            [
                reply_request(
                    engine,
                    tokenizer,
                    prompt,
                    SAMPLE_TOKENS,
                    # Equal prompts go on differently.
                    Sampling(temperature=0.7, top_p=0.95, seed=derived_seed(seed, place)),
                )
                for place, prompt in enumerate(ids)
            ]
        )
        samples = [
            {"prompt": prompt, "text": tokenizer.decode(reply.ids, skip_special=True)}
            for prompt, reply in zip(prompts, replies, strict=True)
        ]
        if not state.world.is_main:
            return
        seconds = round(time.perf_counter() - started, 3)
        self.run.event("sampled", step=state.step, samples=samples, seconds=seconds)
        say(f"  sample: {samples[0]['prompt']}{samples[0]['text']!r}")

    # Tasks: ranks that each have the whole model share the examples; ranks that have parts compute
    # together. What is done is kept batch by batch in RUN/evals/step-N, so a run that is stopped in
    # the middle goes on there; the event says that a step is finished.

    def _score(self, state: TrainState) -> None:
        began = time.perf_counter()
        settings = self.settings
        registry = Registry()
        # A file may be missing on one machine only: then no rank goes on to where they wait.
        named = (registry.find(words) for words in [settings.tasks])
        (tasks,) = self.nonfatal_on_all_ranks.same_on_all_ranks(named)
        results = Results(
            self.run.path / "evals" / f"step-{state.step}",
            source=str(self.run.path),
            step=state.step,
            # After a rollback the same step has other weights.
            stamp=f"{TRAINING}course {len(self.guard.interventions)}",
            more={"total_tokens": state.ledger.total.tokens},
        )
        exam = Exam(
            tasks=tasks,
            baselines=registry.core.baselines if CORE in tasks else {},
            documents=self._documents,
            limit=settings.tasks_limit,
            max_tokens=self.train.batch_size * self.train.seq_len,
            asking=Asking(as_text=not self.is_chat),
            split=not state.mesh.is_sharded,
            between=self.nonfatal.raise_if_stopping,
        )
        subject = Subject(
            model=state.model,
            tokenizer=self.tokenizer,
            device=state.device,
            dtype=state.dtype,
            window=self.loader.segment(state.step - 1).seq_len,
        )
        examine(subject, exam, results)
        if is_main():
            self._write_scores(state, results, time.perf_counter() - began)

    def _documents(self) -> HeldOutText:
        """The documents that every evaluation reads."""
        data = self.data
        stored = {name: dataset.stored for name, dataset in self.loader.datasets.items()}
        shares = token_shares(data.sources, data.weights_by, stored)
        sources = {
            name: list(held_out(dataset, self.settings.tokens))
            for name, dataset in self.loader.datasets.items()
            if dataset.manifest.kind == "text" and name in shares
        }
        return HeldOutText(sources=sources, shares=shares, name="bpb")

    def _write_scores(self, state: TrainState, results: Results, seconds: float) -> None:
        kept = ("value", "stderr", "n", "centered", "metric")
        line: dict[str, Any] = {
            "step": state.step,
            "total_tokens": state.ledger.total.tokens,
            "tasks": {
                name: {field: entry[field] for field in kept if field in entry}
                for name, entry in results.tasks.items()
            },
            "core": results.core,
            "seconds": round(seconds, 3),
        }
        self.run.event("scored", **line)
        numbers = {f"task/{name}": float(entry["value"]) for name, entry in results.tasks.items()}
        if results.core:
            numbers[results.core["name"]] = results.core["value"]
        self.metrics.scores(state.step, numbers)
        text = "  ".join(_in_words(results))
        say(f"  tasks at step {state.step}: {text} ({seconds:.0f} s)")


def _in_words(results: Results) -> Iterator[str]:
    """CORE instead of its 22 tasks, then every other one, each with what it rests on."""
    core = {results.core["name"]: results.core} if results.core else {}
    others = {
        name: entry
        for name, entry in results.tasks.items()
        if entry["metric"] != TOKENS and not (core and name in CORE_TASKS)
    }
    for name, entry in {**core, **others}.items():
        yield f"{name} {entry['value']:.4f} ±{entry['stderr']:.4f} of {entry['n']:,}"


def check_tasks(config: EvalConfig, datasets: Mapping[str, DataSet]) -> None:
    """Refuse eval.tasks that are unknown, missing or unsuitable, before the run begins."""
    if not config.tasks:
        return
    tasks = Registry().find(config.tasks)
    check_asked(tasks, config.tasks_limit)
    if BPB in tasks and all(data.manifest.kind != "text" for data in datasets.values()):
        raise ConfigError(
            "eval.tasks asks for bpb, and no source of this run is text; leave it out."
        )
