"""Sections `data` and `phases`: their validators, and the schedule of phases."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from foundling.config.base import Section
from foundling.config.errors import ConfigError
from foundling.config.mixture import WeightsBy, apportion, row_weights
from foundling.config.packing_spec import PART_COUNT, PackedSize, Packing, PackingSpec, bucket_edges

MAX_SEQ_LEN = 2**31 - 1
"""Positions are kept in 32 bits."""


class PhaseConfig(Section):
    """What changes from some step on; what is left out stays as it was."""

    section_name: ClassVar[str] = "data.phases"

    at: float
    """Where it begins: a share of the steps below 1, or the number of a step above 1."""
    seq_len: Annotated[int, Field(ge=0, le=MAX_SEQ_LEN)] = 0
    """Tokens of input per row from here on; 0: as before."""
    sources: dict[str, float] = Field(default={})
    """Data sets and their weights from here on; empty: as before."""
    packing: Literal["", "concat", "bestfit", "bucket", "pad"] = ""
    """How documents become rows from here on; empty: as before."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse a phase that begins nowhere or changes nothing."""
        where = f"the phase of data.phases at {self.at:g}"
        is_step = self.at > 1 and self.at == int(self.at)
        if not (0 < self.at < 1 or is_step):
            raise ConfigError(
                f"{where} begins nowhere; give a share of the steps below 1, or the number of a"
                " step above 1."
            )
        if not (self.seq_len or self.sources or self.packing):
            raise ConfigError(f"{where} changes nothing; give seq_len, sources or packing.")
        check_weights(self.sources, where)
        return self

    def first_step(self, steps: int) -> int:
        """The step at which it begins, of so many."""
        return round(self.at * steps) if self.at < 1 else int(self.at)


class DataConfig(Section):
    """What the run reads: data sets, their weights, and how documents become rows."""

    section_name: ClassVar[str] = "data"

    sources: dict[str, float] = Field(default={})
    """Built data sets (folders with a manifest.json) and their weights."""
    tokenizer: str = ""
    """Folder with tokenizer.json (or vocab.json and merges.txt); empty: the one that the data were
    built with."""
    weights_by: WeightsBy = "rows"
    """What the weights share out: packed rows, tokens, documents, or epochs (a source of weight 2
    is read twice as often as one of weight 1, whatever their sizes)."""
    packing: Packing = "bestfit"
    """How documents become rows: concat (cut anywhere), bestfit (rows start at a document), pad
    (one document a row) or bucket (one document a row, micro-batches of rows alike in length)."""
    buckets: tuple[int, ...] = (256, 512, 768, 1024, 1536, 2048, 8192)
    """bucket: longest document of each bucket; train.seq_len takes the place of the last ones that
    exceed it, or comes on top."""
    bucket_tokens: PositiveInt = 16384
    """bucket: padded tokens of a micro-batch, which is the unit (train.batch_size is not used)."""
    phases: tuple[PhaseConfig, ...] = ()
    """Changes of sequence length, mixture or packing on the way, such as a long-context stretch."""
    follow: NonNegativeFloat = 0.0
    """Minutes to wait for new shards of data sets that are still being built, before the run is
    saved and stops; 0: they must be complete."""
    document_mask: bool = False
    """Keep attention inside each document of a packed row."""
    allow_repeat: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0
    """How many epochs of a source a run may take before it is refused."""

    @field_validator("sources", mode="before")
    @classmethod
    def _read_folder(cls, value: Any) -> Any:
        """One folder needs no brackets."""
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("{"):
            unread = re.fullmatch(r"""\{ *([^ ,{}"']+?)[: ]([\d.]+) *\}""", value.strip())
            if unread and ": " not in value:
                right = f"{{{unread[1]}: {unread[2]}}}"
                raise ConfigError(f"data.sources {value} needs a colon and a blank: {right}.")
            return value
        if "," in value and not Path(value).exists():
            each = ", ".join(f"{name.strip()}: 1" for name in value.split(",") if name.strip())
            raise ConfigError(f"several data sets are written as --data.sources '{{{each}}}'.")
        return {value: 1.0}

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse settings that cannot work, or that have no effect with another one."""
        check_weights(self.sources, "data.sources")
        edges = self.buckets
        if not edges or edges[0] < 1 or sorted(set(edges)) != list(edges):
            raise ConfigError(f"data.buckets must be positive and rise (they are {list(edges)}).")
        if "bucket" not in (self.packing, *(phase.packing for phase in self.phases)):
            for name in ("buckets", "bucket_tokens"):
                self.refuse_unused(name, f"with data.packing {self.packing}", "bucket")
        mixtures = [self.sources, *(phase.sources for phase in self.phases if phase.sources)]
        if all(len(sources) == 1 for sources in mixtures):
            self.refuse_unused("weights_by", "with one source", "more data sets in data.sources")
        return self


def check_weights(sources: dict[str, float], where: str) -> None:
    """Refuse sources without a name or a weight."""
    for name, weight in sources.items():
        if not name.strip():
            raise ConfigError(f"{where} has a source without a name; name a built data set.")
        if not 0 < weight < float("inf"):
            raise ConfigError(f"the weight of {name} in {where} must be positive (it is {weight}).")


def packing_spec_of(seq_len: int, packing: Packing, data: DataConfig | None = None) -> PackingSpec:
    """The PackingSpec of a sequence length and a packing, with the buckets of `data`."""
    if packing != "bucket":
        return PackingSpec(seq_len=seq_len, packing=packing)
    data = data or DataConfig()
    return PackingSpec(
        seq_len=seq_len,
        packing=packing,
        edges=bucket_edges(data.buckets, seq_len),
        unit_tokens=data.bucket_tokens,
    )


# The phases of a run: what is mixed and how it is packed, from which step to which.
#
# Pure arithmetic on the config, so that `plan`, `train` and `data` cannot disagree about it.


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of steps with one mixture and one packing."""

    first_step: int
    steps: int
    weights: dict[str, float]
    """As they are written; `data.weights_by` says what they share out."""
    packing_spec: PackingSpec


