"""What the data section may not ask for, each refused in one sentence."""

from typing import TYPE_CHECKING

from foundling.config.errors import ConfigError, IdleError
from foundling.config.phases import mixes_of

if TYPE_CHECKING:
    from foundling.config.sections import DataConfig, PhaseConfig, RunConfig


def check_data(config: "RunConfig") -> None:
    """Refuse a mixture, phases or buckets that cannot work or would have no effect."""
    data = config.data
    _check_weights(data.sources, "data.sources")
    for phase in data.phases:
        _check_phase(phase)
    _check_buckets(data)
    _check_cuts(config)
    if data.weights_by != "rows" and data.sources and _is_one_source(data):
        remedy = "remove it or name more data sets in data.sources"
        raise IdleError("data.weights_by", "with one source", remedy)
    if data.follow and config.train.epochs:
        raise ConfigError(
            "train.epochs is a horizon in data that data.follow has not seen yet; give train.steps"
            " or train.tokens."
        )

    _check_follow(data)


def _check_follow(data: "DataConfig") -> None:
    if not data.follow_minutes > 0:
        raise ConfigError(f"data.follow_minutes must be positive (it is {data.follow_minutes:g}).")
    if data.follow_minutes != type(data)().follow_minutes and not data.follow:
        remedy = "remove it or set data.follow"
        raise IdleError("data.follow_minutes", "while data.follow is off", remedy)


def _check_weights(sources: dict[str, float], where: str) -> None:
    for name, weight in sources.items():
        if not name.strip():
            raise ConfigError(f"{where} has a source without a name; name a built data set.")
        if not 0 < weight < float("inf"):
            raise ConfigError(f"the weight of {name} in {where} must be positive (it is {weight}).")


def _check_phase(phase: "PhaseConfig") -> None:
    where = f"the phase of data.phases at {phase.at:g}"
    is_step = 1 < phase.at < float("inf") and phase.at == int(phase.at)
    if not (0 < phase.at < 1 or is_step):
        raise ConfigError(
            f"{where} begins nowhere; give a share of the steps below 1, or the number of a step"
            " above 1."
        )
    if not (phase.seq_len or phase.sources or phase.packing):
        raise ConfigError(f"{where} changes nothing; give seq_len, sources or packing.")
    if phase.seq_len < 0:
        raise ConfigError(f"{where} has a negative seq_len ({phase.seq_len}).")
    _check_weights(phase.sources, where)


def _check_buckets(data: "DataConfig") -> None:
    edges = data.buckets
    if not edges or edges[0] < 1 or sorted(set(edges)) != list(edges):
        raise ConfigError(f"data.buckets must be positive and rise (they are {list(edges)}).")
    if any(packing == "bucket" for packing in (data.packing, *(p.packing for p in data.phases))):
        return
    default = type(data)()
    for name in ("buckets", "bucket_tokens"):
        if getattr(data, name) != getattr(default, name):
            when = f"with data.packing {data.packing}"
            raise IdleError(f"data.{name}", when, "remove it or use bucket")


def _check_cuts(config: "RunConfig") -> None:
    """Every phase's rows must fit the model, and its units the global batch."""
    train, longest = config.train, config.model.max_positions
    for _, cut in mixes_of(config.data, train.seq_len):
        if longest and cut.seq_len > longest:
            raise ConfigError(
                f"a phase of data.phases has rows of {cut.seq_len} tokens and the model has"
                f" {longest} positions; shorten the rows or raise model.max_positions."
            )
        if cut.packing == "bucket" and cut.unit_tokens < cut.seq_len:
            raise ConfigError(
                f"data.bucket_tokens {cut.unit_tokens} does not hold one row of {cut.seq_len}"
                " tokens; raise it or shorten the rows."
            )
        if train.global_batch_tokens:
            cut.units_per_step(train.global_batch_tokens)


def _is_one_source(data: "DataConfig") -> bool:
    return all(
        len(sources) == 1
        for sources in (data.sources, *(p.sources for p in data.phases))
        if sources
    )
