"""The plan in words: label and sentence, in the order a person asks. No arithmetic of its own."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.plan.forecast import (
    Forecast,
    PlanOnHardware,
    PlanOptions,
    Row,
    decided,
    forecast,
    study,
    what_if,
    what_if_table,
)
from foundling.plan.horizon import Horizon
from foundling.plan.layout import Machine, counted_ranks
from foundling.plan.params import count_params
from foundling.plan.resolve import refuse_open
from foundling.plan.roofline import check_skip
from foundling.plan.serving import Precision, plan_serving, weight_bytes
from foundling.plan.supply import (
    Fingerprint,
    Supply,
    allowed_repeats,
    known_sizes,
    plan_supply,
)
from foundling.runtime.console import counted, duration, size, table

Lines = list[tuple[str, str]]


def describe(config: RunConfig, plan: Forecast, supply: Supply | None = None) -> Lines:
    """What is exact: how long the run is, its data, its checkpoints, then every way of counting."""
    lines = [("parameters", f"{plan.params.all:,} (all)")]
    if plan.horizon:
        lines += _horizon(config, plan.horizon)
    allowed = allowed_repeats(config.data, config.train)
    for name, times in (plan.epochs or {}).items():
        remark = f"; train will refuse: data.allow_repeat is {allowed:g}" if times > allowed else ""
        if config.data.follow:
            remark = ", if it does not grow"
        lines.append(("data", f"{name} is read {times:.2f} times{remark}"))
    lines += describe_supply(supply) if supply else []
    lines.append(("checkpoint", f"{size(plan.checkpoint_bytes)} ({plan.checkpoint_holds})"))
    if not config.train.start or config.train.is_branch:
        lines.append(("first loss", _first_loss(config.model, plan)))
    return lines + _counts(config, plan) + [("warning", sentence) for sentence in plan.warnings]


def _counts(config: RunConfig, plan: Forecast) -> Lines:
    """Parameters and FLOPs by each definition that is in use."""
    model, train, params = config.model, config.train, plan.params
    tied = "; tied, so it is the head and stays" if model.tie_embeddings else ""
    keys = "keys seen, by layer" if any(model.windows) else f"{train.seq_len}"
    flops = (
        f"{plan.flops_per_token:,} = 6 x {params.no_positions:,} + 12 x {model.layers} x"
        f" {model.heads} x {model.head_width} x {keys} (full square; N is no-positions)"
    )
    lines = [
        ("parameters", f"{params.no_input_embedding:,} (no-input-embedding{tied})"),
        ("", f"{params.no_positions:,} (no-positions)"),
        ("", f"{params.matrices_and_head:,} (matrices-and-head)"),
        ("flop/token", flops),
    ]
    for name, count in list(plan.flops_by_definition.items())[1:]:
        which = "all" if name.endswith("with embeddings") else "no-positions"
        lines.append(("", f"{count:,} ({name}; N is {which})"))
    return lines


def _first_loss(model: ModelConfig, plan: Forecast) -> str:
    if plan.first_loss is None:
        return "known with the vocabulary: model.vocab_size is 0 until a tokenizer is there"
    extra = plan.first_loss - math.log(model.vocab_size)
    return f"{plan.first_loss:.3f} = ln({model.vocab_size:,}) + {extra:.3f}"


def _horizon(config: RunConfig, horizon: Horizon) -> Lines:
    per_step = horizon.tokens_per_step
    falling = horizon.steps - horizon.warmup_steps
    schedule = config.optim.schedule
    if schedule == "wsd":
        falling = round(config.optim.decay_share * horizon.steps)
    elif schedule == "constant":
        falling = 0
    # Steps that were asked for are those; from tokens or epochs they rest on how rows are packed.
    about = "" if horizon.is_exact or config.train.horizon_in("steps") else "about "

    def tokens(count: float) -> str:
        nearly = "" if horizon.tokens_exact or not count else "about "
        return f"{nearly}{round(count):,} tokens"

    warmup = horizon.warmup_steps
    step = (
        f"{horizon.positions_per_step:,} positions = {_units(config, horizon)}; micro-steps"
        f" {horizon.accumulation}, processes {horizon.data_ranks})"
    )
    length = (
        f"{horizon.basis}: {about}{counted(horizon.steps, 'step')},"
        f" {tokens(horizon.tokens)}{_why_about(horizon)}"
    )
    lines = [
        ("step", step),
        ("horizon", length),
        ("warm-up", f"{counted(warmup, 'step')}, {tokens(warmup * per_step)}"),
        ("decay", f"{counted(falling, 'step')}, {tokens(falling * per_step)} ({schedule})"),
    ]
    for phase in horizon.phases[1:]:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in phase.weights.items())
        text = (
            f"from step {phase.first_step:,} on, {phase.steps:,} steps of {phase.rows_per_step}"
            f" rows of {phase.seq_len} ({phase.packing}): {shares}"
        )
        lines.append(("phase", text))
    return lines


def _why_about(horizon: Horizon) -> str:
    if not horizon.is_exact:
        return " (rows not packed yet)"
    if horizon.tokens_exact:
        return ""
    taken_full = all(p.tokens_per_step == p.positions_per_step for p in horizon.phases)
    return " (rows taken to be full)" if taken_full else " (rows are not full: their mean)"


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
        shards = f", {row['shards']:,.0f} of {row['shards_listed']:,.0f} shards there"
        if "shards_needed" in row:
            shards += f", {row['shards_needed']:,.0f} needed"
        lines.append(("data", f"{name}: {row['tokens']:,.0f} tokens{need}{shards}"))
    if supply.needed_tokens is not None and not supply.sources:
        scale, unit = (1e9, "B") if supply.needed_tokens >= 1e9 else (1e6, "M")
        needed = f"{supply.needed_tokens / scale:,.3g}{unit} tokens needed"
        lines.append(("data", f"{needed}; name your data with --data.sources"))
    disk = (
        f"{size(supply.disk_bytes)}: data {size(supply.data_bytes)}, checkpoints of"
        f" {size(supply.checkpoint_bytes)}; an export in bf16 is {size(supply.weights_bytes)}"
    )
    return [*lines, *(("warning", sentence) for sentence in supply.refusals), ("disk", disk)]


def describe_study(found: PlanOnHardware) -> Iterator[tuple[str, str]]:
    """One kind of hardware: layout, memory by part, speed by part, hours, dollars, warnings."""
    machine, choice = found.machine, found.choice
    gpu, memory = machine.gpu, choice.memory
    yield "", ""
    price = "no price known" if gpu.price is None else f"${gpu.price:.2f} an hour each"
    yield gpu.name, f"{machine.nodes} nodes x {machine.per_node} GPUs, {price} ({gpu.source})"
    yield "layout", f"{choice.layout}: {choice.layout.data_ranks} data-parallel ranks"
    for reason in choice.reasons:
        yield "chosen", reason
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    needed = f"{size(memory.needed)} with slack and driver, of {size(memory.capacity)}: {verdict}"
    yield "memory", f"{size(memory.peak)} at its peak ({memory.moment}), {needed}"
    yield "", _join({part: size(count) for part, count in memory.parts.items()})
    others = {m: size(sum(p.values())) for m, p in memory.moments.items() if m != memory.moment}
    yield "", f"other moments: {_join(others)}"
    kept = {policy: size(sum(blocks)) for policy, blocks in found.kept.items()}
    yield "", f"activations by parallel.recompute: {_join(kept)}"
    if found.fits:
        yield from _speed(found)
    for warning in found.warnings:
        yield "warning", warning


def _speed(found: PlanOnHardware) -> Iterator[tuple[str, str]]:
    """Only of a run that fits: another has none."""
    speed, saving = found.choice.speed, found.saving
    rates = f"{speed.tokens_per_s:,.0f} tokens/s ({speed.tokens_per_s_gpu:,.0f} a GPU)"
    mfu = "" if speed.mfu is None else f", MFU {speed.mfu:.1%}"
    yield "speed", f"{speed.step_s:.3f} s a step, {rates}{mfu}"
    yield "", _join({p: f"{s * 1e3:,.1f} ms" for p, s in speed.parts.items() if s >= 5e-5})
    if mfu:
        peak = f"{speed.peak_flops / 1e12:,.1f} TFLOP/s of each GPU's data sheet"
        yield "", f"MFU: flop/token (full square) x tokens/s over the dense {peak}"
    if speed.talk_s:
        waited = f"{speed.talk_share:.1%} of the step is waited for"
        yield (
            "links",
            f"{speed.talk_s * 1e3:,.1f} ms of communication, of which {waited} (the rest hides"
            " behind backward)",
        )
    yield (
        "saving",
        f"{size(saving.checkpoint_bytes)}, {size(saving.rank_bytes)} a rank: training stands still"
        f" for {saving.stall_s:.2f} s every {duration(saving.interval_s / 3600)}"
        f" ({saving.share:.2%} of the time), written behind it in about {saving.write_s:,.0f} s",
    )
    if found.hours is not None and (wall := found.wall) is not None:
        cost = "" if found.dollars is None else f", ${found.dollars:,.2f}"
        yield "time", f"{duration(found.hours)} of training steps{cost}"
        yield (
            "",
            f"beside them: start {wall.start_s:,.0f} s, compilation {wall.compile_s:,.0f} s, saves"
            f" {wall.save_s:,.1f} s, evaluations {wall.eval_s:,.1f} s",
        )


def _join(parts: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parts.items())


def comparison(found: Sequence[PlanOnHardware]) -> list[str]:
    """Several GPUs or numbers of nodes side by side."""
    kinds = [one.machine.gpu.name for one in found]
    # Against the first of the same kind: other hardware's speed is no efficiency.
    scales = any(kinds.count(kind) > 1 for kind in kinds)
    rows = [["gpu", "nodes", "GPUs", "layout r x s x t", "batch", "GB", "step s", "waits"]]
    rows[0] += ["tokens/s", *(["efficiency"] if scales else []), "tokens a step", "days", "dollars"]
    for one in found:
        layout, memory, speed = one.choice.layout, one.choice.memory, one.choice.speed
        first = found[kinds.index(one.machine.gpu.name)]
        pace = ["-"] * (4 if scales else 3)
        if one.fits:
            pace = [f"{speed.step_s:.3f}", f"{speed.talk_share:.1%}", f"{speed.tokens_per_s:,.0f}"]
            efficiency = speed.tokens_per_s_gpu / first.choice.speed.tokens_per_s_gpu
            pace += [f"{efficiency:.1%}" if first.fits else "-"] if scales else []
        rows.append(
            [
                one.machine.gpu.name,
                f"{one.machine.nodes}",
                f"{one.machine.world}",
                f"{layout.replicate} x {layout.shard} x {layout.tensor}",
                f"{one.config.train.batch_size}",
                f"{memory.needed / 1e9:,.1f}{'' if memory.fits else ' DOES NOT FIT'}",
                *pace,
                f"{one.horizon.positions_per_step:,}" if one.horizon else "-",
                "-" if one.hours is None else f"{one.hours / 24:,.2f}",
                "-" if one.dollars is None else f"{one.dollars:,.0f}",
            ]
        )
    return table(rows)


def describe_serving(
    model: ModelConfig, memories: Mapping[str, int], precision: Precision
) -> Iterator[str]:
    """How many requests of which length each kind of device holds at a time."""
    if not model.vocab_size:
        raise ConfigError("model.vocab_size is 0 until a tokenizer is there; give it, or a run.")
    params = count_params(model).all
    per_weight = weight_bytes(model, precision) / params
    plans = {
        name: plan_serving(
            model,
            params,
            memory,
            bytes_per_weight=per_weight,
            bytes_per_number=4 if precision == "fp32" else 2,
        )
        for name, memory in memories.items()
    }
    first = next(iter(plans.values()))
    yield f"{params:,} parameters in {precision}: {size(first.weights)}; keys and values of a"
    yield f"token: {first.token:,} bytes. Requests at a time, by their tokens (prompt and answer):"
    lengths = list(first.requests)
    rows = [["device", "memory", "cache", *(f"{length:,}" for length in lengths)]]
    for name, plan in plans.items():
        counts = [f"{plan.requests[length]:,}" for length in lengths]
        rows.append([name, size(memories[name]), size(plan.cache), *counts])
    yield from table(rows)


# The question that `foundling plan` asks, and its answer in words or JSON.

PLAN_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A run, by what its settings resolve to, and the hardware it is planned for."""

    resolved: Callable[[Mapping[str, str]], RunConfig]
    """The config, with more settings laid over the ones that were given."""
    gpus: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    asked: PlanOptions = field(default_factory=PlanOptions)
    """What every machine of the request has in common."""
    what_if: tuple[str, ...] = ()
    fingerprint: Fingerprint | None = None
    """Of a tokenizer's folder, to see whether the data's is the right one."""

    def __post_init__(self) -> None:
        if self.asked.price and not self.gpus:
            raise ConfigError("--price has no effect without hardware; give --gpu NAME too.")
        if self.nodes[1:] and not self.gpus:
            raise ConfigError("--nodes compares speeds, which need hardware; give --gpu NAME.")

    @property
    def machines(self) -> list[tuple[str | None, int | None]]:
        """Every named GPU at every named number of nodes."""
        return [(gpu, nodes) for gpu in self.gpus or (None,) for nodes in self.nodes or (None,)]