def phases_of(data: DataConfig, seq_len: int, steps: int) -> tuple[Phase, ...]:
    """The phases of a run of `steps` steps; the first is what the config says without any."""
    starts = _starts(data, steps)
    stops = [*starts[1:], steps]
    return tuple(
        Phase(first_step=first, steps=stop - first, weights=weights, packing_spec=spec)
        for first, stop, (weights, spec) in zip(
            starts, stops, phase_mixtures(data, seq_len), strict=True
        )
    )


def phase_mixtures(data: DataConfig, seq_len: int) -> list[tuple[dict[str, float], PackingSpec]]:
    """Weights and packing of each phase, whatever the steps will be."""
    weights, packing = dict(data.sources), data.packing
    found = [(weights, packing_spec_of(seq_len, packing, data))]
    for change in data.phases:
        weights = dict(change.sources) or weights
        seq_len = change.seq_len or seq_len
        packing = change.packing or packing
        found.append((weights, packing_spec_of(seq_len, packing, data)))
    return found


def all_sources(data: DataConfig) -> tuple[str, ...]:
    """Every data set that some phase reads, in the order in which they are first named."""
    named = [*data.sources, *(name for phase in data.phases for name in phase.sources)]
    return tuple(dict.fromkeys(named))


def _starts(data: DataConfig, steps: int) -> list[int]:
    starts = [0]
    for phase in data.phases:
        at = phase.first_step(steps)
        if not starts[-1] < at < steps:
            raise ConfigError(
                f"the phase of data.phases at {phase.at:g} would begin at step {at} of {steps},"
                f" where the one before it begins at {starts[-1]}; move it or make the run longer."
            )
        starts.append(at)
    return starts


def document_parts(
    phases: Sequence[Phase], by: WeightsBy, stored: Mapping[str, PackedSize]
) -> dict[tuple[str, PackingSpec], PackingSpec]:
    """Which documents each phase reads of each source: all, or a part where packings differ.

    Parts are in proportion to what the phases will read, so that all of a source's parts are read
    about equally often. They come from manifests alone: a part must not depend on what packing
    makes of it.
    """
    wanted: dict[str, dict[PackingSpec, float]] = {}
    for phase in phases:
        share = token_shares(phase.weights, by, stored)
        for name in phase.weights:
            specs, spec = wanted.setdefault(name, {}), phase.packing_spec
            specs[spec] = specs.get(spec, 0.0) + phase.steps * share[name]
    found = {}
    for name, specs in wanted.items():
        low = 0
        widths = apportion(dict(enumerate(specs.values())), PART_COUNT - len(specs))
        for spec, width in zip(specs, widths.values(), strict=True):
            found[name, spec] = replace(spec, part=(low, low + width + 1))  # never an empty one
            low += width + 1
    return found


def token_shares(
    weights: Mapping[str, float], by: WeightsBy, stored: Mapping[str, PackedSize]
) -> dict[str, float]:
    """Shares of a step's tokens, as if every row were full."""
    full = {name: replace(stored[name], units=stored[name].tokens) for name in weights}
    rows = row_weights(weights, by, full)
    total = sum(rows.values())
    return {name: weight / total for name, weight in rows.items()}
