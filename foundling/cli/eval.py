"""`foundling eval` and `compare`: scores of a model by task, and two models compared."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from foundling.cli.options import (
    DEVICES,
    Options,
    Settings,
    Verb,
    count,
    free_text,
    listed,
    positive,
    print_json,
)
from foundling.config.errors import ConfigError, NotScoredError

if TYPE_CHECKING:
    from foundling.eval.evaluate import EvalRequest


TASK_OPTION_DEFAULTS: dict[str, object] = {
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
"""Options that have no effect without a list of tasks, and their defaults."""
OWN_ONLY = (
    "data", "bundle", "task_data", "task_file", "samples", "temperature", "seed", "contaminated",
)  # fmt: skip
"""Options that change nothing where all tasks are lm-evaluation-harness's."""
HARNESS_ONLY = ("system", "include_path", "cache", "max_length", "run_code")
"""Options that change nothing where no task is."""
TASK_OPTION_DEFAULTS |= dict.fromkeys(HARNESS_ONLY) | {"run_code": False}


def _eval_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory, checkpoint, RUN@STEP, or another model")
    parser.add_argument(
        "tasks",
        nargs="?",
        help="tasks, such as core,bpb,gsm8k=FILE,lm:mmlu; `list` names them (default: held-out"
        " bits per byte and the quiz)",
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
        help="how to put questions; auto: as text to a model that was only pretrained, and lm:"
        " tasks as text",
    )
    parser.add_argument("--contaminated", type=Path, help="what `data verify --against -o` wrote")
    parser.add_argument("--fresh", action="store_true", help="forget scores that are there")
    parser.add_argument(
        "--follow", action="store_true", help="score each checkpoint of a live run as it comes"
    )
    parser.add_argument("--nproc", type=positive, default=1, help="processes to share examples")
    harness = parser.add_argument_group("of lm: tasks, lm-evaluation-harness's")
    harness.add_argument("--system", type=free_text, help="system message (with --ask chat)")
    harness.add_argument("--include-path", type=Path, help="folder of harness tasks of your own")
    harness.add_argument("--cache", type=Path, help="file of answers, to go on from if cut off")
    harness.add_argument("--max-length", type=positive, help="context (default: as trained)")
    harness.add_argument("--run-code", action="store_true", help="let tasks run the model's code")


def _eval(options: Options, settings: Settings) -> None:
    if options.tasks is None:
        return _eval_whole(options)
    if options.questions is not None:
        raise ConfigError("--questions is for the quiz of `eval RUN`; here --limit cuts tasks.")
    if options.nproc > 1 and "RANK" not in os.environ:
        return _run_by_torchrun(options)
    return _eval_tasks(options)


def _eval_whole(options: Options) -> None:
    """Without a list of tasks: the run's own held-out text and its own village's quiz."""
    if flag := _given(options, TASK_OPTION_DEFAULTS):
        raise ConfigError(f"{flag} needs a list of tasks; see `foundling eval --help`.")
    from foundling.checkpoint.bundle import load_bundle
    from foundling.eval.evaluate import describe_scores, evaluate
    from foundling.runtime.console import say
    from foundling.runtime.device import choose_device
    from foundling.runtime.run_dir import RunDir

    questions = 500 if options.questions is None else options.questions
    choice = choose_device(options.device, "fp32")
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
    run = RunDir(options.run)
    if is_whole and run.exists:
        run.durable_event("evaluated_by_hand", **scores)
    return print_json(scores) if options.json else print("\n".join(describe_scores(scores)))


def _eval_tasks(options: Options) -> None:
    from foundling.tasks.registry import known_tasks

    if options.tasks == "list":
        for name, text in known_tasks().items():
            print(f"{name:<20} {text}")
        return
    from foundling.eval.evaluate import follow, score
    from foundling.eval.results import describe_tasks
    from foundling.runtime.console import is_rank_zero

    request = _request(options)
    found = follow(request) if options.follow else iter([score(request)])
    for scores in found:
        if not is_rank_zero():
            continue
        if options.json:
            # One line a checkpoint where several come.
            print(json.dumps(scores)) if options.follow else print_json(scores)
            continue
        print(f"{scores['source']} at step {scores['step']}")
        for line in describe_tasks(scores, scores["asked"]):
            print(line)


