"""`foundling eval compare`: whether one model is better than another."""

import argparse

from foundling.verbs.base import Options, Settings, Verb, listed, print_json


def _options(parser: argparse.ArgumentParser) -> None:
    what = "run, RUN@STEP, checkpoint or folder of an evaluation; several seeds as A1,A2"
    parser.add_argument("a", help=what)
    parser.add_argument("b", help="the same for the other model")
    parser.add_argument("--tasks", help="only these, such as arc_easy,piqa")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _run(options: Options, settings: Settings) -> None:
    from foundling.eval.compare import compare, describe_verdict

    found = compare(listed(options.a), listed(options.b), listed(options.tasks))
    if options.json:
        return print_json(found)
    for line in describe_verdict(found):
        print(line)
    return None


VERBS = {"eval compare": Verb("whether A or B is better, or chance", _options, _run)}
