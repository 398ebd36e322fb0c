"""lm-evaluation-harness run on our models: its command line, registration, lists of tasks,
results."""

import math
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from foundling.config.errors import ConfigError, DataError, UserError
from foundling.tasks.registry import is_file_name

# `python -m foundling.eval.lm_eval_run ...` is `lm_eval ...` with foundling among its models, and
# has two words more: register, unregister.


def main() -> None:
    """The harness's own command line; a user's mistake ends as one sentence."""
    try:
        if sys.argv[1:] in (["register"], ["unregister"]):
            for path in register() if sys.argv[1] == "register" else unregister():
                print(path)
            return
        _require_harness()
        from lm_eval.__main__ import cli_evaluate

        import foundling.eval.lm_eval_adapter  # noqa: F401  registers the model

        cli_evaluate()
    except UserError as error:
        print(f"foundling: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _require_harness() -> None:
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise ConfigError(
            "lm-evaluation-harness is not installed; pip install 'foundling[lm-eval]'."
        )


# `foundling eval SRC lm:NAME`: the harness's tasks, with results that `compare` and the report
# read.
#
# The harness counts and the harness grades; this only calls it, and writes its samples down as
# every other evaluation does, one line an example. Its tasks are called lm-eval-NAME there, because
# our own `gsm8k` and the harness's are asked differently.

PREFIX = "lm-eval-"
PREFERRED = ("acc_norm", "exact_match", "acc", "f1", "bits_per_byte")
"""Which of a task's metrics stands for it, the first that it has."""
LOGARITHMS = {"bits_per_byte": ("bits_per_byte", math.log(2))}
LOGARITHMS |= {f"{unit}perplexity": ("nll", 1.0) for unit in ("", "word_", "byte_")}
"""Metrics of which the harness keeps an example's log-likelihood, perhaps with the length that it
is divided by: what we call the mean of them, and the unit in nats."""
Line = dict[str, Any]


Table = dict[str, tuple[dict[str, Any], list[Line]]]
"""By task: its entry in scores.json, and its examples."""


@dataclass(frozen=True)
class Harness:
    """Tasks to be asked by the harness; they are looked up at once, before any model is loaded."""

    names: Sequence[str]
    """Tasks and groups of the harness, and suites of ours."""
    shots: int | None = None
    limit: int | None = None
    chat: bool = False
    system: str | None = None
    include_path: Path | None = None
    cache: Path | None = None
    """Answers already given, so that an interrupted evaluation goes on."""
    run_code: bool = False

    def __post_init__(self) -> None:
        _require_harness()
        _ = self._manager

    @cached_property
    def _manager(self) -> Any:
        """The harness's index of tasks, which takes long to make: only the user's folder is read
        where it has them all."""
        from lm_eval.tasks import TaskManager

        own = self.include_path
        for defaults in (False, True) if own else (True,):
            manager = TaskManager(include_path=own and str(own), include_defaults=defaults)
            unknown = [n for n in expanded(self.names) if not manager.match_tasks([n])]
            if not unknown:
                return manager
        raise ConfigError(
            f"lm-eval has no task {unknown[0]}; `lm_eval ls tasks` lists them, and --include-path"
            " adds a folder of yours."
        )

    def run(self, model: Any) -> Table:
        """What a model scores; nothing on all ranks but the first."""
        from lm_eval import simple_evaluate

        try:
            found: dict[str, Any] | None = simple_evaluate(
                model=model,
                tasks=expanded(self.names),
                num_fewshot=self.shots,
                limit=self.limit,
                apply_chat_template=self.chat,
                system_instruction=self.system,
                use_cache=self.cache and str(self.cache),
                task_manager=self._manager,
                bootstrap_iters=0,
                confirm_run_unsafe_code=self.run_code,
            )
        except (ConnectionError, FileNotFoundError) as error:  # its data sets come from the hub
            first = str(error).partition("\n")[0].rstrip(".")
            raise DataError(
                f"lm-eval could not get the questions ({first}); load them into the cache where"
                " there is a network, or name tasks in local files with --include-path."
            ) from error
        return {} if found is None else scores(found)


def scores(found: Mapping[str, Any]) -> Table:
    """What scores.json and the files of examples are to say of the harness's results."""
    table = {}
    for task, samples in found["samples"].items():
        figures = found["results"][task]
        metric, rule = _chosen(figures, samples)
        lines = [_line(s, metric) for s in samples if s["filter"] == rule]
        lines.sort(key=lambda line: int(line["id"]))
        # Some of the harness's names hold slashes, and files are called by them.
        name = PREFIX + (task if is_file_name(task) else re.sub(r"[^\w.+-]", "_", task))
        told = LOGARITHMS.get(metric, (metric, 1.0))[0]
        extra = {
            "shots": found["n-shot"].get(task),
            "version": found["versions"].get(task),
            "metrics": {key: value for key, value in figures.items() if _is_number(value)},
        }
        table[name] = ({**_summary(lines), "metric": told, **extra}, lines)
    return table


def _chosen(figures: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The metric that stands for a task, and the filter that its answers went through."""
    keys = [tuple(key.split(",", 1)) for key in figures if "," in key and "_stderr," not in key]
    for wanted in (*PREFERRED, *(metric for metric, _ in keys)):
        for metric, rule in keys:
            if metric == wanted and all(_value(s.get(metric)) is not None for s in samples):
                return metric, rule
    raise DataError(f"{figures.get('alias', 'a task')} has no metric with a number an example.")


def _line(sample: Mapping[str, Any], metric: str) -> Line:
    found = _value(sample[metric])
    assert found is not None  # _chosen looked
    score, weight = found
    if metric in LOGARITHMS:
        score = -score / (weight * LOGARITHMS[metric][1])
    return {"id": str(sample["doc_id"]), "score": score, "weight": weight}


def _value(value: Any) -> tuple[float, float] | None:
    """An example's number and its weight, as the harness keeps them."""
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_number, value)):
        return float(value[0]), float(value[1])
    return (float(value), 1.0) if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _summary(lines: Sequence[Line]) -> dict[str, Any]:
    total = sum(line["weight"] for line in lines)
    value = sum(line["weight"] * line["score"] for line in lines) / total
    spread = sum((line["weight"] * (line["score"] - value)) ** 2 for line in lines)
    return {"value": value, "n": len(lines), "stderr": math.sqrt(spread) / total}


