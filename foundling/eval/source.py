"""From a path and names of tasks to scores: what `foundling eval SRC TASKS` does.

SRC is whatever `load_bundle` takes. A run's scores go into RUN/evals/step-N, those of anything else
into evals/NAME here, unless a folder is named.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from foundling.checkpoint import Bundle, load_bundle
from foundling.checkpoint.bundle_paths import home_of
from foundling.checkpoint.folders import list_checkpoints, step_of
from foundling.checkpoint.ranks import is_main, on_main
from foundling.config import CheckpointError, DataError
from foundling.data import DataSet, held_out
from foundling.eval.evaluate import find_material
from foundling.eval.generative import Asking
from foundling.eval.halving import told_when_short
from foundling.eval.results import SCORES_FILE, TRAINING, Results, read_scores
from foundling.eval.suite import Exam, HeldOutText, Subject, check_asked, examine
from foundling.runtime import RunDir
from foundling.runtime.device import choose
from foundling.runtime.dist import joined, world_from_environment
from foundling.runtime.lock import is_locked
from foundling.runtime.log import warn
from foundling.tasks import CORE_TASKS, Registry
from foundling.tasks.registry import BPB, CORE

POLL_S = 20.0
ENDED = ("finished", "converted")
"""What a run is called that has no more checkpoints coming."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that the command line says."""

    source: str
    tasks: Sequence[str]
    device: str = "auto"
    dtype: str = "fp32"
    data: str | None = None
    """Built data set for bpb, instead of the run's own."""
    limit: int = 0
    shots: int | None = None
    out: Path | None = None
    batch: int = 0
    bundle: str | None = None
    task_data: str | None = None
    task_files: Sequence[str] = ()
    samples: int = 1
    temperature: float = 0.0
    seed: int = 0
    ask: str = "auto"
    """How questions are put: chat, text, or auto: text to a model that was only pretrained."""
    fresh: bool = False
    contaminated: Path | None = None
    tell: Callable[[str], None] | None = None

    @property
    def names(self) -> set[str]:
        """Of the tasks, without their files; those of CORE with it."""
        names = {word.partition("=")[0] for word in self.tasks}
        return names | set(CORE_TASKS) if CORE in names else names

    def registry(self) -> Registry:
        """Where the names are looked up."""
        found = Registry(bundle=self.bundle, folder=self.task_data, shots=self.shots)
        for path in self.task_files:
            found.add_file(path)
        return found


def score(request: Request) -> dict[str, Any]:
    """The scores as scores.json has them; every rank of the job calls it."""
    registry = request.registry()
    tasks = registry.find(request.tasks)  # first: a wrong name must not wait for a model
    check_asked(tasks, request.limit)
    world = world_from_environment()
    choice = choose(request.device, request.dtype, world.local_rank)
    with joined(world, choice.device):
        bundle = load_bundle(request.source, choice.device, together=world.size > 1)
        folder = request.out or default_folder(bundle, request.source)
        if not request.fresh:
            on_main(lambda: refuse_others(bundle, folder))
        results = Results(
            folder,
            source=str(request.source),
            step=bundle.step,
            stamp=stamp_of(bundle),
            more=_tokens(bundle),
            fresh=request.fresh and is_main(),
            akin=akin_stamps(bundle, folder),
        )
        exam = Exam(
            tasks=tasks,
            baselines=registry.core.baselines if CORE in tasks else {},
            documents=lambda: held_out_text(bundle, request.data, request.limit),
            shots=request.shots,
            limit=request.limit,
            max_tokens=request.batch,
            asking=Asking(
                as_text=is_base(bundle) if request.ask == "auto" else request.ask == "text",
                samples=request.samples,
                temperature=request.temperature,
                seed=request.seed,
            ),
            contaminated=_read_contaminated(request.contaminated),
            tell=request.tell,
        )
        subject = Subject(
            model=bundle.model,
            tokenizer=bundle.tokenizer,
            device=choice.device,
            dtype=choice.dtype,
            window=bundle.context if BPB in tasks else None,
        )
        with told_when_short():
            examine(subject, exam, results)
    return read_scores(folder) if is_main() else {}


