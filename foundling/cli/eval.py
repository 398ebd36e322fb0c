"""`foundling eval` and `compare`: scores of a model by task, and two models compared."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from foundling.cli.options import (
    DEVICE,
    JSON,
    TASK_FILES,
    Option,
    Options,
    Verb,
    comma_list,
    count,
    free_text,
    positive,
    print_json,
    print_lines,
    refuse_given,
)
from foundling.config.errors import ConfigError, NotScoredError

if TYPE_CHECKING:
    from foundling.eval.evaluate import EvalRequest


_EVAL_OPTIONS = (
    Option("model", "run directory, checkpoint, RUN@STEP, or another model"),
    Option(
        "tasks",
        "tasks, such as core,bpb,gsm8k=FILE,lm:mmlu; `list` names them (default: held-out bits per"
        " byte and the quiz)",
        nargs="?",
    ),
    Option("--limit", "examples a task; of bpb, documents a source; 0: all", count, 0),
    Option("--shots", "solved examples, not the task's own number", count),
    Option("--questions", "size of the quiz; 0: none (default: 500)", count),
    Option("--data", "data set to measure on, not the run's own"),
    *TASK_FILES,
    Option("--out", "folder for the scores (default: RUN/evals)", Path),
    JSON,
    Option("--follow", "score each checkpoint of a live run as it comes", bool),
    Option("--fresh", "forget scores that are there", bool),
    Option("--contaminated", "what `data verify --against -o` wrote", Path),
    Option(
        "--ask",
        "how to put questions; auto: as text to a model that was only pretrained, and lm: tasks as"
        " text",
        ("auto", "chat", "text"),
        "auto",
    ),
    Option("--samples", "replies a question (pass@k)", positive, 1),
    Option("--temperature", "0 is greedy", float, 0.0),
    Option("--seed", "seed of sampled replies", int, 0),
    DEVICE,
    Option("--dtype", "arithmetic", ("fp32", "bf16"), "fp32"),
    Option("--batch", "tokens at a time; 0: automatic", count, 0),
    Option("--nproc", "processes to share examples", positive, 1),
    Option("--system", "lm: tasks: system message (with --ask chat)", free_text),
    Option("--include-path", "lm: tasks: folder of harness tasks of your own", Path),
    Option("--cache", "lm: tasks: file of answers, to go on from if cut off", Path),
    Option("--max-length", "lm: tasks: context (default: as trained)", positive),
    Option("--run-code", "lm: tasks: let them run the model's code", bool),
)
_WITHOUT_TASKS = {"model", "tasks", "questions", "data", "device", "json"}
"""Options that have an effect without a list of tasks."""
_OWN_ONLY = (
    "data", "bundle", "task_data", "task_file", "samples", "temperature", "seed", "contaminated",
)  # fmt: skip
"""Options that change nothing where all tasks are lm-evaluation-harness's."""
_HARNESS_ONLY = ("system", "include_path", "cache", "max_length", "run_code")
"""Options that change nothing where no task is."""


def _eval(options: Options) -> None:
    from foundling.tasks.registry import known_tasks

    if options.tasks is None:
        return _eval_run(options)
    if options.tasks == "list":
        refuse_given(options, sorted(options.given - {"model", "tasks"}), "on the list of tasks")
        return print_lines(f"{name:<20} {text}" for name, text in known_tasks().items())
    refuse_given(options, ["questions"], "on tasks, which --limit cuts")
    if options.nproc > 1 and "RANK" not in os.environ:
        return _run_by_torchrun(options)
    return _eval_tasks(options)


def _eval_run(options: Options) -> None:
    """Without a list of tasks: the run's own held-out text and its own village's quiz."""
    refuse_given(options, sorted(options.given - _WITHOUT_TASKS), "without a list of tasks")
    from foundling.checkpoint.bundle import load_bundle
    from foundling.eval.evaluate import describe_scores, evaluate
    from foundling.runtime.console import say
    from foundling.runtime.device import choose_device
    from foundling.runtime.run_dir import RunDir

    questions = 500 if options.questions is None else options.questions
    choice = choose_device(options.device, "fp32")
    bundle = load_bundle(options.model, choice.device)
    scores = evaluate(
        bundle,
        device=choice.device,
        data_path=options.data,
        quiz_questions=questions,
        say=None if options.json else say,
    )
    # What the report shows is the whole evaluation of the run on its own data, and nothing less.
    is_whole = options.data is None and questions
    run = RunDir(options.model)
    if is_whole and run.exists:
        run.durable_event("evaluated_by_hand", **scores)
    return print_json(scores) if options.json else print_lines(describe_scores(scores))


