"""An evaluation bundle of our own in the public layout: all tasks of CORE, a few questions each."""

import json
import random
import zipfile
from pathlib import Path
from typing import Any

import yaml

from foundling.tasks.core import CORE_TASKS

KINDS = {
    **dict.fromkeys(("winograd", "winogrande"), "schema"),
    **dict.fromkeys(
        (
            "jeopardy",
            "bigbench_qa_wikidata",
            "lambada_openai",
            "bigbench_dyck_languages",
            "bigbench_cs_algorithms",
            "bigbench_operators",
            "bigbench_repeat_copy_logic",
            "squad",
            "coqa",
        ),
        "language_modeling",
    ),
}
BASELINES = {"multiple_choice": 25, "schema": 50, "language_modeling": 0}
_WORDS = "the miller sold two mules to a widow who lives near an old bridge and keeps bees"
WORDS = _WORDS.split()


def text(draw: random.Random, words: int) -> str:
    """Some words in any order."""
    return " ".join(draw.choice(WORDS) for _ in range(words))


def rows_of(kind: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Questions of one kind, with equal answers, answers of other lengths and blanks among them."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        if kind == "multiple_choice":
            choices = [text(draw, draw.randint(1, 4)) for _ in range(4)]
            if draw.random() < 0.3:
                choices[3] = choices[0]
            query = text(draw, draw.randint(5, 30))
            rows.append({"query": query, "choices": choices, "gold": draw.randrange(3)})
        elif kind == "schema":
            options = [text(draw, draw.randint(3, 12)) for _ in range(2)]
            end = text(draw, 5)
            rows.append(
                {"context_options": options, "continuation": end, "gold": draw.randrange(2)}
            )
        else:
            context = text(draw, draw.randint(3, 40)) + draw.choice(["", " ", "\n"])
            rows.append({"context": context, "continuation": draw.choice(WORDS)})
    return rows


def write_bundle(path: Path, questions: int = 8, shots: int = 3) -> Path:
    """A zip with all 22 tasks; hellaswag and its zero-shot twin share a file, as they do."""
    specs, baselines = [], ["Eval Task,Task Category,Random baseline"]
    with zipfile.ZipFile(path, "w") as file:
        for number, name in enumerate(CORE_TASKS):
            kind = KINDS.get(name, "multiple_choice")
            data = f"some_kind/{name.removesuffix('_zeroshot')}.jsonl"
            spec = {"label": name, "dataset_uri": data, "icl_task_type": kind}
            zero = name in ("hellaswag_zeroshot", "winograd", "lambada_openai")
            specs.append({**spec, "num_fewshot": [0 if zero else shots]})
            if number % 3 == 0:
                specs[-1]["continuation_delimiter"] = "\nAnswer: "
            baselines.append(f"{name},some kind,{BASELINES[kind]}")
            if name != "hellaswag":
                rows = rows_of(kind, questions, number)
                lines = "".join(json.dumps(row) + "\n" for row in rows)
                file.writestr(f"eval_bundle/eval_data/{data}", lines)
        file.writestr("eval_bundle/core.yaml", yaml.safe_dump({"icl_tasks": specs}))
        file.writestr("eval_bundle/eval_meta_data.csv", "\n".join(baselines) + "\n")
    return path
