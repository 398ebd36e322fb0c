"""Tasks put to a model one after the other: split over ranks, kept batch by batch, summed up.

What is finished is not done again, and of a task that was cut off only the rest is; so the same
command line continues what a kill interrupted. Ranks that have the whole model each take every
n-th example; ranks that have parts of it (`split` off) compute all together and one writes.
"""

import hashlib
import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from foundling.config.errors import DataError
from foundling.data.dataset import HeldOutDoc
from foundling.eval.bits_per_byte import (
    bpb_entry,
    bpb_line,
    document_ids,
    document_losses,
    scales_of,
)
from foundling.eval.results import TOKENS, Clock, Line, Results, apart, plain_entry
from foundling.eval.task_scoring import (
    Asking,
    evaluation_engine,
    reply_request,
    run_generative,
    run_icl,
    summary,
)
from foundling.generate.engine import Engine
from foundling.model.transformer import Transformer
from foundling.plan.serving import LONGEST_TASK
from foundling.runtime.dist import combine_on_main, is_main, on_main, rank_and_size
from foundling.tasks.base import Score, Task
from foundling.tasks.core import centered, core_score
from foundling.tasks.in_context import SHUFFLE_SEED, IclTask
from foundling.tasks.knowledge import OPEN_PROMPTS
from foundling.tasks.registry import BPB, COMPLETIONS, CORE, QUIZ, AnyTask, examples_of
from foundling.tokenizer.tokenizer import Tokenizer

COMPLETION_TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class HeldOutText:
    """The documents that bpb is scored on."""

    sources: Mapping[str, Sequence[HeldOutDoc]]
    shares: Mapping[str, float]
    """Each source's share of the mixture."""
    name: str = "full_bpb"
    """What the score is called: of all that is held out, or of a part."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model as it is examined."""

    model: Transformer
    tokenizer: Tokenizer
    device: torch.device
    dtype: torch.dtype = torch.float32
    window: int | None = None
    """Tokens of context for held-out text; None: documents whole."""


