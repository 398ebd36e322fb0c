"""The question that `foundling plan` and `config` ask, and its answer in words or JSON."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foundling.config.errors import ConfigError
from foundling.config.sections import RunConfig
from foundling.plan.choices import refuse_open
from foundling.plan.describe import comparison, describe, describe_study, describe_supply
from foundling.plan.float8 import check_skip
from foundling.plan.forecast import Forecast, forecast
from foundling.plan.horizon import in_steps
from foundling.plan.layout import Machine, counted_ranks
from foundling.plan.stock import Fingerprint
from foundling.plan.study import Asked, Study, decided, studies
from foundling.plan.supply import Supply, known_sizes, plan_supply
from foundling.plan.whatif import Row, what_if, what_if_table

PLAN_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run, by what its settings resolve to, and the hardware it is planned for."""

    resolved: Callable[[Mapping[str, str]], RunConfig]
    """The config, with more settings laid over the ones that were given."""
    gpus: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    per_node: int | None = None
    price: float | None = None
    provider: str = ""
    optimizer: str = ""
    what_if: tuple[str, ...] = ()
    fingerprint: Fingerprint | None = None
    """Of a tokenizer's folder, to see whether the data's is the right one."""

    def __post_init__(self) -> None:
        for name, value in {"--price": self.price, "--provider": self.provider}.items():
            if value and not self.gpus:
                raise ConfigError(f"{name} has no effect without hardware; give --gpu NAME too.")
        if self.price and self.provider:
            raise ConfigError("--price and --provider both set the price; give one.")
        if self.nodes[1:] and not self.gpus:
            raise ConfigError("--nodes compares speeds, which need hardware; give --gpu NAME.")

    @property
    def asked(self) -> Asked:
        return Asked(
            gpus=self.per_node,
            price=self.price,
            provider=self.provider,
            optimizer=self.optimizer,
        )

    @property
    def machines(self) -> list[tuple[str | None, int | None]]:
        """Every named GPU at every named number of nodes."""
        return [(gpu, nodes) for gpu in self.gpus or (None,) for nodes in self.nodes or (None,)]


@dataclass(frozen=True)
class Answer:
    """Everything that was found out."""

    config: RunConfig
    forecast: Forecast
    supply: Supply
    studies: tuple[Study, ...]
    what_if: tuple[Row, ...]


def _answer(question: Question) -> Answer:
    config, sizes = known_sizes(question.resolved({}))
    check_skip(config.model, config.train.float8_skip)
    found = studies(config, question.gpus, question.nodes, question.asked, sizes)
    if found:
        first = found[0]
        config, ranks, horizon = first.config, first.choice.layout.data_ranks, first.horizon
        if horizon is None:  # time or money, and nothing that fits to spend it on
            config = in_steps(config, 0)
    else:
        refuse_open(config, "hardware to be planned on")
        ranks, horizon = _ranks(config, question), None
    plan = forecast(config, ranks, sizes, horizon, question.optimizer)
    rows: list[Row] = []
    if question.what_if:
        rows = what_if(question.resolved, question.what_if, question.machines, question.asked)
    supply = plan_supply(config, plan.horizon, question.optimizer, question.fingerprint)
    return Answer(config, plan, supply, tuple(found), tuple(rows))


def _ranks(config: RunConfig, question: Question) -> int:
    nodes = question.nodes[0] if question.nodes else None
    return counted_ranks(config.parallel, question.per_node, nodes)


def answer(question: Question) -> Iterator[str]:
    """The plan as lines of text."""
    found = _answer(question)
    labelled = describe(found.config, found.forecast) + describe_supply(found.supply)
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


def _notes(found: tuple[Study, ...]) -> Iterator[str]:
    for one in found:
        for note in (*one.choice.reasons, *one.warnings):
            yield f"{_named(one.machine)}: {note}"


def _named(machine: Machine) -> str:
    return f"{machine.gpu.name} x {machine.world}"


def answer_json(question: Question) -> dict[str, Any]:
    """The plan as plain values."""
    found = _answer(question)
    return {
        "schema": PLAN_SCHEMA,
        **found.forecast.to_json(),
        "supply": found.supply.to_json(),
        "hardware": [one.to_json() for one in found.studies],
        "what_if": list(found.what_if),
    }


def decide(question: Question) -> tuple[RunConfig, list[str]]:
    """The config with every choice made, and what was worked out, as notes."""
    config = question.resolved({})
    if not question.gpus:
        refuse_open(config, "hardware to be planned on")
    if config.data.sources or question.gpus:
        found = _answer(question)
        if found.studies:
            config = decided(config, found.studies[0])
        horizon = found.forecast.horizon
        reasons = [reason for one in found.studies for reason in one.choice.reasons]
        reasons += [one.warnings[0] for one in found.studies if not one.fits]
    else:
        plan = forecast(config, _ranks(config, question))
        horizon, reasons = plan.horizon, []
    notes = list(reasons)
    if horizon is not None:
        notes.append(
            f"horizon: {horizon.basis}: {horizon.steps:,} steps of"
            f" {horizon.positions_per_step:,} positions on {horizon.data_ranks} data-parallel"
            f" ranks, {'' if horizon.tokens_exact else 'about '}{horizon.tokens:,} tokens, warm-up"
            f" {horizon.warmup_steps:,} steps"
        )
    return config, notes
