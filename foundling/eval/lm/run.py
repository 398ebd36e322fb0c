"""`foundling eval lm`: the harness's tasks, with results that `eval compare` and the report read.

The harness counts and the harness grades; this only calls it, and writes its samples down as every
other evaluation does, one line an example. Its tasks are called lm-eval-NAME there, because our
own `gsm8k` and the harness's are asked differently.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundling.checkpoint import Bundle
from foundling.config import ConfigError, DataError
from foundling.eval.lm.suites import expanded
from foundling.eval.results import Results
from foundling.eval.source import akin_stamps, stamp_of
from foundling.runtime import RunDir
from foundling.tasks.own import is_file_name

PREFIX = "lm-eval-"
PREFERRED = ("acc_norm", "exact_match", "acc", "f1", "bits_per_byte")
"""Which of a task's metrics stands for it, the first that it has."""
LOGARITHMS = {"bits_per_byte": ("bits_per_byte", math.log(2))}
LOGARITHMS |= {f"{unit}perplexity": ("nll", 1.0) for unit in ("", "word_", "byte_")}
"""Metrics of which the harness keeps an example's log-likelihood, perhaps with the length that it
is divided by: what we call the mean of them, and the unit in nats."""
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to ask the harness for."""

    tasks: Sequence[str]
    shots: int | None = None
    limit: int | None = None
    chat: bool = False
    system: str | None = None
    include_path: Path | None = None
    use_cache: Path | None = None
    """Answers already given, so that an interrupted evaluation goes on."""
    unsafe_code: bool = False


def run_harness(model: Any, request: Request) -> dict[str, Any] | None:
    """The harness's own results, samples included; None on all ranks but the first."""
    from lm_eval import simple_evaluate

    tasks = expanded(list(request.tasks))
    manager = _manager(tasks, request.include_path)
    try:
        found: dict[str, Any] | None = simple_evaluate(
            model=model,
            tasks=tasks,
            num_fewshot=request.shots,
            limit=request.limit,
            apply_chat_template=request.chat,
            system_instruction=request.system,
            use_cache=request.use_cache and str(request.use_cache),
            task_manager=manager,
            bootstrap_iters=0,
            confirm_run_unsafe_code=request.unsafe_code,
        )
    except (ConnectionError, FileNotFoundError) as error:  # its data sets come from the hub
        first = str(error).partition("\n")[0].rstrip(".")
        raise DataError(
            f"lm-eval could not get the questions ({first}); load them into the cache where there"
            " is a network, or name tasks in local files with --include-path."
        ) from error
    return found


def _manager(tasks: Sequence[str], own: Path | None) -> Any:
    """The harness's index of tasks, which takes long to make: only the user's folder is read where
    it has them all."""
    from lm_eval.tasks import TaskManager

    for defaults in (False, True) if own else (True,):
        manager = TaskManager(include_path=own and str(own), include_defaults=defaults)
        unknown = [name for name in tasks if not manager.match_tasks([name])]
        if not unknown:
            return manager
    raise ConfigError(
        f"lm-eval has no task {unknown[0]}; `lm_eval ls tasks` lists them, and --include-path"
        " adds a folder of yours."
    )


def scores(found: Mapping[str, Any]) -> dict[str, tuple[dict[str, Any], list[Line]]]:
    """By task: its entry in scores.json, and its examples."""
    table = {}
    for task, samples in found["samples"].items():
        figures = found["results"][task]
        metric, rule = _chosen(figures, samples)
        lines = [_line(s, metric) for s in samples if s["filter"] == rule]
        lines.sort(key=lambda line: int(line["id"]))
        name, told = PREFIX + _file_name(task), LOGARITHMS.get(metric, (metric, 1.0))[0]
        extra = {
            "shots": found["n-shot"].get(task),
            "version": found["versions"].get(task),
            "metrics": {key: value for key, value in figures.items() if _is_number(value)},
        }
        table[name] = ({**_summary(lines), "metric": told, **extra}, lines)
    return table


def _file_name(task: str) -> str:
    """A task's name as a file can have it: some of the harness's hold slashes."""
    return task if is_file_name(task) else re.sub(r"[^\w.+-]", "_", task)


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


def default_folder(bundle: Bundle) -> Path | None:
    """Where a run keeps the evaluations of this step; nothing for weights that are no run's."""
    run = RunDir(bundle.run)
    return run.path / "evals" / f"step-{bundle.step}" if run.exists else None


def write_results(
    folder: Path,
    source: str,
    bundle: Bundle,
    table: Mapping[str, tuple[dict[str, Any], list[Line]]],
) -> None:
    """Add tasks to an evaluation's folder; what other tasks of the same weights left there stays,
    and scores of other weights do not."""
    results = Results(
        folder,
        source=source,
        step=bundle.step,
        stamp=stamp_of(bundle),
        akin=akin_stamps(bundle, folder),
    )
    for name, (entry, lines) in table.items():
        results.close(name, entry, lines)


def describe(table: Mapping[str, tuple[dict[str, Any], list[Line]]]) -> list[str]:
    """A line a task, for a person."""
    width = max(len(name) for name in table)
    return [
        f"{name:<{width}}  {entry['value']:.4f} ± {entry['stderr']:.4f}  {entry['metric']},"
        f" {entry['n']:,} examples, {entry['shots'] or 0} shots"
        for name, (entry, _) in table.items()
    ]
