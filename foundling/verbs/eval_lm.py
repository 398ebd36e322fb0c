"""`foundling eval lm`: the tasks of lm-evaluation-harness, without converting anything."""

import argparse
from pathlib import Path

from foundling.config.errors import ConfigError
from foundling.verbs.base import (
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


def _options(parser: argparse.ArgumentParser) -> None:
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


def _run(options: Options, settings: Settings) -> None:
    from importlib.util import find_spec

    from foundling.eval.lm.register import register, unregister

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
    from foundling.eval.lm.harness import FoundlingLM
    from foundling.eval.lm.run import (
        Request,
        default_folder,
        describe,
        run_harness,
        scores,
        write_results,
    )
    from foundling.eval.source import refuse_others

    model = FoundlingLM(
        path=options.source,
        device=options.device,
        dtype=options.dtype,
        batch_tokens=options.batch,
        max_length=options.max_length,
    )
    request = Request(
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
    "eval lm": Verb(
        "tasks of lm-evaluation-harness, unconverted",
        _options,
        _run,
        lasts="the harness is imported in 10 s or more, then shows the time left of each task",
    )
}
