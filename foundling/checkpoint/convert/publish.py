"""Model card of an exported folder, and its push to the hub."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundling.checkpoint.convert.model_source import ModelSource
from foundling.checkpoint.manifest import load_meta
from foundling.checkpoint.paths import checkpoint_of_step, checkpoint_root_of
from foundling.config.errors import CheckpointError, ConfigError, UserError
from foundling.plan.params import count_params
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import final_scores

# Everything stands in the run's own files: the ledger in its checkpoints, the plan in run.json, the
# scores in events.jsonl and evals/, the lineage in the parents. What is not there is left out, and
# nothing is claimed that no file says.

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- foundling
---
"""
USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
```
"""


@dataclass(frozen=True)
class RunOnCard:
    """One run of the lineage at the step that was taken from it."""

    run: RunDir
    step: int
    info: Mapping[str, Any]
    ledger: Mapping[str, Mapping[str, int]]


def write_card(folder: Path, source: ModelSource, family: str, name: str) -> None:
    """Write README.md."""
    sections = [HEAD, f"# {name}\n\n{_what(source, family)}\n"]
    trust = ", trust_remote_code=True" if family == "foundling" else ""
    sections.append("## Use\n\n" + USE.format(name=name, trust=trust))
    if trust:
        sections.append(
            "No class of transformers has all of this model's parts, so its code lies beside the"
            " weights in modeling_foundling.py; read it before you trust it.\n"
        )
    lineage = list(_lineage(source)) if source.kind == "native" else []
    if lineage:
        sections += [*_raised(lineage), *_scores(lineage)]
    (folder / "README.md").write_text("\n".join(sections), encoding="utf-8")


def _what(source: ModelSource, family: str) -> str:
    model = source.model
    size = count_params(model).all
    return (
        f"A decoder-only transformer of {size:,} parameters: {model.layers} layers, {model.dim}"
        f" wide, {model.heads} query and {model.num_kv_heads} key heads of {model.head_width},"
        f" feed-forward {model.ffn_dim} ({model.activation}), vocabulary {model.vocab_size:,};"
        f" layout of {family}. {_context(source)}Exported by foundling, which compared its logits"
        " with those of the source before this folder got its name."
    )


def _context(source: ModelSource) -> str:
    """What is known: rows of our own training, or what a model from elsewhere states."""
    if source.positions:
        return f"Its config states contexts of up to {source.positions:,} tokens. "
    return f"Trained with rows of {source.context:,} tokens. " if source.trained_len else ""


def _lineage(source: ModelSource) -> Iterator[RunOnCard]:
    """The run and its ancestors that are still there, the oldest first."""
    run: RunDir | None = RunDir(source.path)
    step, found, seen = source.step, list[RunOnCard](), set[Path]()
    while run is not None and run.exists and run.path.resolve() not in seen:
        seen.add(run.path.resolve())
        info = run.read_info()
        found.append(RunOnCard(run, step, info, _ledger(run, step)))
        step = int((info.get("parent") or {}).get("step") or 0)
        run = run.parent()
    yield from reversed(found)


def _ledger(run: RunDir, step: int) -> Mapping[str, Mapping[str, int]]:
    try:
        stated = load_meta(checkpoint_of_step(checkpoint_root_of(run), step)).get("ledger", {})
    except (UserError, OSError):  # an ancestor's checkpoint may be gone
        return {}
    return stated if isinstance(stated, Mapping) else {}


def _raised(lineage: Sequence[RunOnCard]) -> Iterator[str]:
    yield "## How it was raised\n"
    rows = []
    for stage in lineage:
        predicted = stage.info.get("plan", {}).get("predicted", {})
        tokens = sum(int(counts.get("tokens", 0)) for counts in stage.ledger.values())
        planned = predicted.get("tokens")
        rows.append(
            [
                stage.run.path.resolve().name,
                "chat" if stage.info.get("chat") else "text",
                f"{stage.step:,}",
                f"{tokens:,}" if tokens else "not recorded",
                f"{planned:,}" if isinstance(planned, int) else "",
            ]
        )
    yield _table(["run", "trained on", "step", "tokens read", "tokens planned"], rows)
    table_rows = [
        [stage.run.path.resolve().name, Path(name).name, f"{counts.get('tokens', 0):,}",
         f"{counts.get('targets', 0):,}"]
        for stage in lineage
        for name, counts in stage.ledger.items()
    ]  # fmt: skip
    if table_rows:
        yield "What it read, counted token by token as it was trained:\n"
        yield _table(["run", "source", "tokens", "targets"], table_rows)
    measured = lineage[-1].info.get("plan", {})
    rows = _against_plan(measured.get("predicted") or {}, measured.get("measured") or {})
    if rows:
        yield "The last run's plan, and what came of it:\n"
        yield _table(["", "planned", "measured"], rows)


def _against_plan(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[list[str]]:
    names = [name for name in predicted if name in measured]
    both = [(name, predicted[name], measured[name]) for name in names]
    return [
        [name.replace("_", " "), _number(one), _number(other)]
        for name, one, other in both
        if isinstance(one, int | float) and isinstance(other, int | float)
    ]


def _scores(lineage: Sequence[RunOnCard]) -> Iterator[str]:
    stage = lineage[-1]
    rows = list(_score_rows(stage))
    if rows:
        yield "## Scores\n"
        yield _table(["task", "score", "± standard error", "examples"], rows)


def _score_rows(stage: RunOnCard) -> Iterator[list[str]]:
    """Scores of the exported step, of whatever was measured on it."""
    final = final_scores(stage.run)
    if final.get("step") == stage.step:
        if isinstance(bits := final.get("full_bpb"), float):
            yield ["held-out bits per byte", f"{bits:.4f}", "", f"{final.get('bytes', '')}"]
        quiz = final.get("quiz")
        if isinstance(quiz, Mapping):
            yield ["quiz", _number(quiz["accuracy"]), _number(quiz["stderr"]), str(quiz["n"])]
    evaluated = _json(stage.run.path / "evals" / f"step-{stage.step}" / "scores.json")
    core = evaluated.get("core")
    if isinstance(core, Mapping) and "value" in core:
        name = str(core.get("name", "core")).replace("_", " ")
        yield [f"{name} (mean of centred accuracies)", _number(core["value"]),
               _number(core["stderr"]), str(core["n"])]  # fmt: skip
    tasks = evaluated.get("tasks")
    for name, score in (tasks if isinstance(tasks, Mapping) else {}).items():
        if score.get("metric") == "tokens":  # texts to read, without a grade
            continue
        error = score.get("stderr")
        shown = _number(error) if isinstance(error, int | float) else ""
        yield [f"{name} ({score.get('metric', '')})", _number(score["value"]), shown,
               str(score.get("n", ""))]  # fmt: skip


def _json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# An exported folder to the hub, by huggingface_hub: large files as LFS, all in one commit.

_NAME = re.compile(
    r"(?!.*(--|\.\.))(?!.*\.git$)[A-Za-z0-9][\w.-]*/\b[\w.-]{1,96}\b", flags=re.ASCII
)
"""The hub's rules for names."""


def check_name(name: str) -> None:
    """Refuse what is no OWNER/NAME, before hours are spent on converting."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--push {name!r} is no OWNER/NAME of the hub: letters, digits, -, _ and ., where"
            " -- and .. are refused, - and . at either end, and .git at the last."
        )


def push(folder: Path, name: str, *, private: bool = False) -> str:
    """Create the repository if it is not there and upload the folder; its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True, repo_type="model")
        # One that was there already stays what it was.
        if private and not api.model_info(name).private:
            raise CheckpointError(
                f"{folder} is written and was not uploaded: {name} exists already and is public,"
                " and --private was asked; make it private or give another name."
            )
        api.upload_folder(
            folder_path=folder, repo_id=name, commit_message="Upload by foundling convert"
        )
    except LocalTokenNotFoundError:
        raise _refused(folder, name, "no token; run `hf auth login` or set HF_TOKEN") from None
    except CheckpointError:
        raise
    except Exception as error:  # the network, the disk or the hub: its library has many words
        raise _refused(folder, name, _first_line(error)) from None
    return str(address)


def _refused(folder: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} is written and was not uploaded to {name}: {why}; upload it later with"
        f" `hf upload {name} {folder}`."
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