# Teaching an installed `lm_eval` command our model class.
#
# Harnesses after 0.4.13 read the entry point `lm_eval.models` of every installed package and need
# nothing. 0.4.13 looks models up in a table of its own before any code of ours could run, so
# `python -m foundling.eval.lm_eval_run register` puts two small files beside the installed
# packages, and only because it is asked to: a module that adds one line to that table when it is
# read, and the `.pth` file that has python load it. Rejected: a command of ours called `lm_eval`
# (it would overwrite theirs).

MODEL = "foundling.eval.lm_eval_adapter:FoundlingLM"
MODULE = "_foundling_lm_eval"
HOOK = f'''"""Adds foundling to lm_eval's models.

`python -m foundling.eval.lm_eval_run register` wrote it; to be rid of it, `unregister`, or delete
this file and {MODULE}.pth.
"""

import importlib.abc
import importlib.machinery
import sys

TABLE = "lm_eval.models"


class _Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        from lm_eval.api.registry import model_registry

        if "foundling" not in model_registry:
            model_registry.register("foundling", target="{MODEL}")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != TABLE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
'''


def register(folder: Path | None = None) -> list[Path]:
    """Write the two files into this python's site-packages (or `folder`)."""
    home = folder or _site_packages()
    files = {home / f"{MODULE}.py": HOOK, home / f"{MODULE}.pth": f"import {MODULE}\n"}
    try:
        # The module first: a .pth without it would complain whenever python starts.
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{home} cannot be written ({error.strerror}); run"
            " `python -m foundling.eval.lm_eval_run --model foundling ...` in place of lm_eval."
        ) from None
    return list(files)


def unregister(folder: Path | None = None) -> list[Path]:
    """Delete them; what was there is returned."""
    home = folder or _site_packages()
    files = [home / f"{MODULE}.pth", home / f"{MODULE}.py"]
    found = [path for path in files if path.is_file()]
    for path in found:
        path.unlink()
    return found


def _site_packages() -> Path:
    return Path(sysconfig.get_path("purelib"))


# Lists of the harness's tasks that belong together, by a name of ours.

SUITES: dict[str, tuple[str, ...]] = {
    "nine": (
        "mmlu",
        "mmlu_pro",
        "ai2_arc",
        "gsm8k",
        "agieval_en",
        "drop",
        "bbh",
        "winogrande",
        "hellaswag",
    ),
    "commonsense": (
        "arc_easy",
        "arc_challenge",
        "hellaswag",
        "winogrande",
        "piqa",
        "openbookqa",
        "boolq",
    ),
    "perplexity": ("wikitext", "lambada_openai"),
}
"""`nine` is what an 8B model that is pretrained further is usually asked; `commonsense` already
tells models of a hundred million parameters apart; `perplexity` tells any."""


def expanded(names: Sequence[str]) -> list[str]:
    """Suites replaced by their tasks, each task once."""
    found = [task for name in names for task in SUITES.get(name, (name,))]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    main()
