"""The plan in words: label and sentence, in the order a person asks. No arithmetic of its own."""

import math
from collections.abc import Iterator, Sequence

from foundling.config.sections import ModelConfig, RunConfig
from foundling.plan.forecast import Forecast
from foundling.plan.horizon import Horizon
from foundling.plan.study import Study
from foundling.plan.supply import FINEWEB_SHARDS, Supply

Lines = list[tuple[str, str]]


def describe(config: RunConfig, plan: Forecast) -> Lines:
    """What is exact: counts, FLOPs, first loss, horizon, data."""
    model, train = config.model, config.train
    lines = [
        ("parameters", f"{plan.params.all:,} (all)"),
        (
            "",
            f"{plan.params.no_input_embedding:,} (no-input-embedding"
            f"{'; tied, so it is the head and stays' if model.tie_embeddings else ''})",
        ),
        ("", f"{plan.params.no_positions:,} (no-positions)"),
        ("", f"{plan.params.matrices_and_head:,} (matrices-and-head)"),
        ("flop/token", _flops(model, plan, train.seq_len)),
    ]
    for name, count in list(plan.flops_by_definition.items())[1:]:
        lines.append(("", f"{count:,} ({name})"))
    lines.append(("checkpoint", f"{size(plan.checkpoint_bytes)} (weights and AdamW's moments)"))
    if not train.init:
        lines.append(("first loss", _first_loss(model, plan)))
    if plan.horizon:
        lines += _horizon(config, plan.horizon)
    allowed = max(config.data.allow_repeat, config.train.epochs)
    for name, times in (plan.epochs or {}).items():
        told = f"; train will refuse: data.allow_repeat is {allowed:g}" if times > allowed else ""
        if config.data.follow:
            told = ", if it does not grow"
        lines.append(("data", f"{name} is read {times:.2f} times{told}"))
    return lines