def _request(options: Options) -> "EvalRequest":
    from foundling.eval.evaluate import EvalRequest
    from foundling.runtime.console import say
    from foundling.tasks.registry import is_of_harness

    words = listed(options.tasks)
    if not words:
        raise ConfigError("the list of tasks is empty; `foundling eval RUN list` names them.")
    harness = [word for word in words if is_of_harness(word)]
    if not harness and (flag := _given(options, HARNESS_ONLY)):
        raise ConfigError(f"{flag} is for tasks of lm-eval, such as lm:mmlu; leave it out.")
    if len(harness) == len(words) and (flag := _given(options, OWN_ONLY)):
        raise ConfigError(f"{flag} has no effect on lm: tasks; leave it out.")
    if options.system is not None and options.ask != "chat":
        raise ConfigError("--system needs --ask chat: only a conversation has a system message.")
    return EvalRequest(
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
        system=options.system,
        include_path=options.include_path,
        cache=options.cache,
        max_length=options.max_length,
        run_code=options.run_code,
        tell=None if options.json else say,
    )


def _given(options: Options, names: Iterable[str]) -> str:
    """The first of these options that was given, as it is written; empty: none."""
    given = (name for name in names if getattr(options, name) != TASK_OPTION_DEFAULTS.get(name))
    return next((f"--{name.replace('_', '-')}" for name in given), "")


def _run_by_torchrun(options: Options) -> None:
    """The same command in several processes, one a GPU, by torchrun."""
    if options.follow:
        raise ConfigError("--follow scores in one process; leave --nproc out.")
    from foundling.launch.environment import refuse_crowd

    on_gpus = options.device in ("auto", "cuda")
    refuse_crowd(options.nproc, uses_gpus=on_gpus, remedy="--device cpu")
    words = [options.run, options.tasks]
    for name in ("data", "device", "dtype", "limit", "shots", "out", "batch", "bundle"):
        words += _as_words(options, name)
    for name in ("task_data", "samples", "temperature", "seed", "ask", "contaminated"):
        words += _as_words(options, name)
    for name in ("system", "include_path", "cache", "max_length"):
        words += _as_words(options, name)
    for file in options.task_file:
        words += ["--task-file", file]
    flags = ("json", "fresh", "run_code")
    words += [f"--{name.replace('_', '-')}" for name in flags if getattr(options, name)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [sys.executable, *torchrun, str(options.nproc), "-m", "foundling", "eval"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run([*command, *words], env=environment)
    if done.returncode:
        raise ConfigError("a process of the evaluation failed; what it said is above.")


def _as_words(options: Options, name: str) -> list[str]:
    value = getattr(options, name)
    unsaid = TASK_OPTION_DEFAULTS.get(name)
    return [] if value is None or value == unsaid else [f"--{name.replace('_', '-')}", str(value)]


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="+",
        help="two or more: run, RUN@STEP, checkpoint or folder of an evaluation; several seeds as"
        " A1,A2",
    )
    parser.add_argument("--tasks", help="p-values of these only, such as arc_easy,piqa")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _compare(options: Options, settings: Settings) -> None:
    from foundling.eval.comparison import compare, describe_verdict
    from foundling.report.runs import compare_runs, describe_comparison
    from foundling.runtime.run_dir import RunDir

    models, tasks = options.model, listed(options.tasks)
    if len(models) < 2:
        raise ConfigError(f"compare needs two models or more, and {models[0]} is one.")
    strangers = [model for model in models if not RunDir(Path(model)).exists]
    if len(models) > 2 and (strangers or tasks):
        what = f"{strangers[0]} is no run directory" if strangers else "--tasks is of two models"
        raise ConfigError(f"{what}; of more than two only settings and curves are compared.")
    runs = None if strangers else compare_runs([Path(model) for model in models])
    scores, why = None, ""
    if len(models) == 2:
        try:
            scores = compare(listed(models[0]), listed(models[1]), tasks)
        except NotScoredError as error:
            if runs is None or tasks:
                raise
            why = f"no p-values: {error}"
    parts = [describe_comparison(runs)] if runs else []
    parts += [describe_verdict(scores)] if scores else [iter([why])] if why else []
    if options.json:
        print_json({"runs": runs, "scores": scores})
    else:
        print("\n\n".join("\n".join(lines) for lines in parts))


VERBS = {
    "eval": Verb(
        "scores: held-out bits per byte, the quiz, CORE, tasks, lm-eval's",
        _eval_options,
        _eval,
        duration_hint="a minute or two for a small model's own scores on two cores; tasks show the"
        " time left every 5 s; lm-eval is imported in 10 s or more",
    ),
    "compare": Verb(
        "settings that differ, curves, and whether A or B is better, or chance",
        _compare_options,
        _compare,
    ),
}