@dataclass(frozen=True, kw_only=True)
class Exam:
    """What is asked, and how."""

    tasks: Mapping[str, AnyTask | None]
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Of CORE's tasks, where CORE is asked for."""
    documents: Callable[[], HeldOutText] | None = None
    """Held-out text, where bpb is asked for."""
    shots: int | None = None
    """What the tasks of CORE were given instead of their own numbers of solved examples."""
    limit: int = 0
    """Examples a task; 0: all. Held-out text comes as it is to be scored."""
    max_tokens: int = 0
    """Positions that go through the model at once; 0: what suits the device."""
    asking: Asking = field(default_factory=Asking)
    contaminated: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Ids of examples that stand in the training data, by task; a task that is named here has its
    examples marked."""
    split: bool = True
    """Every rank has the whole model and takes its share of the examples."""
    between: Callable[[], None] = lambda: None
    """Called before every step of the engine; may raise to give up."""
    tell: Callable[[str], None] | None = None


def check_asked(tasks: Mapping[str, AnyTask | None], limit: int) -> None:
    """A list that cannot be asked is told before a model is loaded, or trained for days."""
    for name, task in tasks.items():
        if name == QUIZ:
            raise DataError(
                "the quiz is asked by `foundling eval RUN` without a list of tasks; leave it out of"
                " the list."
            )
        if isinstance(task, IclTask):
            task.chosen(limit)
        elif task is not None:
            examples_of(task)


def examine(subject: Subject, exam: Exam, results: Results) -> None:
    """Score every task that is not scored yet, and CORE if it was asked for."""
    engine = evaluation_engine(
        subject.model,
        subject.device,
        dtype=subject.dtype,
        max_tokens=exam.max_tokens,
        longest=max(LONGEST_TASK, subject.window or 0),
        before_step=exam.between,
    )
    # All of them first: what cannot be asked is told before an hour of what can.
    asked = {name: task for name, task in exam.tasks.items() if name != CORE}
    jobs = [_job(subject, exam, engine, name, task) for name, task in asked.items()]
    for job in jobs:
        if on_main(lambda job=job: results.finished(job.name, job.settings)):  # type: ignore[misc]
            continue
        _do(job, exam, results)
    if CORE in exam.tasks:
        on_main(lambda: _close_core(exam, results))


@dataclass(frozen=True)
class _Job:
    """One task, ready to be worked on: by ids, so that what is done can be left out."""

    name: str
    settings: dict[str, Any]
    ids: list[str]
    work: Callable[[list[int], Callable[[list[Line]], None]], None]
    """Do the examples at these places and hand their lines over, batch by batch."""
    entry: Callable[[list[Line]], dict[str, Any]]
    """What scores.json says of all lines together."""


def _do(job: _Job, exam: Exam, results: Results) -> None:
    rank, size = rank_and_size() if exam.split else (0, 1)
    writes = exam.split or is_main()
    kept: dict[str, Line] = on_main(lambda: results.done(job.name, job.settings))
    places = [place for place, id in enumerate(job.ids) if id not in kept][rank::size]
    clock = Clock(job.name, len(places), exam.tell)
    mine: list[Line] = []

    def done(lines: list[Line]) -> None:
        if (dirty := exam.contaminated.get(job.name)) is not None:
            lines = [{**line, "contaminated": line["id"] in dirty} for line in lines]
        mine.extend(lines)
        if writes:
            results.keep(job.name, job.settings, rank, lines)
        clock.add(len(lines))

    def all_lines() -> list[Line]:
        job.work(places, done)
        return mine

    def close(parts: list[list[Line]]) -> None:
        found = kept | {line["id"]: line for lines in parts for line in lines}
        lines = [found[id] for id in job.ids]
        entry = {**job.entry(lines), **apart(job.name, lines)}
        entry |= {"settings": job.settings, "seconds": round(clock.seconds, 2)}
        results.close(job.name, entry, lines)

    combine_on_main(all_lines, close)


def _job(subject: Subject, exam: Exam, engine: Engine, name: str, task: AnyTask | None) -> _Job:
    common: dict[str, Any] = {"dtype": str(subject.dtype).removeprefix("torch.")}
    if (dirty := exam.contaminated.get(name)) is not None:
        common["contaminated"] = _digest(sorted(dirty))
    if isinstance(task, IclTask):
        return _icl_job(subject, engine, task.chosen(exam.limit), {**common, "limit": exam.limit})
    if task is not None:
        return _generative_job(subject, exam, engine, task, common)
    if name == BPB:
        return _bpb_job(subject, exam, engine, common)
    return _completions_job(subject, engine, exam.limit)


def _icl_job(subject: Subject, engine: Engine, task: IclTask, settings: Mapping[str, Any]) -> _Job:
    def entry(lines: list[Line]) -> dict[str, Any]:
        plain = plain_entry(task.name, lines, "accuracy")
        return {
            **plain,
            "baseline": task.baseline,
            "centered": centered(plain["value"], task.baseline),
            "shots": task.shots,
            "kind": task.kind,
        }

    return _Job(
        name=task.name,
        settings={**settings, "shots": task.shots, "questions": task.digest},
        ids=[str(number) for number, _ in task.rows],
        work=lambda places, done: run_icl(engine, subject.tokenizer, task, places, done),
        entry=entry,
    )


def _generative_job(
    subject: Subject, exam: Exam, engine: Engine, task: Task, settings: Mapping[str, Any]
) -> _Job:
    every = examples_of(task)
    questions = _digest([f"{e.key} {e.messages} {getattr(e, 'answer', '')}" for e in every])
    # In an order that has nothing to do with the file's: MMLU's is by subject, and its beginning is
    # algebra.
    examples = list(every)
    if 0 < exam.limit < len(every):
        random.Random(SHUFFLE_SEED).shuffle(examples)
        examples = examples[: exam.limit]

    def entry(lines: list[Line]) -> dict[str, Any]:
        fields = plain_entry(task.name, lines, "accuracy")
        baseline = getattr(task, "baseline", None)
        if baseline is not None:
            fields |= {"baseline": baseline, "centered": centered(fields["value"], baseline)}
        asked = "as text" if exam.asking.as_text or getattr(task, "as_text", False) else "as chat"
        return {**fields, "asked": asked, **summary(lines)}

    return _Job(
        name=task.name,
        settings={
            **settings,
            "limit": exam.limit,
            **asdict(exam.asking),
            "questions": questions,
            "grader": _grader(task),
        },
        ids=[example.key for example in examples],
        work=lambda places, done: run_generative(
            engine,
            subject.tokenizer,
            task,
            [examples[place] for place in places],
            exam.asking,
            done,
        ),
        entry=entry,
    )


def _digest(texts: Iterable[str | bytes]) -> str:
    """Tells lists of texts apart."""
    found = hashlib.sha256()
    for text in texts:
        found.update(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
        found.update(b"\0")
    return found.hexdigest()[:16]


def _grader(task: Task) -> str:
    """Of the file that a task's class is written in: after a change there, old grades are none."""
    try:
        file = inspect.getsourcefile(type(task))
    except TypeError:  # made at a prompt
        return ""
    return _digest([Path(file).read_bytes()]) if file and Path(file).is_file() else ""


