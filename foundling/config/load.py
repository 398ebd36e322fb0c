"""From a TARGET and flags to one RunConfig: preset, then file, then flag.

The sections (pydantic models) turn text into typed values and refuse what is wrong; here are the
layers, unknown names, and a config as YAML and as help.
"""

import difflib
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import yaml

from foundling.config.base import Section, read_yaml
from foundling.config.data import every_source
from foundling.config.data_manifest import Manifest
from foundling.config.errors import ConfigError, IdleError
from foundling.config.presets import DERIVED_FROM, PRESETS, derived_rates, find_preset
from foundling.config.run import RunConfig
from foundling.config.train import HORIZONS

CONFIG_SCHEMA = 1
Tree = dict[str, Any]
Tell = Callable[[str], None]
ShapeOf = Callable[[str], Mapping[str, Any]]
SECTIONS: dict[str, type[Section]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in RunConfig.model_fields.items()
}
NAMES = {name: list(section.model_fields) for name, section in SECTIONS.items()}
"""Every setting, by its section."""
# Setting one of these in a layer replaces whichever of them the layer below had set.
EXCLUSIVE = {"train": HORIZONS, "optim": ("warmup_steps", "warmup_share")}


class Change(NamedTuple):
    """One field that two configs disagree about."""

    field: str
    old: Any
    new: Any


def load_config(
    target: str,
    overrides: Mapping[str, Any] | None = None,
    tell: Tell = lambda _: None,
    shape_of: ShapeOf = lambda _: {},
) -> RunConfig:
    """The config that `target` (preset, YAML file or run directory) and flags amount to; `tell`
    hears what is worked out again from what was given, and `shape_of` gives the model's fields of
    weights that train.init names."""
    named, file = _layers(target)
    flags = unflatten(overrides or {})
    check_keys(flags)
    # A file without a preset says its whole model, such as the one of the run to be continued.
    asked = flags if "init" in flags.get("train", {}) else file if named else {}
    init = asked.get("train", {}).get("init")
    shape = {"model": dict(shape_of(init))} if init else {}
    above = [file, shape, flags] if asked is flags else [shape, file, flags]
    config = _settled([(find_preset(named) or RunConfig()).model_dump(), *above])
    given = {f"{s}.{n}" for layer in (file, flags) for s, values in layer.items() for n in values}
    given |= {f"model.{name}" for name in shape.get("model", ()) if name != "vocab_size"}
    return _fitted(config, named, given, tell)


def _settled(layers: Sequence[Tree]) -> RunConfig:
    """The config of these layers, the upper ones last. What a layer says and one above it makes
    idle is left out: who switches evaluation off need not undo each setting of it."""
    tree: Tree = {}
    for layer in layers:
        tree = _overlay(tree, layer)
    while True:
        try:
            return RunConfig(**tree)
        except IdleError as idle:
            section, _, name = idle.setting.partition(".")
            said = [place for place, layer in enumerate(layers) if name in layer.get(section, {})]
            if said[-1] == len(layers) - 1 or _is_idle(idle.setting, layers[: said[-1] + 1]):
                raise
            del tree[section][name]


def _is_idle(setting: str, layers: Sequence[Tree]) -> bool:
    """Whether it has no effect among these layers alone."""
    try:
        return not _settled(layers)
    except ConfigError as error:
        return isinstance(error, IdleError) and error.setting == setting