def _eval_tasks(options: Options) -> None:
    from foundling.eval.evaluate import follow, score
    from foundling.eval.results import describe_tasks
    from foundling.runtime.console import is_rank_zero

    request = _request(options)
    for scores in follow(request) if options.follow else iter([score(request)]):
        if not is_rank_zero():
            continue
        if options.json:
            # One line a checkpoint where several come.
            print(json.dumps(scores)) if options.follow else print_json(scores)
        else:
            head = f"{scores['source']} at step {scores['step']}"
            print_lines([head, *describe_tasks(scores, scores["asked"])])
    return


def _request(options: Options) -> "EvalRequest":
    from foundling.eval.evaluate import EvalRequest
    from foundling.runtime.console import say
    from foundling.tasks.registry import is_of_harness

    words = comma_list(options.tasks)
    if not words:
        raise ConfigError("the list of tasks is empty; `foundling eval RUN list` names them.")
    harness = [word for word in words if is_of_harness(word)]
    if not harness:
        refuse_given(options, _HARNESS_ONLY, "without tasks of lm-eval, such as lm:mmlu")
    if len(harness) == len(words):
        refuse_given(options, _OWN_ONLY, "on lm: tasks")
    if options.system is not None and options.ask != "chat":
        raise ConfigError("--system needs --ask chat: only a conversation has a system message.")
    asked = {**options.fields_of(EvalRequest), "source": options.model, "tasks": words}
    tell = None if options.json else say
    return EvalRequest(**asked, task_files=options.task_file, tell=tell)


def _run_by_torchrun(options: Options) -> None:
    """The same command in several processes, one a GPU, by torchrun."""
    if options.follow:
        raise ConfigError("--follow scores in one process; leave --nproc out.")
    from foundling.launch.environment import check_nproc

    on_gpus = options.device in ("auto", "cuda")
    check_nproc(options.nproc, uses_gpus=on_gpus, remedy="--device cpu")
    words = [options.model, options.tasks]
    for option in (option for option in _EVAL_OPTIONS if not option.is_argument):
        value = getattr(options, option.key)
        if option.key not in options.given or option.key == "nproc":
            continue
        values = value if option.nargs == "append" else [value]
        words += [option.name] if option.type is bool else []
        words += [w for one in values for w in (option.name, str(one)) if option.type is not bool]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [sys.executable, *torchrun, str(options.nproc), "-m", "foundling", "eval"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run([*command, *words], env=environment)
    if done.returncode:
        raise ConfigError("a process of the evaluation failed; what it said is above.")


_COMPARE_OPTIONS = (
    Option(
        "model",
        "two or more: run, RUN@STEP, checkpoint or folder of an evaluation; several seeds as A1,A2",
        nargs="+",
    ),
    Option("--tasks", "p-values of these only, such as arc_easy,piqa", comma_list, ""),
    JSON,
)


def _compare(options: Options) -> None:
    from foundling.eval.comparison import compare, describe_verdict
    from foundling.report.runs import compare_runs, describe_comparison
    from foundling.runtime.run_dir import RunDir

    models, tasks = options.model, options.tasks
    if len(models) < 2:
        raise ConfigError(f"compare needs two models or more, and {models[0]} is one.")
    not_runs = [model for model in models if not RunDir(Path(model)).exists]
    if len(models) > 2 and (not_runs or tasks):
        what = f"{not_runs[0]} is no run directory" if not_runs else "--tasks is of two models"
        raise ConfigError(f"{what}; of more than two only settings and curves are compared.")
    runs = None if not_runs else compare_runs([Path(model) for model in models])
    scores, why = None, ""
    if len(models) == 2:
        try:
            scores = compare(comma_list(models[0]), comma_list(models[1]), tasks)
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
        _EVAL_OPTIONS,
        _eval,
        duration_hint="a minute or two for a small model on two cores; tasks show the time left",
    ),
    "compare": Verb(
        "settings that differ, curves, and whether A or B is better, or chance",
        _COMPARE_OPTIONS,
        _compare,
    ),
}