@dataclass(frozen=True)
class PlanAnswer:
    """Everything that was found out."""

    config: RunConfig
    forecast: Forecast
    supply: Supply
    studies: tuple[PlanOnHardware, ...]
    what_if: tuple[Row, ...]


def _answer(question: PlanRequest) -> PlanAnswer:
    config, sizes = known_sizes(question.resolved({}))
    check_skip(config.model, config.train.float8_skip)
    found = [
        study(config, gpu, replace(question.asked, nodes=nodes), sizes)
        for gpu, nodes in question.machines
        if gpu
    ]
    if found:
        first = found[0]
        config, ranks, horizon = first.config, first.choice.layout.data_ranks, first.horizon
        if horizon is None:  # time or money, and nothing that fits to spend it on
            config = config.replace(train={"horizon": 0})
    else:
        refuse_open(config, "hardware to be planned on")
        ranks, horizon = _ranks(config, question), None
    plan = forecast(config, ranks, sizes, horizon)
    rows = what_if(question.resolved, question.what_if, question.machines, question.asked)
    supply = plan_supply(config, plan.horizon, question.fingerprint)
    return PlanAnswer(config, plan, supply, tuple(found), tuple(rows))


def _ranks(config: RunConfig, question: PlanRequest) -> int:
    nodes = question.nodes[0] if question.nodes else None
    return counted_ranks(config.parallel, question.asked.gpus, nodes)