def _fitted(config: RunConfig, preset: str, given: set[str], tell: Tell) -> RunConfig:
    """What only the preset had set, made to fit what was given: rates that it derives from batch
    and shape, a vocabulary that the data's tokenizer exceeds."""
    if given & set(DERIVED_FROM):
        batch = f"{config.train.global_batch_tokens:,} tokens a step"
        rates = derived_rates(preset, config).items()
        open_to = {n: v for n, v in rates if f"optim.{n}" not in given}
        news: dict[str, Any] = {n: v for n, v in open_to.items() if v != getattr(config.optim, n)}
        if news:
            config = config.replace(optim=news)
            told = ", ".join(f"optim.{name} {value:.4g}" for name, value in news.items())
            tell(f"{preset} derives its rates from batch and shape; for {batch} they are {told}.")
        own = find_preset(preset)
        if own and derived_rates(preset, own) and not config.train.global_batch_tokens:
            tell(
                f"{preset}'s rates are those of {own.train.global_batch_tokens:,} tokens a step,"
                " and train.global_batch_tokens 0 leaves the batch to the number of processes."
            )
    vocab, needed = config.model.vocab_size, 0
    if vocab and "model.vocab_size" not in given:
        folders = [Path(name) for name in every_source(config.data)]
        built = [folder for folder in folders if (folder / "manifest.json").is_file()]
        needed = max((Manifest.load(folder).vocab_size for folder in built), default=0)
    if needed > vocab:
        config = config.replace(model={"vocab_size": needed})
        whose = "the weights'" if config.train.init else "the preset's"
        tell(f"{whose} model.vocab_size {vocab:,} grows to the tokenizer's {needed:,} tokens.")
    return config


def load_run_config(path: Path) -> RunConfig:
    """The resolved config that a run wrote into its directory."""
    return load_config(str(path))


def unflatten(flags: Mapping[str, Any]) -> Tree:
    """{"train.seq-len": v} to {"train": {"seq_len": v}}; dashes and underscores are the same."""
    tree: Tree = {}
    for key, value in flags.items():
        section, _, name = key.partition(".")
        if not name:
            raise ConfigError(unknown_setting("", key.replace("-", "_"), value))
        tree.setdefault(section.replace("-", "_"), {})[name.replace("-", "_")] = value
    return tree


def check_keys(tree: Tree) -> None:
    """Refuse an unknown section or field, naming the one that was probably meant."""
    for section, values in tree.items():
        if section not in SECTIONS:
            first = next(iter(values.items()), ("", None)) if isinstance(values, dict) else None
            name, value = first or (section, values)
            raise ConfigError(unknown_setting(section if first else "", name, value))
        if not isinstance(values, dict):
            raise ConfigError(f"section {section} must hold fields, and it holds {values!r}.")
        if empty := [name for name, value in values.items() if value is None]:
            raise ConfigError(f"{section}.{empty[0]} has no value; give one or remove it.")
        for name, value in values.items():
            if name not in NAMES[section]:
                raise ConfigError(unknown_setting(section, name, value))


