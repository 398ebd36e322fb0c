"""What `bench train` found, as a table: the figures, and what exactly ran."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from foundling.bench.check import Check
from foundling.bench.figures import commit
from foundling.bench.steps import WARM_UP, Timed
from foundling.config.sections import RunConfig
from foundling.plan import flops_per_token
from foundling.plan.words import size, table
from foundling.runtime.device import Choice
from foundling.train.probe import sheet_peak


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one trainer's steps took."""

    who: str
    how: str
    """What exactly ran."""
    rows: int
    micro_steps: int
    step_s: float
    tokens_per_s: float
    mfu: float | None
    """None where the device has no data sheet."""
    matmul_share: float
    allocated: int
    reserved: int
    first_step_s: float
    """From the start of the process."""
    loss: float
    """Of the last timed step, on random tokens."""
    tried: dict[int, float | None]
    """Tokens a second by batch size, where the best was looked for."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Everything that one `bench train` found."""

    device: str
    torch: str
    seq_len: int
    data: str
    steps: int
    flops_per_token: int
    params: int
    sheet_flops: float | None
    sheet: str
    matmul_flops: float
    """The best square product measured here."""
    results: tuple[Result, ...]
    check: Check | None

    @property
    def ours(self) -> Result:
        """The first is foundling."""
        return self.results[0]

    @property
    def mfu_definition(self) -> str:
        """In words and numbers."""
        over = f"{self.matmul_flops / 1e12:,.2f} TFLOP/s (the best square product measured here)"
        sheet = ""
        if self.sheet_flops:
            sheet = f"MFU: the same over {self.sheet_flops / 1e12:,.1f} TFLOP/s ({self.sheet}); "
        return (
            f"of matmul: (6 N + 12 L D T) x tokens/s over {over}; {sheet}N {self.params:,},"
            f" {self.flops_per_token:,} FLOP a token at T {self.seq_len}, causality and documents"
            " not counted"
        )

    def figure(self) -> dict[str, Any]:
        """What is kept of it, to be held to later."""
        ours, check = self.ours, self.check
        names = ("tokens_per_s", "matmul_share", "rows", "step_s", "allocated", "reserved")
        return {
            **{name: getattr(ours, name) for name in (*names, "first_step_s")},
            **({} if ours.mfu is None else {"mfu": ours.mfu}),
            "how": ours.how,
            "checked_steps": len(check.ours.losses) if check else 0,
            "checked_rows": str(check.rows[1]) if check else "",
            "loss_off": check.loss_off if check else None,
            "torch": self.torch,
            "commit": commit(),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        check = None if self.check is None else self.check.to_json()
        tree = asdict(replace(self, check=None))
        if not self.sheet_flops:
            del tree["sheet_flops"], tree["sheet"]
            for one in tree["results"]:
                del one["mfu"]
        return {**tree, "check": check, "mfu_definition": self.mfu_definition}


class Meter:
    """What tokens a second amount to on a device."""

    def __init__(self, config: RunConfig, choice: Choice, matmul: float) -> None:
        """`matmul`: the best rate of a square product measured here."""
        self.model, self.seq_len = config.model, config.train.seq_len
        self.per_token = flops_per_token(config.model, config.train.seq_len)
        sheet = sheet_peak(choice)
        self.sheet: float | None = sheet[0] if sheet else None
        self.source = sheet[1] if sheet else ""
        self.matmul = matmul

    def result(
        self, who: str, how: str, timed: Timed, first_s: float, tried: dict[int, float | None]
    ) -> Result:
        """A line of the table."""
        flops = timed.tokens_per_s * self.per_token
        return Result(
            who=who,
            how=how,
            rows=timed.rows,
            micro_steps=timed.micro_steps,
            step_s=timed.seconds,
            tokens_per_s=timed.tokens_per_s,
            mfu=flops / self.sheet if self.sheet else None,
            matmul_share=flops / self.matmul,
            allocated=timed.allocated,
            reserved=timed.reserved,
            first_step_s=first_s,
            loss=timed.losses[-1],
            tried=tried,
        )


def describe_train(bench: Bench) -> list[str]:
    """The table and what is behind it."""
    mfu = ["MFU"] if bench.sheet_flops else []
    head = ["", "rows", "tokens/s", *mfu, "of matmul", "step s", "allocated", "reserved"]
    rows = [[*head, "first step s"]]
    for one in bench.results:
        micro = f"{one.rows} x {one.micro_steps}" if one.micro_steps > 1 else str(one.rows)
        shares = [*([] if one.mfu is None else [one.mfu]), one.matmul_share]
        numbers = [micro, f"{one.tokens_per_s:,.0f}", *(f"{s:.1%}" for s in shares)]
        numbers.append(f"{one.step_s:.4f}")
        memory = [size(one.allocated), size(one.reserved), f"{one.first_step_s:.1f}"]
        rows.append([one.who, *numbers, *memory])
    lines = [
        f"{bench.device}, torch {bench.torch}; rows of {bench.seq_len}, {bench.data}; median of"
        f" {bench.steps} steps after {WARM_UP}",
        *table(rows),
    ]
    lines += [f"{one.who}: {one.how}" for one in bench.results]
    lines += ["first step: from the start of the process"]
    lines.append(bench.mfu_definition)
    return lines + (bench.check.lines() if bench.check else ["no loss check: believe no speed"])


COMPILED = {
    "off": "eager",
    "blocks": "blocks compiled",
    "model": "compiled whole",
    "graphs": "blocks compiled, launched as CUDA graphs (allocated: all that is reserved)",
}


def how_it_ran(config: RunConfig, choice: Choice, chosen: Sequence[str] = ()) -> str:
    """The settings that a speed hangs on, of a config with everything chosen; `chosen` says why."""
    train = config.train
    compiled = COMPILED[str(train.compile)]
    if any(line.startswith("compile ") and "not measured" in line for line in chosen):
        compiled += " (compile auto was not measured: a long run on a CPU may take blocks)"
    said = [
        "fp32" if choice.name == "fp32" else f"fp32 weights, {choice.name} products",
        compiled,
        f"{train.loss} loss",
        *_attention(config),
        *(["feed-forward fused"] if train.feed_forward == "fused" else []),
        *([f"float8 {train.float8}"] if train.float8 != "none" else []),
        *(["logits too"] if train.float8_head else []),
        f"recompute {config.parallel.recompute}",
        str(getattr(config.optim, "name", "adamw")),
    ]
    return ", ".join(said)


def _attention(config: RunConfig) -> list[str]:
    """The kernels that some layer uses: plain causal, and of windows or documents."""
    train, model, mask = config.train, config.model, config.data.document_mask
    windows = {model.window_of(layer) for layer in range(model.layers)}
    said = [f"attention {train.attention}"] if 0 in windows and not mask else []
    if mask or windows - {0}:
        said.append(f"masked attention {train.attention_masked}")
    return said
