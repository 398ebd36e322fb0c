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
from pydantic.fields import FieldInfo

from foundling.config.base import Section, read_yaml
from foundling.config.data import all_sources
from foundling.config.data_manifest import MANIFEST_NAME, Manifest
from foundling.config.errors import ConfigError, did_you_mean
from foundling.config.presets import DERIVED_FROM, PRESETS, derived_rates, find_preset
from foundling.config.run import RunConfig

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
    gets a line for each setting that is derived from the given ones, and `shape_of` gives the
    model's fields of weights that train.start names."""
    preset, file = _layers(target)
    flags = unflatten(overrides or {})
    check_keys(flags)
    is_flag = "start" in flags.get("train", {})
    # A file without a preset says its whole model, such as the one of the run to be continued.
    train = (flags if is_flag else file if preset else {}).get("train", {})
    shape: Tree = {}
    if train.get("start") and train.get("start_with") != "everything":
        shape = {"model": dict(shape_of(train["start"]))}
    config = find_preset(preset) or RunConfig()
    for layer in (file, shape, flags) if is_flag else (shape, file, flags):
        config = config.replace(**layer)
    given = {name for layer in (file, flags) for name, _ in _flat_items(layer)}
    given |= {f"model.{name}" for name in shape.get("model", ()) if name != "vocab_size"}
    return _derive_from_given(config, preset, given, tell)


def _derive_from_given(config: RunConfig, preset: str, given: set[str], tell: Tell) -> RunConfig:
    """Derive again what only the preset had set: learning rates, from the given batch and shape; a
    vocabulary that the data's tokenizer exceeds."""
    if given & set(DERIVED_FROM):
        batch = f"{config.train.global_batch_tokens:,} tokens a step"
        rates = derived_rates(preset, config).items()
        open_to = {n: v for n, v in rates if f"optim.{n}" not in given}
        had = dict(_flat_items(config.model_dump()))
        news = {n: v for n, v in open_to.items() if v != had.get(f"optim.{n}")}
        if news:
            config = config.replace(optim=_nested(news))
            values = ", ".join(f"optim.{name} {value:.4g}" for name, value in news.items())
            tell(f"{preset} derives its rates from batch and shape; for {batch} they are {values}.")
        own = find_preset(preset)
        if own and derived_rates(preset, own) and not config.train.global_batch_tokens:
            tell(
                f"{preset}'s rates are those of {own.train.global_batch_tokens:,} tokens a step,"
                " and train.global_batch_tokens 0 leaves the batch to the number of processes."
            )
    vocab, needed = config.model.vocab_size, 0
    if vocab and "model.vocab_size" not in given:
        folders = [Path(name) for name in all_sources(config.data)]
        built = [folder for folder in folders if (folder / MANIFEST_NAME).is_file()]
        needed = max((Manifest.load(folder).vocab_size for folder in built), default=0)
    if needed > vocab:
        config = config.replace(model={"vocab_size": needed})
        whose = "the weights'" if config.train.start else "the preset's"
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
    return {section: _nested(values) for section, values in tree.items()}


def _nested(values: Mapping[str, Any]) -> Tree:
    """{"lr_of.head": v} as {"lr_of": {"head": v}}."""
    tree: Tree = {}
    for name, value in values.items():
        name, _, key = name.partition(".")
        if key:
            tree.setdefault(name, {})[key] = value
        else:
            tree[name] = value
    return tree


def _flat_items(layer: Tree) -> Iterator[tuple[str, Any]]:
    """Every value of a layer as ("section.field", value), or ("section.field.key", value)."""
    for section, values in layer.items():
        for name, value in values.items():
            yield f"{section}.{name}", value
            if isinstance(value, dict):
                yield from ((f"{section}.{name}.{key}", item) for key, item in value.items())


def check_keys(tree: Tree) -> None:
    """Refuse an unknown section or field, suggesting the nearest."""
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
    return names, {n: remedy for names, remedy in read["remedies"].items() for n in names.split()}


