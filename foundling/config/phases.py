"""The phases of a run: what is mixed and how it is cut, from which step to which.

Pure arithmetic on the config, so that `plan`, `train` and `data` cannot disagree about it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from foundling.config.cut import PARTS, Cut, cut_of
from foundling.config.errors import ConfigError
from foundling.config.mixture import row_weights, shared_out
from foundling.config.sections import DataConfig, Packing, WeightsBy


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of steps with one mixture and one cut."""

    first_step: int
    steps: int
    weights: dict[str, float]
    """As they are written; `data.weights_by` says what they share out."""
    cut: Cut


class Stored(Protocol):
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


def mixes_of(data: DataConfig, seq_len: int) -> list[tuple[dict[str, float], Cut]]:
    """Weights and cut of each phase, whatever the steps will be."""
    weights, packing = dict(data.sources), data.packing
    found = [(weights, cut_of(seq_len, packing, data))]
    for change in data.phases:
        weights = dict(change.sources) or weights
        seq_len = change.seq_len or seq_len
        packing = _packing(change.packing, packing)
        found.append((weights, cut_of(seq_len, packing, data)))
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
    phases: Sequence[Phase], by: WeightsBy, stored: Mapping[str, Stored]
) -> dict[tuple[str, Cut], Cut]:
    """Which documents each phase's cut of each source reads: all, or a part where cuts differ.

    Parts are in proportion to what the phases will read, so that all of a source's parts are read
    about equally often. They come from manifests alone: a part must not depend on what packing
    makes of it.
    """
    wanted: dict[str, dict[Cut, float]] = {}
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
    weights: Mapping[str, float], by: WeightsBy, stored: Mapping[str, Stored]
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

    stored: Stored

    @property
    def units(self) -> int:
        return self.stored.tokens

    @property
    def tokens(self) -> int:
        return self.stored.tokens

    @property
    def documents(self) -> int:
        return self.stored.documents
