"""Evaluation of a run or any model: held-out text, the quiz, tasks by name."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from foundling.checkpoint.bundle import Bundle, load_bundle
from foundling.checkpoint.folders import list_checkpoints, step_of
from foundling.checkpoint.paths import checkpoint_root_of
from foundling.config.data import DataConfig, token_shares
from foundling.config.data_manifest import Manifest
from foundling.config.errors import CheckpointError, DataError
from foundling.config.packing_spec import unpacked_size
from foundling.data.dataset import DataSet, held_out
from foundling.eval.bits_per_byte import BpbScore, headline, held_out_bpb, kinds_of
from foundling.eval.contamination import read_contaminated
from foundling.eval.lm_eval_run import Harness
from foundling.eval.quiz import run_quiz
from foundling.eval.results import SCORES_FILE, TRAINING, Results, read_scores
from foundling.eval.suite import Exam, HeldOutText, Subject, check_asked, examine
from foundling.eval.task_scoring import Asking, evaluation_engine
from foundling.runtime.console import warn
from foundling.runtime.device import choose_device
from foundling.runtime.dist import is_main, on_main, process_group, world_from_environment
from foundling.runtime.lock import is_locked
from foundling.runtime.run_dir import RunDir
from foundling.tasks.core import CORE_TASKS
from foundling.tasks.hamlet_quiz import HamletQuiz
from foundling.tasks.registry import BPB, CORE, HARNESS, Registry, is_of_harness

# The whole evaluation of a run: what to measure is read from the run, so nobody can pick.
#
# Bits per byte are measured on the whole held-out split of the run's own text, each source by its
# share of the mixture; `full_` tells them from those that a run scores on its clock, which are of a
# part. A fine-tuned run has only conversations, so it is measured on the text of the run it came
# from: that shows what fine-tuning cost. A run raised on Hamlet is put to the quiz of its own
# village.
#
# The result is a plain dict; whoever called decides where it is kept.

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
        "chat": bundle.is_chat,
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
        engine = evaluation_engine(model, device, dtype=dtype)
        task = HamletQuiz(material.village, QUIZ_SEED, quiz_questions)
        as_text = not bundle.is_chat
        score = run_quiz(engine, bundle.tokenizer, task, as_text=as_text)
        result["quiz"] = {**score, "asked": "as text" if as_text else "as chat"}
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
        "by_source": {folder: asdict(score) for folder, score in scores.items()},
    }


def find_material(bundle: Bundle, data_path: str | None = None) -> Material:
    """The text and the village of a run, from its own config or its nearest ancestor's; where other
    data is named, nothing of the run's own need be there."""
    manifests: dict[str, Manifest] = {}
    shares: dict[str, float] = {}
    lost: list[str] = []
    for data in _data_of_life(bundle):
        for path in data.sources:
            try:
                manifests[path] = Manifest.load(Path(path))
            except DataError:
                if data_path is None:
                    raise
                lost.append(path)
        weights = {p: w for p, w in data.sources.items() if p in manifests}
        if text := {p: w for p, w in weights.items() if manifests[p].kind == "text"}:
            stored = {path: unpacked_size(manifests[path]) for path in text}
            shares = token_shares(text, data.weights_by, stored)
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


def _data_of_life(bundle: Bundle) -> list[DataConfig]:
    """The run's data settings and those of its ancestors that are still there, nearest first."""
    from foundling.config.load import load_run_config

    run: RunDir | None = RunDir(bundle.run.resolve())
    found, seen = [bundle.config.data], set[Path]()
    while run is not None and run.exists and run.path not in seen:
        seen.add(run.path)
        run = run.parent()
        if run is not None and run.config_path.is_file():
            found.append(load_run_config(run.config_path).data)
    return found


# From a path and names of tasks to scores: what `foundling eval SRC TASKS` does.
#
# SRC is whatever `load_bundle` takes. A run's scores go into RUN/evals/step-N, those of anything
# else into evals/NAME here, unless a folder is named.