@cache
def foreign_names() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Our name of each foreign one; and of those whose value has to change, what to do instead."""
    read = read_yaml(Path(__file__).with_name("foreign_names.yaml"))
    names = {name: own for own, names in read["names"].items() for name in names.split()}
    return names, {n: told for names, told in read["remedies"].items() for n in names.split()}


def meant(section: str, name: str, value: object, dashes: str = "") -> str:
    """What a name that is no setting is here, or "" where nobody calls a setting so; `section` is
    "" where none was given, and flags are written with `dashes`."""
    own_names, remedies = foreign_names()
    near = difflib.get_close_matches(section, NAMES, n=1, cutoff=0.6)
    for key in (f"{section}.{name}".lower().strip("."), name.lower()):
        if key in remedies:
            shown = " ".join(str(value).split())[:40]
            return f"{remedies[key].format(name=key, value=shown)}."
        if key in own_names:
            return f"it is {dashes}{own_names[key]} here."
        for other in sorted(NAMES, key=lambda one: one not in near):
            if other != section and key in NAMES[other]:
                return f"did you mean {dashes}{other}.{key}?"
    return ""


def unknown_setting(section: str, name: str, value: object) -> str:
    """A sentence about a setting that is none: what it is here, or else the nearest name. A name
    that differs wholly (n_embd, model.dim) is out of reach of spelling, so it is looked up."""
    written = f"{section}.{name}".strip(".")
    if told := meant(section, name, value):
        return f"unknown setting {written}; {told}"
    if section not in NAMES:
        return f"unknown section {section or name}{_nearest(section or name, NAMES)}"
    if close := difflib.get_close_matches(name, NAMES[section], n=1, cutoff=0.4):
        return f"unknown setting {written}; did you mean {section}.{close[0]}?"
    return f"unknown setting {written}; {section} has {', '.join(NAMES[section])}."


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}."


def _layers(target: str) -> tuple[str, Tree]:
    """The preset at the bottom ("" where none is named), and what a file sets above it."""
    path = Path(target)
    if path.is_dir() and (path / "config.yaml").is_file():
        path = path / "config.yaml"
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return _file_layers(path)
    if find_preset(target) is None:
        raise ConfigError(
            f"{target} is no preset, YAML file or run directory{_nearest(target, PRESETS)}"
        )
    return target, {}


def _file_layers(path: Path) -> tuple[str, Tree]:
    tree = read_yaml(path)
    schema = tree.pop("schema", CONFIG_SCHEMA)
    if schema != CONFIG_SCHEMA:
        raise ConfigError(f"{path} has schema {schema} and this version reads {CONFIG_SCHEMA}.")
    name = tree.pop("preset", None)
    if name is not None and find_preset(str(name)) is None:
        raise ConfigError(f"{path} names the preset {name}{_nearest(str(name), PRESETS)}")
    tree = {section.replace("-", "_"): _underscored(values) for section, values in tree.items()}
    try:
        check_keys(tree)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return "" if name is None else str(name), tree


def _underscored(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _overlay(base: Tree, over: Tree) -> Tree:
    """`over` on top of `base`, field by field; an exclusive field clears its rivals below."""
    merged = {section: dict(values) for section, values in base.items()}
    for section, values in over.items():
        below = merged.setdefault(section, {})
        rivals = EXCLUSIVE.get(section, ())
        if any(name in values and not _is_off(name, values[name]) for name in rivals):
            below = {k: v for k, v in below.items() if k not in rivals}
        merged[section] = {**below, **values}
    return merged


def _is_off(name: str, value: Any) -> bool:
    """Whether it says `not this horizon`, which leaves the others alone."""
    return name in HORIZONS and re.fullmatch(r"0+(\.0*)?", str(value)) is not None


def shrink(config: RunConfig, steps: int) -> tuple[RunConfig, str]:
    """The same run as a rehearsal of `steps` steps, and in words what was made smaller."""
    if steps < 1:
        raise ConfigError(f"--dev {steps} is no number of steps; give at least 1.")
    train, evaluation = config.train, config.eval
    none: dict[str, Any] = dict.fromkeys(HORIZONS, 0)
    least = min(evaluation.tasks_limit or 20, 20)
    small = config.replace(
        train={
            **none,
            "steps": steps,
            "batch_size": min(train.batch_size, 2),
            "global_batch_tokens": 0,
        },
        eval={
            "every": steps if evaluation.every else 0,
            **({"tokens": min(evaluation.tokens, 4096)} if evaluation.every else {}),
            **({"tasks_every": steps, "tasks_limit": least} if evaluation.tasks else {}),
        },
        optim={"warmup_steps": min(config.optim.warmup_steps, steps // 2)},
    )
    said = ", ".join(f"{c.field} {c.old} -> {c.new}" for c in differences(config, small))
    return small, said


def dump_yaml(config: RunConfig) -> str:
    """The config as YAML that `resolve` reads back to an equal one."""
    tree = {"schema": CONFIG_SCHEMA, **config.model_dump(mode="json")}
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)


def differences(old: RunConfig, new: RunConfig) -> list[Change]:
    """Every field in which two configs differ, in the order of the sections."""
    return [
        Change(name, value, after)
        for (name, value), (_, after) in zip(flatten(old), flatten(new), strict=True)
        if value != after
    ]


def flatten(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Every field as ("section.field", value)."""
    for section, part in config:
        for name, value in part:
            yield f"{section}.{name}", value


# A config as YAML with every field explained beside it: what `foundling plan -o` writes.
#
# Read back it is equal: comments are the fields' own help and what the plan worked out.

COLUMN = 36
WIDTH = 100


