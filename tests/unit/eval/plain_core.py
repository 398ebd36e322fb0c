"""CORE the plain way, to hold the fast one against: one text at a time, no batch, no cache, whole
logits. Written from the description of the suite and sharing no code with foundling/eval."""

import json
import random
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml


def read_task(bundle: Path, label: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What core.yaml says of a task, and its rows, each with its number in the file."""
    with zipfile.ZipFile(bundle) as files:
        specs = yaml.safe_load(files.read("eval_bundle/core.yaml"))["icl_tasks"]
        spec = next(spec for spec in specs if spec["label"] == label)
        text = files.read(f"eval_bundle/eval_data/{spec['dataset_uri']}").decode()
    rows = [json.loads(line) for line in text.split("\n") if line]
    return spec, [{**row, "id": str(number)} for number, row in enumerate(rows)]


def plain_task(
    model: Any,
    tokenizer: Any,
    spec: dict[str, Any],
    rows: list[dict[str, Any]],
    limit: int,
    first: int | None = None,
) -> dict[str, bool]:
    """Right or wrong by id; `first` leaves out the later ones of those within the limit, which are
    then only drawn from."""
    rows = list(rows)
    random.Random(1337).shuffle(rows)
    rows = rows[:limit]
    found = {}
    for place, row in enumerate(rows[:first]):
        others = [number for number in range(len(rows)) if number != place]
        drawn = random.Random(1234 + place).sample(others, spec["num_fewshot"][0])
        texts = _texts(spec, row, [rows[number] for number in drawn])
        ids = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts]
        found[row["id"]] = _is_right(model, spec["icl_task_type"], row, ids)
    return found


def _texts(spec: dict[str, Any], row: dict[str, Any], shots: list[dict[str, Any]]) -> list[str]:
    gap = spec.get("continuation_delimiter", " ")
    kind = spec["icl_task_type"]
    if kind == "multiple_choice":
        before = "".join(f"{s['query']}{gap}{s['choices'][s['gold']]}\n\n" for s in shots)
        return [before + row["query"] + gap + choice for choice in row["choices"]]
    if kind == "schema":
        before = "".join(
            f"{s['context_options'][s['gold']]}{gap}{s['continuation']}\n\n" for s in shots
        )
        return [before + start + gap + row["continuation"] for start in row["context_options"]]
    before = "".join(f"{s['context'].strip()}{gap}{s['continuation']}\n\n" for s in shots)
    prompt = before + row["context"].strip() + gap
    return [prompt.strip(), prompt + row["continuation"]]


def _is_right(model: Any, kind: str, row: dict[str, Any], ids: list[list[int]]) -> bool:
    if kind == "language_modeling":
        start, text = len(ids[0]), ids[1]
        assert text[:start] == ids[0]
        logits, start, text = _logits(model, text, start)
        return logits[start - 1 : -1].argmax(-1).tolist() == text[start:]
    turned = [list(reversed(text)) for text in ids] if kind == "schema" else ids
    common = 0
    while all(len(t) > common and t[common] == turned[0][common] for t in turned):
        common += 1
    losses = []
    for text in ids:
        start = len(text) - common if kind == "schema" else common
        logits, start, text = _logits(model, text, start)
        loss = F.cross_entropy(logits[:-1], torch.tensor(text[1:]), reduction="none")
        losses.append(loss[start - 1 :].mean().item())
    return losses.index(min(losses)) == row["gold"]


@torch.no_grad()
def _logits(model: Any, text: list[int], start: int) -> tuple[torch.Tensor, int, list[int]]:
    over = max(0, len(text) - (model.max_positions or len(text)))
    text, start = text[over:], start - over
    return model(torch.tensor([text]))[0], start, text