def suggest_setting(section: str, name: str, value: object, dashes: str = "") -> str:
    """A suggestion for an unknown setting, or ""; `section` is "" where none was given, and flags
    are written with `dashes`."""
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
    if hint := suggest_setting(section, name, value):
        return f"unknown setting {written}; {hint}"
    if section not in NAMES:
        return f"unknown section {section or name}; {did_you_mean(section or name, NAMES)}"
    spelled = {name.rpartition(".")[2]: own for name, own in foreign_names()[0].items()
               if own.startswith(f"{section}.")}  # fmt: skip
    spelled |= {name: f"{section}.{name}" for name in NAMES[section]}
    if close := difflib.get_close_matches(name, spelled, n=1, cutoff=0.4):
        return f"unknown setting {written}; did you mean {spelled[close[0]]}?"
    return f"unknown setting {written}; {section} has {', '.join(NAMES[section])}."


def _layers(target: str) -> tuple[str, Tree]:
    """The preset at the bottom ("" where none is named), and what a file sets above it."""
    path = Path(target)
    if path.is_dir() and (path / "config.yaml").is_file():
        path = path / "config.yaml"
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return _file_layers(path)
    if find_preset(target) is None:
        if re.fullmatch(r"depth-\d+", target):
            raise ConfigError(f"{target} is no preset; depth-N goes up to 99.")
        if kind := _other_kind(path):
            raise ConfigError(
                f"{target} is a {kind}; TARGET is a preset, YAML file or run directory (`foundling"
                " train --help` lists presets)."
            )
        raise ConfigError(
            f"{target} is no preset, YAML file or run directory; {did_you_mean(target, PRESETS)}"
        )
    return target, {}


def _other_kind(folder: Path) -> str:
    """What a folder is that is no run; "" where it is nothing of ours."""
    if not (folder / "manifest.json").is_file():
        return "tokenizer" if (folder / "tokenizer.json").is_file() else ""
    return "checkpoint" if re.match(r"step-\d+", folder.name) else "data set"


def _file_layers(path: Path) -> tuple[str, Tree]:
    tree = read_yaml(path)
    schema = tree.pop("schema", CONFIG_SCHEMA)
    if schema != CONFIG_SCHEMA:
        raise ConfigError(f"{path} has schema {schema} and this version reads {CONFIG_SCHEMA}.")
    name = tree.pop("preset", None)
    if name is not None and find_preset(str(name)) is None:
        raise ConfigError(f"{path} names the preset {name}; {did_you_mean(str(name), PRESETS)}")
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


def dev_config(config: RunConfig, steps: int) -> tuple[RunConfig, str]:
    """The same run as a rehearsal of `steps` steps, and in words what was made smaller."""
    if steps < 1:
        raise ConfigError(f"--dev {steps} is no number of steps; give at least 1.")
    train, evaluation = config.train, config.eval
    least = min(evaluation.tasks_limit or 20, 20)
    phases, stretches = config.data.phases[: steps - 1], min(len(config.data.phases) + 1, steps)
    small = config.replace(
        data={"phases": [p.replace(at=n / stretches) for n, p in enumerate(phases, start=1)]},
        train={
            "horizon": steps,
            "batch_size": min(train.batch_size, 2),
            "global_batch_tokens": 0,
        },
        eval={
            "every": steps if evaluation.every else 0,
            **({"tokens": min(evaluation.tokens, 4096)} if evaluation.every else {}),
            **({"tasks_every": steps, "tasks_limit": least} if evaluation.tasks else {}),
        },
        optim={"warmup": min(config.optim.warmup, steps // 2)},
    )
    changes = {change.field: change[1:] for change in differences(config, small)}
    if "data.phases" in changes:
        starts = [" and ".join(f"{p.at:g}" for p in c.data.phases) for c in (config, small)]
        changes["data.phases"] = (f"at {starts[0]}", f"at {starts[1]}" if starts[1] else "none")
    return small, ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changes.items())


def dump_yaml(config: RunConfig) -> str:
    """The config as YAML that `load_config` reads back to an equal one."""
    tree = {"schema": CONFIG_SCHEMA, **config.model_dump(mode="json")}
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)