def dump_commented(config: RunConfig, notes: Sequence[str] = ()) -> str:
    """The config with the help of each field as a comment, and `notes` on top."""
    lines = [f"# {line}" for note in notes for line in textwrap.wrap(note, WIDTH - 2)]
    lines.append(f"schema: {CONFIG_SCHEMA}")
    tree = config.model_dump(mode="json")
    for section, kind in SECTIONS.items():
        docs = field_docs(kind)
        lines += ["", f"{section}:  # {(kind.__doc__ or '').partition(chr(10))[0]}"]
        for name, value in tree[section].items():
            lines += _field(name, value, docs[name])
    return "\n".join(lines) + "\n"


def _field(name: str, value: object, doc: str) -> list[str]:
    """One field; a long value or comment has the comment above."""
    text = yaml.safe_dump(
        value, sort_keys=False, allow_unicode=True, width=1 << 20, default_flow_style=True
    )
    # A lone scalar ends with YAML's end-of-document mark.
    row = f"  {name}: {text.removesuffix('...' + chr(10)).strip()}"
    if max(len(row), COLUMN) + 4 + len(doc) > WIDTH:
        return [*(f"  # {line}" for line in textwrap.wrap(doc, WIDTH - 4)), row]
    return [f"{row:<{COLUMN}}  # {doc}"]


# The help of every setting, from the strings under the fields: for `foundling VERB --help`.

_COMMON = (
    *("data.sources", "tokenizer.path", "train.tokens", "train.steps", "train.epochs"),
    *("train.seq_len", "train.batch_size", "train.global_batch_tokens", "train.seed"),
    *("train.dtype", "train.compile", "optim.name", "optim.lr", "optim.schedule"),
    *("optim.warmup_steps", "optim.weight_decay", "model.dim", "model.layers", "model.heads"),
    *("model.ffn_dim", "parallel.shard", "parallel.recompute", "checkpoint.every"),
    *("eval.every", "eval.tasks", "log.wandb"),
)
"""What most people set, in the order in which they ask."""
_SHORT = 100
"""Characters of the help of each of them."""
EXAMPLES = {
    "data.sources": """'{"data/a": 2, "data/b": 1}' or one folder""",
    "data.phases": """'[{at: 0.9, seq_len: 4096, sources: {"data/a": 1}}]'""",
    "eval.prompts": """'["Once", "Dear"]'""",
    "eval.tasks": """'["core=eval_bundle.zip"]'""",
}


def settings_help(command: str, every: bool = False) -> str:
    """Presets, then the settings that most people set, or all of them, with help and defaults."""
    lines = textwrap.wrap(f"presets: {', '.join(PRESETS)}, and depth-N up to 99", WIDTH)
    docs = {section: field_docs(kind) for section, kind in SECTIONS.items()}
    count = sum(map(len, docs.values()))
    what = f"all {count} settings" if every else "settings that most people set"
    lines += ["", f"{what} (--section.field value; dashes and underscores are the same):"]
    shown = [f"{section}.{name}" for section, names in NAMES.items() for name in names]
    for section, name in (setting.split(".") for setting in (shown if every else _COMMON)):
        field = SECTIONS[section].model_fields[name]
        doc, default = docs[section][name], field.get_default()
        doc = doc if every else textwrap.shorten(doc, _SHORT, placeholder=" ...")
        choices = _choices(field.annotation)
        told = f"{doc} {choices}{EXAMPLES.get(f'{section}.{name}', '')}".strip()
        told += f" [{default}]" if default not in ("", (), {}) else ""
        row = f"  --{f'{section}.{name}'.replace('_', '-'):<28} {told}"
        lines += textwrap.wrap(row, WIDTH, subsequent_indent=" " * 33, break_on_hyphens=False)
    if not every:
        lines += ["", f"`{command} --help all` explains all {count} settings in full."]
    return "\n".join(lines)


def _choices(kind: Any) -> str:
    return f"({', '.join(get_args(kind))})" if get_origin(kind) is Literal else ""


def field_docs(section: type[Section]) -> dict[str, str]:
    """The string under each field of a section."""
    return {n: " ".join((f.description or "").split()) for n, f in section.model_fields.items()}