def _bpb_job(subject: Subject, exam: Exam, engine: Engine, settings: Mapping[str, Any]) -> _Job:
    assert exam.documents is not None
    text = exam.documents()
    sources = {
        name: some for name, some in text.sources.items() if any(one.text_bytes for one in some)
    }
    if any(document.mask is not None for some in sources.values() for document in some):
        raise DataError("bpb is for text and this data set holds conversations; give a text one.")
    documents = [document for some in sources.values() for document in some]
    if not documents:
        raise DataError("the held-out split holds no text; build the data with a larger one.")
    named = [name for name, some in sources.items() for _ in some]
    ids = document_ids(subject.tokenizer, documents)

    def work(places: list[int], done: Callable[[list[Line]], None]) -> None:
        some = [documents[place] for place in places]
        for number, nats, targets in document_losses(engine, some, subject.window):
            place = places[number]
            weight = scales[named[place]] * documents[place].text_bytes
            done([bpb_line(ids[place], named[place], documents[place], nats, targets, weight)])

    scales = scales_of(sources, text.shares)
    shares = {name: text.shares[name] for name in sorted(sources)}
    said = {"name": text.name, "sources": shares, "window": subject.window, "texts": _digest(ids)}
    return _Job(
        name=BPB,
        settings={**settings, **said},
        ids=ids,
        work=work,
        entry=lambda lines: {"name": text.name, **bpb_entry(lines, text.shares)},
    )


def _completions_job(subject: Subject, engine: Engine, limit: int) -> _Job:
    tokenizer = subject.tokenizer

    def work(places: list[int], done: Callable[[list[Line]], None]) -> None:
        requests = [
            reply_request(
                engine,
                tokenizer,
                [tokenizer.bos_id, *tokenizer.encode(OPEN_PROMPTS[place])],
                COMPLETION_TOKENS,
            )
            for place in places
        ]
        done(
            [
                {
                    "id": str(place),
                    # Nothing is right or wrong here: how many tokens came before it stopped.
                    "score": float(len(one.ids)),
                    "weight": 1.0,
                    "prompt": OPEN_PROMPTS[place],
                    "text": tokenizer.decode(one.ids, skip_special=True),
                }
                for place, one in zip(places, engine.complete(requests), strict=True)
            ]
        )

    def entry(lines: list[Line]) -> dict[str, Any]:
        texts = {line["prompt"]: line["text"] for line in lines}
        return {**plain_entry(COMPLETIONS, lines, TOKENS), "texts": texts}

    count = min(limit or len(OPEN_PROMPTS), len(OPEN_PROMPTS))
    ids = [str(place) for place in range(count)]
    return _Job(COMPLETIONS, {"limit": limit}, ids, work, entry)


def _close_core(exam: Exam, results: Results) -> None:
    scores = {
        name: Score(name=name, value=entry["value"], n=entry["n"], stderr=entry["stderr"])
        for name, entry in results.tasks.items()
        if name in exam.baselines and name in exam.tasks
    }
    found = core_score(scores, exam.baselines, exam.shots)
    results.core = {**found.to_json(), "limit": exam.limit}
    results.write()