def differences(old: RunConfig, new: RunConfig) -> list[Change]:
    """Every field in which two configs differ, in the order of the sections."""
    return [
        Change(name, value, after)
        for (name, value), (_, after) in zip(flatten(old), flatten(new), strict=True)
        if value != after
    ]


def flatten(section: Section, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a config as ("section.field", value)."""
    for name, value in section:
        if isinstance(value, Section):
            yield from flatten(value, f"{where}{name}.")
        else:
            yield f"{where}{name}", value


# A config as YAML with a comment for every field: what `foundling plan -o` writes.
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
        lines += ["", f"{section}:  # {(kind.__doc__ or '').partition(chr(10))[0]}"]
        for name, value in tree[section].items():
            lines += _field(name, value, _help(kind.model_fields[name]))
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
    *("data.sources", "data.packing", "train.horizon"),
    *("train.seq_len", "train.batch_size", "train.global_batch_tokens", "train.seed"),
    *("train.dtype", "train.compile", "optim.name", "optim.lr", "optim.schedule"),
    *("optim.warmup", "optim.weight_decay", "optim.clip", "model.vocab_size", "model.dim"),
    *("model.layers", "model.heads", "model.kv_heads", "model.ffn_dim"),
    *("parallel.shard", "parallel.recompute", "checkpoint.every"),
    *("eval.every", "log.wandb"),
)
"""What most people set, in the order in which they ask; their help ends with its first clause."""
EXAMPLES = {
    "data.sources": """'{"data/a": 2, "data/b": 1}' or one folder""",
    "data.phases": """'[{at: 0.9, seq_len: 4096, sources: {"data/a": 1}}]'""",
    "eval.prompts": """'["Once", "Dear"]'""",
    "eval.tasks": """'["core=eval_bundle.zip"]'""",
}


def settings_help(command: str, every: bool = False) -> str:
    """Presets, then the settings that most people set, or all of them, with help and defaults."""
    lines = textwrap.wrap(f"presets: {', '.join(PRESETS)}, and depth-N up to 99", WIDTH)
    fields = dict(_described("", RunConfig))
    count = sum(map(len, NAMES.values()))
    what = f"all {count} settings" if every else "settings that most people set"
    lines += ["", f"{what} (--section.field value; dashes and underscores are the same)"]
    lines += ["(defaults are of no preset; `foundling plan PRESET -o FILE` shows a preset's):"]
    for name in fields if every else _COMMON:
        if name in SECTIONS:
            continue
        field = fields[name]
        doc, default = _help(field), field.get_default()
        doc = doc.removesuffix(".") if every else _first_clause(doc, default)
        notes = list(get_args(field.annotation)) if get_origin(field.annotation) is Literal else []
        notes = [", ".join(map(str, notes))] if notes else []
        if default not in ("", (), {}) and not isinstance(default, Section):
            notes.append(f"default: {default}")
        text = f"{doc} ({'; '.join(notes)})" if notes else doc
        text += f": {EXAMPLES[name]}" if name in EXAMPLES else ""
        row = f"  --{name.replace('_', '-'):<28} {text}"
        lines += textwrap.wrap(row, WIDTH, subsequent_indent=" " * 33, break_on_hyphens=False)
    if not every:
        lines += ["", f"`{command} --help all` explains all {count} settings in full."]
    return "\n".join(lines)


def _first_clause(doc: str, default: object) -> str:
    """The first clause of a help text, and what it says about a default that is 0 or empty."""
    first, *others = re.split(r"[;.] |\.$", doc)
    is_none = default in (0, "")
    return "; ".join([first, *(c for c in others if is_none and re.match(r"(0|empty)\b", c))])


def _described(where: str, section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Every field as "section.field", the keys of mappings after theirs."""
    for name, field in section.model_fields.items():
        yield f"{where}{name}", field
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _described(f"{where}{name}.", field.annotation)


def _help(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())