POLL_S = 20.0
ENDED = ("finished", "converted")
"""What a run is called that has no more checkpoints coming."""


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
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
    system: str | None = None
    """System message, of lm: tasks that are asked as chat."""
    include_path: Path | None = None
    """Folder of lm: tasks of one's own."""
    cache: Path | None = None
    """Answers to lm: tasks that were given already."""
    max_length: int | None = None
    """Tokens of context in lm: tasks; None: as trained."""
    run_code: bool = False
    """Whether lm: tasks may run what the model writes."""
    tell: Callable[[str], None] | None = None

    @property
    def own(self) -> list[str]:
        """The tasks that are ours, with their files."""
        return [word for word in self.tasks if not is_of_harness(word)]

    @property
    def names(self) -> set[str]:
        """Of our own tasks, without their files; those of CORE with it."""
        names = {word.partition("=")[0] for word in self.own}
        return names | set(CORE_TASKS) if CORE in names else names

    def harness(self) -> Harness | None:
        """What asks the lm: tasks, where there are any."""
        names = [word.removeprefix(HARNESS) for word in self.tasks if is_of_harness(word)]
        if not names:
            return None
        return Harness(
            names,
            shots=self.shots,
            limit=self.limit or None,
            chat=self.ask == "chat",
            system=self.system,
            include_path=self.include_path,
            cache=self.cache,
            run_code=self.run_code,
        )

    def registry(self) -> Registry:
        """Where the names are looked up."""
        found = Registry(bundle=self.bundle, folder=self.task_data, shots=self.shots)
        for path in self.task_files:
            found.add_file(path)
        return found


def score(request: EvalRequest) -> dict[str, Any]:
    """The scores as scores.json has them, and under `asked` which were asked for now; every rank of
    the job calls it."""
    registry = request.registry()
    tasks = registry.find(request.own)  # first: a wrong name must not wait for a model
    check_asked(tasks, request.limit)
    harness = request.harness()
    world = world_from_environment()
    choice = choose_device(request.device, request.dtype, world.local_rank)
    with process_group(world, choice.device):
        bundle = load_bundle(request.source, choice.device, together=world.size > 1)
        folder = request.out or default_folder(bundle, request.source)
        if not request.fresh:
            on_main(lambda: refuse_others(bundle, folder))
        ledger = bundle.meta.get("ledger", {}).values()
        results = Results(
            folder,
            source=str(request.source),
            step=bundle.step,
            stamp=stamp_of(bundle),
            more={"total_tokens": sum(read["tokens"] for read in ledger)} if ledger else {},
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
                as_text=not bundle.is_chat if request.ask == "auto" else request.ask == "text",
                samples=request.samples,
                temperature=request.temperature,
                seed=request.seed,
            ),
            contaminated=read_contaminated(request.contaminated) if request.contaminated else {},
            tell=request.tell,
        )
        subject = Subject(
            model=bundle.model,
            tokenizer=bundle.tokenizer,
            device=choice.device,
            dtype=choice.dtype,
            window=bundle.context if BPB in tasks else None,
        )
        examine(subject, exam, results)
        asked = request.names
        if harness is not None:
            from foundling.eval.lm_eval_adapter import FoundlingLM

            model = FoundlingLM(
                bundle=bundle,
                device=request.device,
                dtype=request.dtype,
                batch_tokens=request.batch or None,
                max_length=request.max_length,
            )
            table = harness.run(model)
            on_main(lambda: results.close_all(table))
            asked |= set(table)
    return {**read_scores(folder), "asked": sorted(asked)} if is_main() else {}


def default_folder(bundle: Bundle, source: str) -> Path:
    """Where scores go when nobody says."""
    if RunDir(bundle.run).exists:
        return bundle.run / "evals" / f"step-{bundle.step}"
    return Path("evals") / Path(source).resolve().name


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
    request: EvalRequest, *, poll_s: float = POLL_S, sleep: Callable[[float], None] = time.sleep
) -> Iterator[dict[str, Any]]:
    """Score every whole checkpoint of a run, oldest first, and new ones as they come, until the run
    has ended; a checkpoint that is deleted meanwhile is passed over."""
    run = RunDir(request.source).require()
    seen: set[int] = set()
    was_live = True
    while True:
        ended = run.read_info().get("status") in ENDED  # before looking: none can come after it
        steps = {
            step for path in list_checkpoints(checkpoint_root_of(run)) if (step := step_of(path))
        }
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
