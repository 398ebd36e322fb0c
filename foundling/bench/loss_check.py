"""Whether what was timed also learns: the same steps by a plain fp32 reference.

One script ran 12% faster because its loss's gradients had become zeros, and zeros multiply faster.
So no speed is printed without this: step 1 at the timed shape (two micro-batches where the timed
step has more), compared in its loss and in the gradient norm of every group of parameters, and then
some steps on text, whose losses must end alike. The reference is the same model without anything
clever: eager, whole logits, fp32 without tf32, one row at a time."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter

from foundling.config.errors import DataError
from foundling.config.run import RunConfig
from foundling.profiling.step_runner import BenchRows, StepRunner
from foundling.runtime.device import choose_device, device_name, free_cached_memory
from foundling.runtime.files import write_text_atomic

LAST = 5
"""Losses at the end whose mean is compared: one step's is noise."""
WARM_UP_STEPS = 10
LONG = 2048
"""Tokens of a row beyond which the reference recomputes its blocks."""
GAPS = {"fp32": (2e-3, 1e-2), "bf16": (1e-2, 5e-2), "fp8": (2e-2, 1e-1)}
"""Relative, by arithmetic: of the last losses' mean, and of a gradient norm at step 1."""
SMALL = 1e-3
"""Of the whole gradient's norm: a group's that is below is held to as much as one of that size."""
PLAIN: dict[str, Any] = {
    "dtype": "fp32",
    "compile": "off",
    "kernels": {"loss": "plain", "attention": "math", "attention_masked": "math", "mlp": "plain"},
    "float8": "none",
    "deterministic": False,
}
"""What a reference sets in the train section."""


class Portion(NamedTuple):
    """The rows of one step."""

    batches: int
    """Micro-batches."""
    rows: int
    """Of each."""

    @property
    def total(self) -> int:
        """Rows of the step."""
        return self.batches * self.rows

    def starts(self, at: int) -> range:
        """Where its micro-batches begin, if `at` rows were read before."""
        return range(at, at + self.total, self.rows)

    def __str__(self) -> str:
        return f"{self.batches} x {self.rows}" if self.batches > 1 else str(self.rows)


@dataclass
class Course:
    """Some steps: their losses, and the gradient at the first."""

    losses: list[float] = field(default_factory=list)
    grad_norm: float = 0.0
    groups: dict[str, float] = field(default_factory=dict)
    """Gradient norm of each group of parameters at step 1, after clipping."""


@dataclass(frozen=True, kw_only=True)
class KeptReference:
    """A reference's steps as a file keeps them."""

    key: str
    """Digest of the model, recipe, seed and rows."""
    model: str
    """The same without the rows."""
    device: str
    course: Course


@dataclass(frozen=True, kw_only=True)
class Check:
    """The losses and gradients of the timed trainer and of its reference."""

    text: str
    """What was read."""
    rows: tuple[Portion, Portion]
    """Of step 1, and of each later one."""
    ours: Course
    reference: Course
    loss_gap: float
    """Allowed, relative."""
    grad_gap: float
    source: str = ""
    """Where an earlier reference was read; empty: it ran here and now."""

    @property
    def loss_off(self) -> float:
        """Of the last losses' mean, relative."""
        ours, theirs = (mean(course.losses[-LAST:]) for course in (self.ours, self.reference))
        return ours / theirs - 1

    @property
    def problems(self) -> list[str]:
        """Sentences; none if the trainer learns as its reference does."""
        found = []
        ours, plain = self.ours, self.reference
        if not abs(self.loss_off) <= self.loss_gap:
            found.append(
                f"after {len(ours.losses)} steps the loss is {ours.losses[-1]:.4f} and a plain fp32"
                f" reference has {plain.losses[-1]:.4f}; the mean of the last"
                f" {min(LAST, len(ours.losses))} differs by {self.loss_off:+.2%} and"
                f" {self.loss_gap:.1%} is allowed."
            )
        norms = {"all": (ours.grad_norm, plain.grad_norm)}
        norms |= {name: (ours.groups.get(name, 0.0), norm) for name, norm in plain.groups.items()}
        for name, (norm, wanted) in norms.items():
            # A gradient that is tiny against the whole consists of rounding errors.
            size = max(wanted, SMALL * plain.grad_norm)
            if not abs(norm - wanted) <= self.grad_gap * size:
                found.append(
                    f"at step 1 the gradient norm of {name} is {norm:.4g} and a plain fp32"
                    f" reference has {wanted:.4g}; {self.grad_gap:.0%} is allowed."
                )
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values, and the verdict."""
        return {**asdict(self), "loss_off": self.loss_off, "problems": self.problems}

    def lines(self) -> list[str]:
        """For people."""
        ours, plain = self.ours, self.reference
        first, later = self.rows
        return [
            f"loss check on {self.text}, step 1 of {first} rows and {len(ours.losses) - 1} of"
            f" {later}, against eager fp32 with whole logits"
            f"{f' (read from {self.source})' if self.source else ''}:",
            f"  step 1: loss {ours.losses[0]:.4f} and {plain.losses[0]:.4f} (reference), gradient"
            f" norm {ours.grad_norm:.4g} and {plain.grad_norm:.4g}",
            f"  step {len(ours.losses)}: loss {ours.losses[-1]:.4f} and {plain.losses[-1]:.4f};"
            f" mean of the last {min(LAST, len(ours.losses))} off by {self.loss_off:+.3%},"
            f" {self.loss_gap:.1%} allowed",
        ]


def plain(config: RunConfig) -> RunConfig:
    """The same model and recipe without anything that makes it fast."""
    return config.replace(
        # What is dropped hangs on how rows are cut into micro-batches: it is compared without.
        model={"dropout": 0.0},
        train=PLAIN,
        # Every score of a long row, in every layer at once, fits into no GPU.
        parallel={"recompute": "all" if config.train.seq_len > LONG else "none"},
        # Moments in 8 bits are held to moments in full.
        optim={"name": "adamw"} if config.optim.name == "adamw8bit" else {},
    )


def course(
    runner: StepRunner, rows: BenchRows, portions: Sequence[Portion], *, taken: int = 0, at: int = 0
) -> Course:
    """Steps on text, one a portion; `taken` went before and read `at` rows."""
    found = Course()
    for number, portion in enumerate(portions, taken):
        batches = [rows.batch(start, portion.rows) for start in portion.starts(at)]
        lr = course_lr(runner.config, number)
        result = runner.step(batches, lr, measure=number == 0)
        found.losses.append(result.loss)
        if number == 0:
            found.grad_norm, found.groups = result.grad_norm, result.group_grad_norms
        at += portion.total
    return found


def course_lr(config: RunConfig, number: int) -> float:
    """Learning rate of a course's step."""
    return config.optim.lr * min(1.0, (number + 1) / WARM_UP_STEPS)


