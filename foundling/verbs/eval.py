"""`foundling eval`: scores of a model, and overlap of data with what is asked."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from foundling.config.errors import ConfigError
from foundling.verbs.base import (
    DEVICES,
    Options,
    Settings,
    Verb,
    check_force,
    count,
    file_options,
    listed,
    positive,
)
from foundling.verbs.base import print_json as show

if TYPE_CHECKING:
    from foundling.eval.source import Request

TASKS_ONLY: dict[str, object] = {
    "limit": 0,
    "shots": None,
    "out": None,
    "batch": 0,
    "bundle": None,
    "task_data": None,
    "task_file": [],
    "samples": 1,
    "temperature": 0.0,
    "ask": "auto",
    "fresh": False,
    "contaminated": None,
    "follow": False,
    "nproc": 1,
    "dtype": "fp32",
    "seed": 0,
}
"""Options that mean nothing without a list of tasks, and what they are when nobody says."""


def _eval_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory, checkpoint, RUN@STEP, or another model")
    parser.add_argument(
        "tasks",
        nargs="?",
        help="tasks, such as core,bpb,gsm8k=FILE; `list` names them (default: held-out bits per"
        " byte and the quiz)",
    )
    parser.add_argument("--questions", type=count, help="size of the quiz; 0: none (default: 500)")
    parser.add_argument("--data", help="data set to measure on, not the run's own")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to compute")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    parser.add_argument(
        "--limit",
        type=positive,
        default=0,
        help="examples a task; of bpb, documents a source; 0: all",
    )
    parser.add_argument("--shots", type=count, help="solved examples, not the task's own number")
    parser.add_argument("--out", type=Path, help="folder for the scores (default: RUN/evals)")
    parser.add_argument("--batch", type=positive, default=0, help="tokens at a time; 0: automatic")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="arithmetic")
    parser.add_argument("--bundle", help="evaluation bundle of CORE, zip or folder")
    parser.add_argument("--task-data", help="folder with the files of tasks")
    parser.add_argument(
        "--task-file", action="append", default=[], help="Python file with tasks of your own"
    )
    parser.add_argument("--samples", type=positive, default=1, help="replies a question (pass@k)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampled replies")
    parser.add_argument(
        "--ask",
        choices=("auto", "chat", "text"),
        default="auto",
        help="how to put questions; auto: as text to a model that was only pretrained",
    )
    parser.add_argument("--contaminated", type=Path, help="what `eval contamination -o` wrote")
    parser.add_argument("--fresh", action="store_true", help="forget scores that are there")
    parser.add_argument(
        "--follow", action="store_true", help="score each checkpoint of a live run as it comes"
    )
    parser.add_argument("--nproc", type=positive, default=1, help="processes to share examples")


def _eval(options: Options, settings: Settings) -> None:
    if options.tasks is None:
        return _eval_whole(options)
    if options.questions is not None:
        raise ConfigError("--questions is for the quiz of `eval RUN`; here --limit cuts tasks.")
    if options.nproc > 1 and "RANK" not in os.environ:
        return _spread(options)
    return _eval_tasks(options)


def _eval_whole(options: Options) -> None:
    """What a run is measured by when nobody names tasks: its own text and its own village."""
    for name, default in TASKS_ONLY.items():
        if getattr(options, name) != default:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} needs a list of tasks; see `foundling eval --help`.")
    from foundling.checkpoint import load_bundle
    from foundling.eval import describe_scores, evaluate
    from foundling.runtime.device import choose
    from foundling.runtime.files import write_text_atomic
    from foundling.runtime.log import say

    questions = 500 if options.questions is None else options.questions
    choice = choose(options.device, "fp32")
    bundle = load_bundle(options.run, choice.device)
    scores = evaluate(
        bundle,
        device=choice.device,
        data_path=options.data,
        quiz_questions=questions,
        say=None if options.json else say,
    )
    # What the report shows is the whole evaluation of the run on its own data, and nothing less.
    is_whole = options.data is None and questions
    if is_whole and (Path(options.run) / "run.json").is_file():
        write_text_atomic(Path(options.run) / "eval.json", json.dumps(scores, indent=2) + "\n")
    if options.json:
        return show(scores)
    for line in describe_scores(scores):
        print(line)
    return None


def _eval_tasks(options: Options) -> None:
    from foundling.tasks import known_tasks

    if options.tasks == "list":
        for name, text in known_tasks().items():
            print(f"{name:<20} {text}")
        return
    from foundling.eval.describe import describe_tasks
    from foundling.eval.source import follow, score
    from foundling.runtime.log import is_rank_zero

    request = _request(options)
    found = follow(request) if options.follow else iter([score(request)])
    for scores in found:
        if not is_rank_zero():
            continue
        if options.json:
            # One line a checkpoint where several come.
            print(json.dumps(scores)) if options.follow else show(scores)
            continue
        print(f"{scores['source']} at step {scores['step']}")
        for line in describe_tasks(scores, request.names):
            print(line)


def _request(options: Options) -> "Request":
    from foundling.eval.source import Request
    from foundling.runtime.log import say

    words = listed(options.tasks)
    if not words:
        raise ConfigError("the list of tasks is empty; `foundling eval RUN list` names them.")
    return Request(
        source=options.run,
        tasks=words,
        device=options.device,
        dtype=options.dtype,
        data=options.data,
        limit=options.limit,
        shots=options.shots,
        out=options.out,
        batch=options.batch,
        bundle=options.bundle,
        task_data=options.task_data,
        task_files=options.task_file,
        samples=options.samples,
        temperature=options.temperature,
        seed=options.seed,
        ask=options.ask,
        fresh=options.fresh,
        contaminated=options.contaminated,
        tell=None if options.json else say,
    )


def _spread(options: Options) -> None:
    """The same command in several processes, one a GPU, by torchrun."""
    if options.follow:
        raise ConfigError("--follow scores in one process; leave --nproc out.")
    from foundling.launch.place import refuse_crowd

    on_gpus = options.device in ("auto", "cuda")
    refuse_crowd(options.nproc, uses_gpus=on_gpus, remedy="--device cpu")
    words = [options.run, options.tasks]
    for name in ("data", "device", "dtype", "limit", "shots", "out", "batch", "bundle"):
        words += _again(options, name)
    for name in ("task_data", "samples", "temperature", "seed", "ask", "contaminated"):
        words += _again(options, name)
    for file in options.task_file:
        words += ["--task-file", file]
    words += [f"--{name}" for name in ("json", "fresh") if getattr(options, name)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [sys.executable, *torchrun, str(options.nproc), "-m", "foundling.cli", "eval"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run([*command, *words], env=environment)
    if done.returncode:
        raise ConfigError("a process of the evaluation failed; what it said is above.")


def _again(options: Options, name: str) -> list[str]:
    value = getattr(options, name)
    unsaid = TASKS_ONLY.get(name)
    return [] if value is None or value == unsaid else [f"--{name.replace('_', '-')}", str(value)]


def _contamination_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", help="built data set, or file or folder of text")
    parser.add_argument("tasks", nargs="?", default="core", help="tasks to look for, such as core")
    parser.add_argument(
        "--tokenizer", help="reads the tokens of a built data set (default: the one in it)"
    )
    parser.add_argument("--bundle", help="evaluation bundle of CORE, zip or folder")
    parser.add_argument("--task-data", help="folder with the files of tasks")
    parser.add_argument(
        "--task-file", action="append", default=[], help="Python file with tasks of your own"
    )
    file_options(parser, "write the examples found, for `eval --contaminated`", "--out")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _contamination(options: Options, settings: Settings) -> None:
    from foundling.eval.contamination import look_for, texts_of, write_contaminated
    from foundling.runtime.files import refuse_existing
    from foundling.runtime.log import say
    from foundling.tasks import Registry

    check_force(options)
    if options.output and not options.force:
        refuse_existing(options.output)
    registry = Registry(bundle=options.bundle, folder=options.task_data)
    for path in options.task_file:
        registry.add_file(path)
    tasks = registry.find(listed(options.tasks))
    texts = texts_of(options.data, options.tokenizer)
    found = look_for(tasks, texts, None if options.json else say)
    if options.output:
        write_contaminated(options.output, options.data, found)
    if options.json:
        return show(found.to_json())
    for line in found.lines():
        print(line)
    return None


VERBS = {
    "eval": Verb(
        "scores: held-out bits per byte, the quiz, CORE, tasks",
        _eval_options,
        _eval,
        lasts="a minute or two for a small model's own scores on two cores; tasks show the time"
        " left every 5 s",
    ),
    "eval contamination": Verb(
        "13-gram overlap of a data set with tasks",
        _contamination_options,
        _contamination,
        lasts="all text is read once, minutes for a gigabyte",
    ),
}
