"""What a run writes about itself when it begins, goes on and ends: config, plan, events."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundling.checkpoint import Folder, checkpoint_bytes, tensor_specs
from foundling.config.resolve import Change, dump_yaml
from foundling.config.sections import RunConfig
from foundling.parallel import Mesh
from foundling.plan import Horizon, Sizes, describe, forecast
from foundling.plan.diet import as_counts, asked_for, by_documents, diet_table
from foundling.runtime.device import Choice
from foundling.runtime.files import write_text_atomic
from foundling.runtime.log import say, warn
from foundling.runtime.rundir import RunDir, read_lines
from foundling.tokenizer import Tokenizer
from foundling.train.feed import Feed
from foundling.train.foresee import foreseen
from foundling.train.metrics import MFU_DEFINITION
from foundling.train.probe import matmul_peak, sheet_peak
from foundling.train.record import write_record
from foundling.train.resume import data_settings

if TYPE_CHECKING:
    from foundling.train.stages import Job


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a new run is begun with."""

    config: RunConfig
    tokenizer: Tokenizer
    feed: Feed
    sizes: Sizes
    horizon: Horizon
    choice: Choice
    mesh: Mesh
    parent: dict[str, Any] | None


def begin(run: RunDir, new: Beginning) -> None:
    """Say what is planned and write a new run's papers; run.json last, it makes it a run."""
    for dataset in new.feed.datasets.values():
        dataset.verify()  # once, before the first step: a flipped byte must not be trained on
    config, choice = new.config, new.choice
    plan = forecast(config, new.mesh.data.size, new.sizes, new.horizon)
    for label, text in describe(config, plan):
        warn(text) if label == "warning" else say(f"{label:>12}  {text}")
    say(f"{'device':>12}  {choice.reason}")
    sheet = sheet_peak(choice)
    new.tokenizer.save(run.tokenizer)
    write_text_atomic(run.config_path, dump_yaml(config))
    write_record(run, data_settings(config), new.feed.order.segments)
    predicted = {
        "parameters": plan.params.all,
        "steps": new.horizon.steps,
        "tokens": new.horizon.tokens,
        "first_loss": None if new.parent else plan.first_loss,
        "checkpoint_bytes": plan.checkpoint_bytes,
        **foreseen(config, choice.device, new.mesh.world, new.horizon),
    }
    run.event("begun", steps=new.horizon.steps, tokens=new.horizon.tokens)
    if (error := run.sync()) is not None:
        raise error
    run.write_info(
        {
            "stage": config.train.stage,
            "status": "running",
            "parent": new.parent,
            "created": time.time(),
            "device": choice.reason,
            "mfu_definition": MFU_DEFINITION,
            "matmul_flops": matmul_peak(choice.device, choice.dtype),
            **({"sheet_flops": sheet[0], "sheet": sheet[1]} if sheet else {}),
            "plan": {"forecast": plan.to_json(), "predicted": predicted},
        }
    )


def peaks_of(run: RunDir, choice: Choice, ranks: int) -> dict[str, float]:
    """FLOP/s that the run's shares are told of, of all ranks, by the share's name."""
    found, sheet = {"matmul_share": run.read_info()["matmul_flops"] * ranks}, sheet_peak(choice)
    return found | ({"mfu": sheet[0] * ranks} if sheet else {})


def record_changes(config: RunConfig, run: RunDir, changes: Sequence[Change]) -> None:
    """An old run goes on: write down with what."""
    run.event("resumed", changes={c.field: [str(c.old), str(c.new)] for c in changes})
    write_text_atomic(run.config_path, dump_yaml(config))


def planned_steps(run: RunDir) -> int:
    """Steps that the run was planned for when it began: other data later does not move its end, or
    the learning rate would jump."""
    return int(run.read_info()["plan"]["predicted"]["steps"])


def measured(job: "Job", newest: Folder) -> dict[str, float]:
    """What came of the predictions, from the run's own records and its last checkpoint."""
    lines = read_lines(job.run.metrics_path)
    # A line that tells of a start is the first step of a process, which compiles.
    usual = [line["step_s"] for line in lines if "start_s" not in line]
    usual_s = statistics.median(usual or [line["step_s"] for line in lines] or [math.nan])
    first = (line["step_s"] for line in lines if "start_s" in line)
    compiled = sum(max(0.0, seconds - usual_s) for seconds in first)
    beside = job.metrics.beside

    def spent(what: str, *paths: Path) -> float:
        return sum(float(x.get(what, 0)) for path in paths for x in read_lines(path))

    return {
        "parameters": sum(
            math.prod(spec.shape)
            for name, spec in tensor_specs(newest).items()
            if name.startswith("model.")
        ),
        "steps": job.state.step,
        "tokens": job.state.ledger.total.tokens,
        "first_loss": lines[0]["loss"] if lines else math.nan,
        "checkpoint_bytes": checkpoint_bytes(newest),
        "start_s": spent("start_s", job.run.metrics_path) + beside.get("start_s", 0.0),
        "compile_s": compiled,
        "train_s": sum(line["step_s"] for line in lines) - compiled,
        "save_s": spent("save_s", job.run.metrics_path) + beside.get("save_s", 0.0),
        "eval_s": spent("seconds", job.run.evals_path, job.run.samples_path),
        "tasks_s": spent("seconds", job.run.task_scores_path),
        "step_s": usual_s,
        "memory_peak": max((line["memory_peak"] for line in lines), default=0),
    }


def what_was_read(job: "Job") -> list[str]:
    """The run's ledger as a table, with achieved shares beside what was asked for."""
    order = job.feed.order
    epochs = order.epochs(order.sample_of(job.feed.position(job.state.step)))
    sources = {name: eaten.to_json() for name, eaten in job.state.ledger.sources.items()}
    table = diet_table([(job.config.train.stage, as_counts(sources, epochs))])
    if job.config.data.weights_by == "documents":
        documents = {name: data.stored.documents for name, data in job.feed.datasets.items()}
        table += by_documents(epochs, documents)
    return [*table, *asked_for(job.config.data)]