def reference_course(config: RunConfig, rows: BenchRows, portions: Sequence[Portion]) -> Course:
    """The same by the plain reference, a row at a time."""
    simple = plain(config)
    # Kernels are launched at a run's own rows before it begins, and every score of eight long rows
    # at once fits into no GPU.
    simple = simple.replace(train={"batch_size": 1})
    choice = choose_device(simple.train.device, simple.train.dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        single = [Portion(portion.total, 1) for portion in portions]
        return course(StepRunner(simple, choice), rows, single)
    finally:
        torch.set_float32_matmul_precision(before)
        free_cached_memory()


def kept_reference(
    file: Path | None, config: RunConfig, rows: BenchRows, portions: Sequence[Portion]
) -> tuple[Course, str]:
    """The reference's steps and where they come from: taken now, or from a file that was written
    for exactly this model, recipe, seed and text. Benches of one model under many settings need
    not pay for the same slow steps each time."""
    if file is None:
        return reference_course(config, rows, portions), ""
    if (known := read_reference(file, config, rows, portions)) is not None:
        return known
    found = reference_course(config, rows, portions)
    device = device_name(choose_device(config.train.device, config.train.dtype).device)
    key, model = _key(config, rows, portions), _key(config)
    kept = KeptReference(key=key, model=model, device=device, course=found)
    write_text_atomic(file, json.dumps(asdict(kept)) + "\n")
    return found, ""


def read_reference(
    file: Path, config: RunConfig, rows: BenchRows, portions: Sequence[Portion]
) -> tuple[Course, str] | None:
    """What a file keeps, None where there is none; a reference of something else is refused."""
    if not file.is_file():
        return None
    kept = _read(file)
    if kept.key != _key(config, rows, portions):
        raise _other(file)
    return kept.course, f"{file}, of {kept.device}"


def refuse_other_model(file: Path, config: RunConfig) -> None:
    """As far as it can be told while the rows are still looked for."""
    if file.is_file() and _read(file).model != _key(config):
        raise _other(file)


def _other(file: Path) -> DataError:
    return DataError(
        f"{file} has the reference of another model, recipe, seed or text; give another"
        " --reference."
    )


def _key(config: RunConfig, rows: BenchRows | None = None, portions: Sequence[Portion] = ()) -> str:
    """What a reference is of: model, recipe and seed, and the rows where they are known."""
    simple = plain(config)
    what: tuple[Any, ...] = (simple.model, simple.optim, simple.train.seed, simple.train.seq_len)
    tokens = b""
    if rows is not None:
        what = (*what, tuple(portion.total for portion in portions))
        tokens = rows.batch(0, portions[0].total).inputs.tobytes()
    if config.data.document_mask:
        what = (*what, "document_mask")
    if config.train.z_loss:
        what = (*what, "z_loss", config.train.z_loss)
    return hashlib.sha256(repr(what).encode() + tokens).hexdigest()


def _read(file: Path) -> KeptReference:
    try:
        kept = TypeAdapter(KeptReference).validate_json(file.read_text(encoding="utf-8"))
        if not kept.course.losses:
            raise ValueError("no steps")
    except ValueError as error:
        raise DataError(f"{file} is no reference; give another --reference.") from error
    return kept


def gaps(config: RunConfig, dtype: torch.dtype, tolerance: float | None) -> tuple[float, float]:
    """What is allowed for this arithmetic: of the loss, and of gradient norms."""
    narrow = dtype != torch.float32 or config.train.dtype == "tf32"
    kind = "fp32" if not narrow else "bf16" if config.train.float8 == "none" else "fp8"
    loss, gradient = GAPS[kind]
    return (loss if tolerance is None else tolerance), gradient