def size(count: float) -> str:
    """Bytes as people say them."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _flops(model: ModelConfig, plan: Forecast, seq_len: int) -> str:
    if model.window and any(map(model.window_of, range(model.layers))):
        keys = "keys seen, by layer"
    else:
        keys = f"{seq_len}"
    return (
        f"{plan.flops_per_token:,} = 6 x {plan.params.no_positions:,} +"
        f" 12 x {model.layers} x {model.heads} x {model.head_width} x {keys} (full square)"
    )


def _first_loss(model: ModelConfig, plan: Forecast) -> str:
    if plan.first_loss is None:
        return "known with the vocabulary: model.vocab_size is 0 until a tokenizer is there"
    extra = plan.first_loss - math.log(model.vocab_size)
    return f"{plan.first_loss:.3f} = ln({model.vocab_size:,}) + {extra:.3f}"


def _horizon(config: RunConfig, horizon: Horizon) -> Lines:
    per_step = horizon.tokens_per_step
    falling = horizon.steps - horizon.warmup_steps
    if config.optim.schedule == "wsd":
        falling = round(config.optim.decay_share * horizon.steps)
    elif config.optim.schedule == "constant":
        falling = 0
    about = "" if horizon.is_exact else "about "
    lines = [
        (
            "step",
            f"{horizon.positions_per_step:,} positions = {_units(config, horizon)};"
            f" micro-steps {horizon.accumulation}, processes {horizon.data_ranks})",
        ),
        (
            "horizon",
            f"{horizon.basis}: {about}{horizon.steps:,} steps,"
            f" {horizon.tokens:,} tokens{'' if horizon.is_exact else ' (rows not packed yet)'}",
        ),
        (
            "warm-up",
            f"{horizon.warmup_steps:,} steps, {round(horizon.warmup_steps * per_step):,} tokens",
        ),
        (
            "decay",
            f"{falling:,} steps, {round(falling * per_step):,} tokens ({config.optim.schedule})",
        ),
    ]
    for phase in horizon.phases[1:]:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in phase.weights.items())
        lines.append(
            (
                "phase",
                f"from step {phase.first_step:,} on, {phase.steps:,} steps of {phase.rows_per_step}"
                f" rows of {phase.seq_len} ({phase.packing}): {shares}",
            )
        )
    return lines


def _units(config: RunConfig, horizon: Horizon) -> str:
    if config.data.packing == "bucket":
        each = f"{config.data.bucket_tokens} x {horizon.rows_per_step} buckets"
        return f"{each} at most (one a process and micro-step"
    rows = f"{config.train.seq_len} seq x {horizon.rows_per_step} rows"
    return f"{rows} (at most {config.train.batch_size} a process and micro-step"


def describe_supply(supply: Supply) -> Lines:
    """Text that is there and needed, and what the disk must hold."""
    lines: Lines = []
    for name, row in supply.sources.items():
        need = f" of {row['needed']:,.0f} needed" if "needed" in row else ""
        shards = f", {row['shards']:,.0f} shards"
        if "shards_needed" in row:
            shards += f" of {row['shards_needed']:,.0f}"
        lines.append(("data", f"{name}: {row['tokens']:,.0f} tokens{need}{shards}"))
    if supply.needed_tokens is not None and supply.fineweb_shards is not None:
        more = supply.fineweb_shards - FINEWEB_SHARDS
        lines.append(
            (
                "data",
                f"{supply.needed_tokens:,} tokens needed: {supply.fineweb_shards:,} shards of"
                " fineweb-edu-100b-shuffle at 56M tokens"
                f"{f', {more:,} more than there are' if more > 0 else ''}",
            )
        )
    lines.append(
        (
            "disk",
            f"{size(supply.disk_bytes)}: data {size(supply.data_bytes)}, checkpoints of"
            f" {size(supply.checkpoint_bytes)}; an export in bf16 is {size(supply.weights_bytes)}",
        )
    )
    return lines


def describe_study(found: Study) -> Iterator[tuple[str, str]]:
    """One kind of hardware: layout, memory by part, speed by part, hours, dollars, warnings."""
    machine, choice = found.machine, found.choice
    gpu, memory, speed = machine.gpu, choice.memory, choice.speed
    yield "", ""
    price = "no price known" if gpu.price is None else f"${gpu.price:.2f} an hour each"
    yield gpu.name, f"{machine.nodes} nodes x {machine.per_node} GPUs, {price} ({gpu.source})"
    yield "layout", f"{choice.layout}: {choice.layout.data_ranks} data-parallel ranks"
    for reason in choice.reasons:
        yield "chosen", reason
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    yield (
        "memory",
        f"{size(memory.peak)} at its peak ({memory.moment}), {size(memory.needed)} with slack and"
        f" driver, of {size(memory.capacity)}: {verdict}",
    )
    yield "", _join({part: size(count) for part, count in memory.parts.items()})
    others = {m: size(sum(p.values())) for m, p in memory.moments.items() if m != memory.moment}
    yield "", f"other moments: {_join(others)}"
    kept = {policy: size(sum(blocks)) for policy, blocks in found.kept.items()}
    yield "", f"activations by parallel.recompute: {_join(kept)}"
    yield (
        "speed",
        f"{speed.step_s:.3f} s a step, {speed.tokens_per_s:,.0f} tokens/s"
        f" ({speed.tokens_per_s_gpu:,.0f} a GPU), MFU {speed.mfu:.1%}",
    )
    yield "", _join({p: f"{s * 1e3:,.1f} ms" for p, s in speed.parts.items() if s >= 5e-5})
    yield (
        "",
        "MFU: flop/token (full square) x tokens/s over the dense"
        f" {speed.peak_flops / 1e12:,.1f} TFLOP/s of each GPU",
    )
    if speed.talk_s:
        yield (
            "links",
            f"{speed.talk_s * 1e3:,.1f} ms of communication, of which"
            f" {speed.talk_share:.1%} of the step is waited for (the rest hides behind backward)",
        )
    if found.hours is not None:
        yield "time", f"{duration(found.hours)} of training steps{_cost(found.dollars)}"
    for warning in found.warnings:
        yield "warning", warning


def duration(hours: float) -> str:
    """Hours as people say them."""
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    return f"{hours:,.2f} hours" if hours >= 1 else f"{hours * 60:,.1f} minutes"


def _cost(dollars: float | None) -> str:
    return "" if dollars is None else f", ${dollars:,.2f}"


def _join(parts: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parts.items())


def comparison(found: Sequence[Study]) -> list[str]:
    """Several GPUs or numbers of nodes side by side."""
    first = found[0].choice.speed
    rows = [["gpu", "nodes", "GPUs", "layout r x s x t", "batch", "GB", "step s", "waits"]]
    rows[0] += ["tokens/s", "efficiency", "tokens a step", "days", "dollars"]
    for one in found:
        speed, layout = one.choice.speed, one.choice.layout
        rows.append(
            [
                one.machine.gpu.name,
                f"{one.machine.nodes}",
                f"{one.machine.world}",
                f"{layout.replicate} x {layout.shard} x {layout.tensor}",
                f"{one.config.train.batch_size}",
                f"{one.choice.memory.needed / 1e9:,.1f}{'' if one.choice.memory.fits else ' !'}",
                f"{speed.step_s:.3f}",
                f"{speed.talk_share:.1%}",
                f"{speed.tokens_per_s:,.0f}",
                f"{speed.tokens_per_s_gpu / first.tokens_per_s_gpu:.1%}",
                f"{one.horizon.positions_per_step:,}" if one.horizon else "-",
                "-" if one.hours is None else f"{one.hours / 24:,.2f}",
                "-" if one.dollars is None else f"{one.dollars:,.0f}",
            ]
        )
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
