"""Figures that were recorded, and whether today's still reach them.

One JSON file holds an entry for each command line on each device: target, settings, batch and what
else changes the speed, and beside it the figure, the torch and the commit that it was measured
with. A figure of another GPU or of other settings says nothing about this one, so it is refused and
the nearest is named. A target is a name, and what it stands for may have changed since (a file was
edited, a preset too): so what its settings came to is kept with the figure, and held to.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foundling.config.errors import DataError
from foundling.config.load import flatten
from foundling.config.run import RunConfig
from foundling.runtime.files import write_text_atomic

SCHEMA = 2
SHARE = 0.97
"""Of a recorded figure: below it, something has become slower."""
DRAWN = "model.init"
"""Prefix of what only says which numbers the weights begin with."""
FIELDS = ("parallel.recompute", "optim.name", "optim.wide_embedding", "optim.clip",
          "data.document_mask", "train.seq_len",
          "train.dtype", "train.float8", "train.float8_skip",
          "train.compile", "train.kernels.attention", "train.kernels.attention_masked",
          "train.kernels.mlp", "train.kernels.loss", "train.z_loss", "train.deterministic",
          "train.threads")  # fmt: skip
"""What a step's speed on one device depends on, in addition to the model."""
Figure = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BaselineKey:
    """What was measured: everything of a command line that its figure depends on."""

    target: str
    settings: tuple[tuple[str, str], ...]
    batch: str
    """Rows, best, or preset where the config's own were taken."""
    micro_steps: int
    """0: as many as the config's global batch needs."""
    memory: float
    """GB that the device was cut down to; 0: all it has."""
    data: str
    """Folder of a data set, or random tokens."""
    device: str

    def __str__(self) -> str:
        words = [self.target, *(f"--{k} {v}" for k, v in self.settings)]
        words += [f"--batch {self.batch}"] if self.batch != "preset" else []
        words += [f"--micro-steps {self.micro_steps}"] if self.micro_steps != 1 else []
        words += [f"--limit-gb {self.memory:g}"] if self.memory else []
        words += [f"--data {self.data}"] if self.data != "random tokens" else []
        return f"{' '.join(words)} on {self.device}"

    def to_json(self) -> dict[str, Any]:
        """As in the file."""
        return {**asdict(self), "settings": dict(self.settings)}


def line_of(
    target: str,
    settings: Mapping[str, str],
    *,
    device: str,
    batch: str = "",
    micro_steps: int = 1,
    memory: float = 0.0,
    data: str = "",
) -> BaselineKey:
    """A command line, its settings in one spelling."""
    return BaselineKey(
        target=target,
        settings=tuple(sorted((k.replace("-", "_"), str(v)) for k, v in settings.items())),
        batch=batch or "preset",
        micro_steps=micro_steps,
        memory=float(memory),
        data=data or "random tokens",
        device=device,
    )


def read_figures(path: Path) -> dict[BaselineKey, Figure]:
    """All figures of a file, by their lines; none where there is no file."""
    if not path.exists():
        return {}
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree["schema"] != SCHEMA:
            raise ValueError
        names = BaselineKey.__dataclass_fields__
        figures: dict[BaselineKey, Figure] = {}
        for entry in tree["figures"]:
            settings = tuple(sorted(entry["settings"].items()))
            line = BaselineKey(**{**{name: entry[name] for name in names}, "settings": settings})
            figures[line] = {name: entry[name] for name in entry if name not in names}
            if not float(entry["tokens_per_s"]) > 0:
                raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} holds no figures of schema {SCHEMA}; write another with --record."
        ) from error
    return figures


def record(path: Path, line: BaselineKey, figure: Mapping[str, Any]) -> None:
    """Put a figure into the file, in the place of an older one of the same line."""
    figures = {**read_figures(path), line: dict(figure)}
    entries = [{**one.to_json(), **found} for one, found in figures.items()]
    entries.sort(key=lambda entry: (entry["device"], entry["target"], json.dumps(entry)))
    write_text_atomic(path, json.dumps({"schema": SCHEMA, "figures": entries}, indent=1) + "\n")


def recorded(path: Path, line: BaselineKey) -> Figure:
    """The figure to beat."""
    if not path.exists():
        raise DataError(f"--against {path} does not exist; write it with --record {path}.")
    figures = read_figures(path)
    if line in figures:
        return figures[line]
    nearest = max(figures, key=lambda other: _likeness(line, other), default=None)
    sentence = "is empty" if nearest is None else f"has none nearer than `{nearest}`"
    raise DataError(f"no figure for `{line}`: {path} {sentence}; write it with --record {path}.")


def _likeness(line: BaselineKey, other: BaselineKey) -> tuple[bool, bool, int]:
    """How much of another line is the same; the target counts most, then the device."""
    apart = len(set(line.settings) ^ set(other.settings))
    names = ("batch", "micro_steps", "memory", "data")
    apart += sum(getattr(line, name) != getattr(other, name) for name in names)
    same = (line.target == other.target, line.device == other.device)
    return (*same, -apart)


def meaning_of(config: RunConfig, line: BaselineKey) -> Figure:
    """The settings of a target that a figure depends on: the model's, and rows and their number in
    a step where the command line leaves them to it."""
    names = {*FIELDS}
    names |= {"train.batch_size"} if line.batch == "preset" else set()
    names |= {"train.global_batch_tokens"} if not line.micro_steps else set()
    found = {
        name: value
        for name, value in flatten(config)
        if name in names or (name.startswith("model.") and not name.startswith(DRAWN))
    }
    plain: Figure = json.loads(json.dumps(found))  # as it is read back
    return plain


def refuse_changed(figure: Mapping[str, Any], line: BaselineKey, config: RunConfig) -> None:
    """A figure of what the target stood for when it was recorded, and stands for no longer. One of
    before a setting was there had its default."""
    usual = meaning_of(RunConfig(), line)
    before = {**usual, **figure.get("meaning", meaning_of(config, line))}
    for name, now in meaning_of(config, line).items():
        if before[name] != now:
            raise DataError(
                f"the recorded figure is of another model: {name} was {before[name]} and is {now};"
                " record it anew, or change it back."
            )


def refuse_unlike(figure: Mapping[str, Any], check_steps: int) -> None:
    """Steps are timed after those of the check, and weights that have learnt are up to 2% faster
    than fresh ones: most of what SHARE allows."""
    before = figure.get("checked_steps")
    if before is not None and bool(before) != bool(check_steps):
        how = f"after a check of {before} steps" if before else "without a check"
        raise DataError(
            f"the recorded figure was timed {how}, which is not alike; give --check-steps {before}."
        )


@dataclass(frozen=True, kw_only=True)
class Held:
    """A measured figure as a share of the recorded one."""

    wanted: float
    share: float
    sentence: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"recorded": self.wanted, "share": self.share, "is_reached": self.is_reached}

    @property
    def is_reached(self) -> bool:
        """Whether nothing has become slower."""
        return self.share >= SHARE


def held_to(tokens_per_s: float, figure: Mapping[str, Any]) -> Held:
    """How much of a recorded figure is reached, with a sentence about it."""
    wanted = float(figure["tokens_per_s"])
    made = ", ".join(f"{k} {figure[k]}" for k in ("commit", "torch") if figure.get(k))
    sentence = (
        f"{tokens_per_s:,.0f} tokens/s are {tokens_per_s / wanted:.1%} of the recorded"
        f" {wanted:,.0f}{f' ({made})' if made else ''}, and {SHARE:.0%} is the least."
    )
    return Held(wanted=wanted, share=tokens_per_s / wanted, sentence=sentence)
