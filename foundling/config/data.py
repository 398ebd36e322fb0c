"""Sections `data` and `phases`: their validators, and the schedule of phases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from foundling.config.errors import ConfigError, IdleError
from foundling.config.mixture import WeightsBy, row_weights, shared_out
from foundling.config.packing_spec import PARTS, Packing, PackingSpec, bucket_edges

if TYPE_CHECKING:
    from foundling.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer the run reads and writes with."""

    path: str = ""
    """Folder with tokenizer.json (or vocab.json and merges.txt); empty: the one the data was built
    with."""


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """What changes from some step on; what is left out stays as it was."""

    at: float
    """Where it begins: a share of the steps below 1, or the number of a step above 1."""
    seq_len: int = 0
    """Tokens of input per row from here on; 0: as before."""
    sources: dict[str, float] = field(default_factory=dict)
    """Data sets and their weights from here on; empty: as before."""
    packing: Literal["", "concat", "bestfit", "bucket", "pad"] = ""
    """How documents become rows from here on; empty: as before."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the run eats."""

    sources: dict[str, float] = field(default_factory=dict)
    """Built data sets (folders with a manifest.json) and their weights."""
    weights_by: WeightsBy = "rows"
    """What the weights share out: packed rows, tokens, documents, or epochs (a source of weight 2
    is read twice as often as one of weight 1, whatever their sizes)."""
    packing: Packing = "bestfit"
    """How documents become rows: concat (cut anywhere), bestfit (rows start at a document), pad
    (one document a row) or bucket (one document a row, micro-batches of rows alike in length)."""
    buckets: tuple[int, ...] = (256, 512, 768, 1024, 1536, 2048, 8192)
    """bucket: longest document of each bucket; train.seq_len takes the place of the last ones that
    exceed it, or comes on top."""
    bucket_tokens: int = 16384
    """bucket: padded tokens of a micro-batch, which is the unit (train.batch_size is not used)."""
    phases: tuple[PhaseConfig, ...] = ()
    """Changes of sequence length, mixture or packing on the way, such as a long-context stretch."""
    follow: bool = False
    """Begin while the data sets are still being built, and read on as they grow."""
    follow_minutes: float = 60.0
    """How long to wait for new shards before the run is saved and stops."""
    document_mask: bool = False
    """Keep attention inside each document of a packed row."""
    allow_repeat: float = 1.0
    """How many epochs of a source a run may take before it is refused."""
    prefetch: int = 2
    """Batches prepared ahead of the step."""

    def __post_init__(self) -> None:
        # Read from a file, phases and edges arrive as plain lists.
        phases = (p if isinstance(p, PhaseConfig) else PhaseConfig(**p) for p in self.phases)
        object.__setattr__(self, "phases", tuple(phases))
        object.__setattr__(self, "buckets", tuple(self.buckets))


# What the data section may not ask for, each refused in one sentence.


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


def packing_spec_of(seq_len: int, packing: Packing, data: DataConfig | None = None) -> PackingSpec:
    """The cut that a sequence length and a packing stand for, with the buckets of `data`."""
    if packing != "bucket":
        return PackingSpec(seq_len=seq_len, packing=packing)
    data = data or DataConfig()
    return PackingSpec(
        seq_len=seq_len,
        packing=packing,
        edges=bucket_edges(data.buckets, seq_len),
        unit_tokens=data.bucket_tokens,
    )


# The phases of a run: what is mixed and how it is cut, from which step to which.
#
# Pure arithmetic on the config, so that `plan`, `train` and `data` cannot disagree about it.


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of steps with one mixture and one cut."""

    first_step: int
    steps: int
    weights: dict[str, float]
    """As they are written; `data.weights_by` says what they share out."""
    cut: PackingSpec


class HasSizes(Protocol):
    """What a manifest says about a source."""

    @property
    def tokens(self) -> int: ...
    @property
    def documents(self) -> int: ...


def phases_of(data: DataConfig, seq_len: int, steps: int) -> tuple[Phase, ...]:
    """The phases of a run of `steps` steps; the first is what the config says without any."""
    starts = _starts(data, steps)
    stops = [*starts[1:], steps]
    return tuple(
        Phase(first_step=first, steps=stop - first, weights=weights, cut=cut)
        for first, stop, (weights, cut) in zip(starts, stops, mixes_of(data, seq_len), strict=True)
    )


def mixes_of(data: DataConfig, seq_len: int) -> list[tuple[dict[str, float], PackingSpec]]:
    """Weights and cut of each phase, whatever the steps will be."""
    weights, packing = dict(data.sources), data.packing
    found = [(weights, packing_spec_of(seq_len, packing, data))]
    for change in data.phases:
        weights = dict(change.sources) or weights
        seq_len = change.seq_len or seq_len
        packing = _packing(change.packing, packing)
        found.append((weights, packing_spec_of(seq_len, packing, data)))
    return found


def start_of(at: float, steps: int) -> int:
    """The step at which a phase begins, from `PhaseConfig.at`."""
    return round(at * steps) if at < 1 else int(at)


def every_source(data: DataConfig) -> tuple[str, ...]:
    """Every data set that some phase reads, in the order in which they are first named."""
    named = [*data.sources, *(name for phase in data.phases for name in phase.sources)]
    return tuple(dict.fromkeys(named))


def _packing(name: str, before: Packing) -> Packing:
    return name or before  # type: ignore[return-value]  # the config's own type allows no others


def _starts(data: DataConfig, steps: int) -> list[int]:
    starts = [0]
    for phase in data.phases:
        at = start_of(phase.at, steps)
        if not starts[-1] < at < steps:
            raise ConfigError(
                f"the phase of data.phases at {phase.at:g} would begin at step {at} of {steps},"
                f" where the one before it begins at {starts[-1]}; move it or make the run longer."
            )
        starts.append(at)
    return starts


def parts_of(
    phases: Sequence[Phase], by: WeightsBy, stored: Mapping[str, HasSizes]
) -> dict[tuple[str, PackingSpec], PackingSpec]:
    """Which documents each phase's cut of each source reads: all, or a part where cuts differ.

    Parts are in proportion to what the phases will read, so that all of a source's parts are read
    about equally often. They come from manifests alone: a part must not depend on what packing
    makes of it.
    """
    wanted: dict[str, dict[PackingSpec, float]] = {}
    for phase in phases:
        share = token_shares(phase.weights, by, stored)
        for name in phase.weights:
            cuts = wanted.setdefault(name, {})
            cuts[phase.cut] = cuts.get(phase.cut, 0.0) + phase.steps * share[name]
    found = {}
    for name, cuts in wanted.items():
        low = 0
        widths = shared_out(dict(enumerate(cuts.values())), PARTS - len(cuts))
        for cut, width in zip(cuts, widths.values(), strict=True):
            found[name, cut] = replace(cut, part=(low, low + width + 1))  # never an empty one
            low += width + 1
    return found


def token_shares(
    weights: Mapping[str, float], by: WeightsBy, stored: Mapping[str, HasSizes]
) -> dict[str, float]:
    """Shares of a step's tokens, as if every row were full."""
    rows = {
        name: row_weights({name: weight}, by, {name: _Full(stored[name])})[name]
        for name, weight in weights.items()
    }
    total = sum(rows.values())
    return {name: weight / total for name, weight in rows.items()}


@dataclass(frozen=True)
class _Full:
    """A source as if it were packed without padding into units of one token."""

    stored: HasSizes

    @property
    def units(self) -> int:
        return self.stored.tokens

    @property
    def tokens(self) -> int:
        return self.stored.tokens

    @property
    def documents(self) -> int:
        return self.stored.documents