def default_folder(bundle: Bundle, source: str) -> Path:
    """Where scores go when nobody says."""
    if RunDir(bundle.run).exists:
        return bundle.run / "evals" / f"step-{bundle.step}"
    return Path("evals") / Path(source).resolve().name


def is_base(bundle: Bundle) -> bool:
    """Whether the model was never taught to answer: then questions are put as text."""
    return bundle.config.train.stage == "pretrain"


def held_out_text(bundle: Bundle, data: str | None, limit: int = 0) -> HeldOutText:
    """Held-out documents of the run's own text, or of a data set that is named: of each source the
    first `limit`, or all."""
    found = find_material(bundle, data)
    if not found.text:
        raise DataError("bpb needs held-out text, and this model names none; give --data FOLDER.")
    sources = {
        folder: list(
            islice(held_out(DataSet(folder, tokenizer=bundle.tokenizer.fingerprint)), limit or None)
        )
        for folder in found.text
    }
    name = f"bpb_{limit}_documents" if limit else "full_bpb"
    of = f" of {Path(data).resolve().name}" if data else ""
    return HeldOutText(sources=sources, shares=found.text, name=name + of)


def follow(
    request: Request, *, poll_s: float = POLL_S, sleep: Callable[[float], None] = time.sleep
) -> Iterator[dict[str, Any]]:
    """Score every whole checkpoint of a run, oldest first, and new ones as they come, until the run
    has ended; a checkpoint that is deleted meanwhile is passed over."""
    run = RunDir(request.source).require()
    seen: set[int] = set()
    was_live = True
    while True:
        ended = run.read_info().get("status") in ENDED  # before looking: none can come after it
        steps = {step for path in list_checkpoints(home_of(run)) if (step := step_of(path))}
        for step in sorted(steps - seen):
            seen.add(step)
            try:
                out = request.out and request.out / f"step-{step}"
                yield score(replace(request, source=f"{request.source}@{step}", out=out))
            except (CheckpointError, FileNotFoundError) as error:
                warn(f"step {step} is left out: {error}")
        if ended:
            return
        is_live = is_locked(run.path)
        if was_live and not is_live and request.tell:
            request.tell(f"nothing trains {run.path} now; waiting for it to go on (Ctrl-C ends it)")
        was_live = is_live
        sleep(poll_s)


def stamp_of(bundle: Bundle) -> str:
    """Tells these weights from others at the same place: when they were written. A folder's own
    time is not enough, since a file in it may be overwritten."""
    path = Path(str(bundle.path))
    if not path.exists():
        return str(bundle.path)
    files = [path, *(file for file in path.glob("*") if file.is_file())]
    return f"{path.resolve()} {max(file.stat().st_mtime_ns for file in files)}"


def refuse_others(bundle: Bundle, folder: Path) -> None:
    """Scores of another model are not overwritten by accident; a run's own folder is only its."""
    if not (folder / SCORES_FILE).is_file() or akin_stamps(bundle, folder):
        return
    known = read_scores(folder)
    theirs, ours = (str(one).rpartition(" ")[0] for one in (known.get("stamp"), stamp_of(bundle)))
    if theirs and theirs != ours:
        raise DataError(
            f"{folder} holds the scores of {theirs}; name another folder with --out, or delete"
            " this one."
        )


def akin_stamps(bundle: Bundle, folder: Path) -> str:
    """How stamps begin that mean these weights too: a run's checkpoint is what was scored while it
    trained, and a rollback takes later checkpoints with it."""
    if not RunDir(bundle.run).exists:
        return ""
    return TRAINING if folder.resolve() == default_folder(bundle, "").resolve() else ""


def _tokens(bundle: Bundle) -> dict[str, Any]:
    ledger = bundle.meta.get("ledger", {})
    return {"total_tokens": sum(eaten["tokens"] for eaten in ledger.values())} if ledger else {}


def _read_contaminated(path: Path | None) -> dict[str, frozenset[str]]:
    if path is None:
        return {}
    from foundling.eval.contamination import read_contaminated

    return read_contaminated(path)
