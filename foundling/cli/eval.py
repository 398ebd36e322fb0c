"""`foundling eval ...`: scores of a model, tasks of lm-eval, two models compared."""

import argparse
import json
import os
import subprocess
import sys
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

# `foundling eval`: scores of a model.

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
    parser.add_argument("--contaminated", type=Path, help="what `data verify --against -o` wrote")
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
    from foundling.checkpoint.bundle import load_bundle
    from foundling.eval.evaluate import describe_scores, evaluate
    from foundling.runtime.console import say
    from foundling.runtime.device import choose
    from foundling.runtime.files import write_text_atomic

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
        for line in describe_tasks(scores, request.names):
            print(line)


def _request(options: Options) -> "EvalRequest":
    from foundling.eval.evaluate import EvalRequest
    from foundling.runtime.console import say

    words = listed(options.tasks)
    if not words:
        raise ConfigError("the list of tasks is empty; `foundling eval RUN list` names them.")
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
        tell=None if options.json else say,
    )


def _spread(options: Options) -> None:
    """The same command in several processes, one a GPU, by torchrun."""
    if options.follow:
        raise ConfigError("--follow scores in one process; leave --nproc out.")
    from foundling.launch.environment import refuse_crowd

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
    command = [sys.executable, *torchrun, str(options.nproc), "-m", "foundling", "eval"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run([*command, *words], env=environment)
    if done.returncode:
        raise ConfigError("a process of the evaluation failed; what it said is above.")


def _again(options: Options, name: str) -> list[str]:
    value = getattr(options, name)
    unsaid = TASKS_ONLY.get(name)
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
    told = [describe_comparison(runs)] if runs else []
    told += [describe_verdict(scores)] if scores else [iter([why])] if why else []
    if options.json:
        print_json({"runs": runs, "scores": scores})
    else:
        print("\n\n".join("\n".join(lines) for lines in told))


def _lm_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", help="run directory, checkpoint, RUN@STEP, any model")
    parser.add_argument("--tasks", help="names of the harness or a suite: nine, commonsense, ...")
    parser.add_argument("--shots", type=count, help="examples before each question")
    parser.add_argument("--limit", type=positive, help="questions of each task (default: all)")
    parser.add_argument("--chat", action="store_true", help="ask in the model's chat format")
    parser.add_argument("--system", type=free_text, help="system message (with --chat)")
    parser.add_argument("--include-path", type=Path, help="folder of tasks of your own")
    parser.add_argument(
        "--cache", type=Path, help="file of answers, to go on after an interruption"
    )
    parser.add_argument("--batch", type=positive, help="positions of a batch; halved if too many")
    parser.add_argument("--max-length", type=positive, help="tokens of context (default: trained)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to compute")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="fp32", help="how")
    parser.add_argument("--out", type=Path, help="folder (default: RUN/evals/step-N)")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    parser.add_argument("--run-code", action="store_true", help="let tasks execute model's code")
    parser.add_argument(
        "--register", action="store_true", help="make `lm_eval --model foundling` work, once"
    )
    parser.add_argument("--unregister", action="store_true", help="undo that")


def _lm(options: Options, settings: Settings) -> None:
    from importlib.util import find_spec

    from foundling.eval.lm_eval_run import register, unregister

    if options.register or options.unregister:
        for path in register() if options.register else unregister():
            print(path)
        return
    if options.source is None or not listed(options.tasks):
        raise ConfigError("eval lm needs a model and --tasks; write eval lm RUN --tasks a,b.")
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "lm-evaluation-harness is not installed; pip install 'foundling[lm-eval]'."
        )
    _evaluate(options)


def _evaluate(options: Options) -> None:
    from foundling.eval.evaluate import refuse_others
    from foundling.eval.lm_eval_adapter import FoundlingLM
    from foundling.eval.lm_eval_run import (
        HarnessRequest,
        default_folder,
        describe,
        run_harness,
        scores,
        write_results,
    )

    model = FoundlingLM(
        path=options.source,
        device=options.device,
        dtype=options.dtype,
        batch_tokens=options.batch,
        max_length=options.max_length,
    )
    request = HarnessRequest(
        tasks=listed(options.tasks),
        shots=options.shots,
        limit=options.limit,
        chat=options.chat,
        system=options.system,
        include_path=options.include_path,
        use_cache=options.cache,
        unsafe_code=options.run_code,
    )
    folder = options.out or default_folder(model.bundle)
    if folder is not None:
        refuse_others(model.bundle, folder)
    found = run_harness(model, request)
    if found is None:  # the first rank speaks
        return
    table = scores(found)
    if folder is not None:
        write_results(folder, options.source, model.bundle, table)
    if options.json:
        print_json({name: entry for name, (entry, _) in table.items()})
    else:
        print("\n".join(describe(table)))


VERBS = {
    "eval": Verb(
        "scores: held-out bits per byte, the quiz, CORE, tasks",
        _eval_options,
        _eval,
        lasts="a minute or two for a small model's own scores on two cores; tasks show the time"
        " left every 5 s",
    ),
    "compare": Verb(
        "settings that differ, curves, and whether A or B is better, or chance",
        _compare_options,
        _compare,
    ),
    "eval lm": Verb(
        "tasks of lm-evaluation-harness, unconverted",
        _lm_options,
        _lm,
        lasts="the harness is imported in 10 s or more, then shows the time left of each task",
    ),
}