def answer(question: PlanRequest) -> Iterator[str]:
    """The plan as lines of text."""
    found = _answer(question)
    labelled = describe(found.config, found.forecast, found.supply)
    if len(found.studies) == 1:
        labelled += list(describe_study(found.studies[0]))
    for label, text in labelled:
        yield f"{label:>12}  {text}".rstrip()
    if not found.studies and not found.what_if:
        yield f"{'hardware':>12}  none named; --gpu h200 adds memory, speed, hours and dollars"
    if len(found.studies) > 1:
        first = found.studies[0].machine
        yield f"{'note':>12}  step, horizon, data and disk are of {_named(first)}, the first below"
        yield ""
        yield from comparison(found.studies)
        yield from _notes(found.studies)
    if found.what_if:
        yield ""
        yield from what_if_table(found.what_if)


def _notes(found: tuple[PlanOnHardware, ...]) -> Iterator[str]:
    for one in found:
        for note in (*one.choice.reasons, *one.warnings):
            yield f"{_named(one.machine)}: {note}"


def _named(machine: Machine) -> str:
    return f"{machine.gpu.name} x {machine.world}"


def answer_json(question: PlanRequest) -> dict[str, Any]:
    """The plan as plain values."""
    found = _answer(question)
    return {
        "schema": PLAN_SCHEMA,
        **found.forecast.to_json(),
        "supply": asdict(found.supply),
        "hardware": [one.to_json() for one in found.studies],
        "what_if": list(found.what_if),
    }


def decide(question: PlanRequest) -> tuple[RunConfig, list[str]]:
    """The config with every choice made, and what was worked out, as notes."""
    config, found = question.resolved({}), _answer(question)
    if found.studies:
        config = decided(config, found.studies[0])
    horizon = found.forecast.horizon
    notes = [reason for one in found.studies for reason in one.choice.reasons]
    notes += [one.warnings[0] for one in found.studies if not one.fits]
    if horizon is not None:
        notes.append(
            f"horizon: {horizon.basis}: {counted(horizon.steps, 'step')} of"
            f" {horizon.positions_per_step:,} positions on {horizon.data_ranks} data-parallel"
            f" ranks, {'' if horizon.tokens_exact else 'about '}{horizon.tokens:,} tokens, warm-up"
            f" {counted(horizon.warmup_steps, 'step')}"
        )
    return config, notes
