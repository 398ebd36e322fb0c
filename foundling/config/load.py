"""From a TARGET and flags to one RunConfig: preset, then file, then flag.

jsonargparse turns text into typed values and refuses wrong types; the layers, the nearest-name
suggestions and the one-sentence errors are ours, because its own message is a usage dump.
"""

import argparse
import copy
import difflib
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser

from foundling.config.base import _number
from foundling.config.data import every_source
from foundling.config.data_manifest import Manifest
from foundling.config.errors import ConfigError, IdleError
from foundling.config.parallel import AUTO
from foundling.config.presets import DERIVED_FROM, PRESETS, derived_rates, find_preset
from foundling.config.run import RunConfig, check_run
from foundling.config.train import HORIZONS

CONFIG_SCHEMA = 1
Tree = dict[str, Any]
Tell = Callable[[str], None]
ShapeOf = Callable[[str], Mapping[str, Any]]
SECTIONS = {field.name: field for field in fields(RunConfig)}
NAMES = {name: [item.name for item in fields(field.type)] for name, field in SECTIONS.items()}  # type: ignore[arg-type]
"""Every setting, by its section."""
# Setting one of these in a layer replaces whichever of them the layer below had set.
EXCLUSIVE = {"train": HORIZONS, "optim": ("warmup_steps", "warmup_share")}
BUILT_MOST = 64
_BUILT: dict[str, RunConfig] = {}
"""A command reads a run's config several times, and jsonargparse takes 40 ms for each."""


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
    config = _settled([asdict(find_preset(named) or RunConfig()), *above])
    given = {f"{s}.{n}" for layer in (file, flags) for s, values in layer.items() for n in values}
    given |= {f"model.{name}" for name in shape.get("model", ()) if name != "vocab_size"}
    config = _fitted(config, named, given, tell)
    check_run(config)
    return config


def _settled(layers: Sequence[Tree]) -> RunConfig:
    """The config of these layers, the upper ones last. What a layer says and one above it makes
    idle is left out: who switches evaluation off need not undo each setting of it."""
    tree: Tree = {}
    for layer in layers:
        tree = _overlay(tree, layer)
    while True:
        try:
            config = build(tree)
            check_run(config)
        except IdleError as idle:
            section, _, name = idle.setting.partition(".")
            said = [place for place, layer in enumerate(layers) if name in layer.get(section, {})]
            if said[-1] == len(layers) - 1 or _is_idle(idle.setting, layers[: said[-1] + 1]):
                raise
            del tree[section][name]
        else:
            return config


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
            config = replace(config, optim=replace(config.optim, **news))
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
        config = replace(config, model=replace(config.model, vocab_size=needed))
        whose = "the weights'" if config.train.init else "the preset's"
        tell(f"{whose} model.vocab_size {vocab:,} grows to the tokenizer's {needed:,} tokens.")
    return config


def load_run_config(path: Path) -> RunConfig:
    """The resolved config that a run wrote into its directory."""
    return load_config(str(path))


def build(tree: Tree) -> RunConfig:
    """Typed sections from a nested dict whose keys are known to be valid."""
    known = repr(tree)
    if known not in _BUILT:
        if len(_BUILT) == BUILT_MOST:
            _BUILT.clear()
        _BUILT[known] = _build(tree)
    return copy.deepcopy(_BUILT[known])


def _build(tree: Tree) -> RunConfig:
    try:
        typed = typed_parser().parse_object(_plain_numbers(tree))
    except argparse.ArgumentError as error:
        raise ConfigError(_one_sentence(str(error))) from None
    except RecursionError:
        raise ConfigError("a setting is nested too deeply; none has many levels.") from None
    parts = {name: field.type(**typed[name].as_dict()) for name, field in SECTIONS.items()}  # type: ignore[operator]
    return RunConfig(**parts)


@cache
def typed_parser() -> ArgumentParser:
    """A jsonargparse parser with one group per section."""
    parser = ArgumentParser(exit_on_error=False, add_help=False, usage=argparse.SUPPRESS)
    for name, field in SECTIONS.items():
        parser.add_argument(f"--{name}", type=field.type, default=getattr(RunConfig(), name))
    return parser


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


def _plain_numbers(tree: Tree) -> Tree:
    """20B, 3.5M and 1e9 written out where a whole number is wanted, and 4e19 where a float is."""
    plain: Tree = {}
    for section, values in tree.items():
        kinds = {field.name: field.type for field in fields(SECTIONS[section].type)}  # type: ignore[arg-type]
        plain[section] = {
            name: _number(value, kinds[name]) if isinstance(value, str) else value
            for name, value in values.items()
        }
    if plain["train"].get("batch_size") == AUTO:
        plain["train"]["batch_size"] = 0
    # One folder, one prompt or one task needs no brackets, nor does a list of words or numbers.
    sources = plain["data"].get("sources")
    if isinstance(sources, str) and not sources.lstrip().startswith("{"):
        plain["data"]["sources"] = {sources: 1.0}
    for name in ("prompts", "tasks"):
        words = plain["eval"].get(name)
        if isinstance(words, str) and not words.lstrip().startswith("["):
            plain["eval"][name] = [words] if name == "prompts" else words.split(",")
    for section, name in (("train", "float8_skip"), ("data", "buckets")):
        given = plain[section].get(name)
        if isinstance(given, int | str) and not isinstance(given, bool) and "[" not in str(given):
            words = [word for part in str(given).split(",") if (word := part.strip(" ()"))]
            kind = int if name == "buckets" else str
            plain[section][name] = [_number(word, kind) for word in words]
    return plain


def shrink(config: RunConfig, steps: int) -> tuple[RunConfig, str]:
    """The same run as a rehearsal of `steps` steps, and in words what was made smaller."""
    if steps < 1:
        raise ConfigError(f"--dev {steps} is no number of steps; give at least 1.")
    train, evaluation = config.train, config.eval
    none: dict[str, Any] = dict.fromkeys(HORIZONS, 0)
    small = replace(
        config,
        train=replace(
            train,
            **{**none, "steps": steps},
            batch_size=min(train.batch_size, 2),
            global_batch_tokens=0,
        ),
        eval=replace(
            evaluation,
            every=steps if evaluation.every else 0,
            tokens=min(evaluation.tokens, 4096) if evaluation.every else evaluation.tokens,
            sample_every=steps if evaluation.sample_every else 0,
            tasks_every=steps if evaluation.tasks else 0,
            tasks_limit=min(evaluation.tasks_limit or 20, 20) if evaluation.tasks else 200,
        ),
        optim=replace(config.optim, warmup_steps=min(config.optim.warmup_steps, steps // 2)),
    )
    check_run(small)
    said = ", ".join(f"{c.field} {c.old} -> {c.new}" for c in differences(config, small))
    return small, said


def _one_sentence(message: str) -> str:
    """jsonargparse's two-line complaint as one line in our words."""
    match = re.search(
        r'Parser key "([^"]+)":\s*Expected an? (.+?)\. Got value: (.*)', message, re.S
    )
    phase = re.search(r"PhaseConfig':\s+(.*)", message)
    if phase and not match:
        told = phase[1].strip().rstrip(".")
        return f"a phase of data.phases has at, seq_len, sources and packing ({told})."
    union = re.search(r'Parser key "([^"]+)":.*?Subtypes: \[(.*?)\]\n', message, re.S)
    if union and not match:
        words = re.findall(r"'(\w+)'", re.sub(r"<class '\w+'>", "", union[2]))
        words += ["true", "false"] if "bool" in union[2] else []
        value = message.rpartition("Given value:")[2].strip() or "nothing"
        return f"{union[1]} must be one of {', '.join(words)}, not {value.splitlines()[0]!r}."
    if not match:
        return " ".join(message.split())
    key, kind, value = match.groups()
    kind = re.sub(r"<class '(\w+)'>", r"\1", kind).replace("typing.", "")
    options = re.match(r"Literal\[(.*)\]", kind)
    wanted = f"one of {options[1]}" if options else f"of type {kind}"
    if kind == "int":
        wanted = "a whole number such as 300, 3.5M or 20B"
    return f"{key} must be {wanted}, not {(value.strip() or 'nothing').splitlines()[0]!r}."


def dump_yaml(config: RunConfig) -> str:
    """The config as YAML that `resolve` reads back to an equal one."""
    tree = {"schema": CONFIG_SCHEMA, **plain_tree(config)}
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)


def plain_tree(config: RunConfig) -> Tree:
    """The config as YAML knows it: dicts, lists and scalars."""
    return {section: _plain(values) for section, values in asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def differences(old: RunConfig, new: RunConfig) -> list[Change]:
    """Every field in which two configs differ, in the order of the sections."""
    return [
        Change(name, value, after)
        for (name, value), (_, after) in zip(flatten(old), flatten(new), strict=True)
        if value != after
    ]


def flatten(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Every field as ("section.field", value)."""
    for section in SECTIONS:
        part = getattr(config, section)
        assert is_dataclass(part)
        for field in fields(part):
            yield f"{section}.{field.name}", getattr(part, field.name)


# YAML as we read it: safe, strict, and with a sentence for every way it can be wrong.


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and reads only true and false as booleans."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, (str, int, float)):
                raise ConfigError(f"a key must be a word (line {key_node.start_mark.line + 1}).")
            # Dashes and underscores are the same to us, so two spellings are one key.
            key = str(key).replace("-", "_")
            if key in seen:
                raise ConfigError(f"{key} is given twice (line {key_node.start_mark.line + 1}).")
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads `off` as false, and `log.wandb: off` must stay a word.
_StrictLoader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:bool"]
    for letter, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(?:true|false|True|False)$"), list("tTfF")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping, or a sentence about why there is none."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; name a preset, a run directory, or a file"
            " that `foundling plan PRESET -o FILE` has written."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text, so it cannot be YAML.") from None
    except yaml.MarkedYAMLError as error:
        line = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path} is not valid YAML{line}: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be settings.") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections, such as `train:` with fields below it.")
    return {str(key): value for key, value in tree.items()}


# A config as YAML with every field explained beside it: what `foundling plan -o` writes.
#
# Read back it is equal: comments are the fields' own help and what the plan worked out.

COLUMN = 36
WIDTH = 100


def dump_commented(config: RunConfig, notes: Sequence[str] = ()) -> str:
    """The config with the help of each field as a comment, and `notes` on top."""
    lines = [f"# {line}" for note in notes for line in textwrap.wrap(note, WIDTH - 2)]
    lines.append(f"schema: {CONFIG_SCHEMA}")
    tree = plain_tree(config)
    for section, field in SECTIONS.items():
        docs = field_docs(field.type)
        lines += ["", f"{section}:  # {_summary(field.type)}"]
        for name, value in tree[section].items():
            lines += _field(name, value, docs[name])
    return "\n".join(lines) + "\n"


def _summary(section: Any) -> str:
    return (section.__doc__ or "").strip().splitlines()[0]


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
    docs = {section: field_docs(field.type) for section, field in SECTIONS.items()}
    count = sum(map(len, docs.values()))
    what = f"all {count} settings" if every else "settings that most people set"
    lines += ["", f"{what} (--section.field value; dashes and underscores are the same):"]
    shown = [f"{section}.{name}" for section, names in NAMES.items() for name in names]
    for section, name in (setting.split(".") for setting in (shown if every else _COMMON)):
        kind = SECTIONS[section].type
        doc, default = docs[section][name], getattr(getattr(RunConfig(), section), name)
        doc = doc if every else textwrap.shorten(doc, _SHORT, placeholder=" ...")
        choices = _choices({item.name: item.type for item in fields(kind)}[name])  # type: ignore[arg-type]
        told = f"{doc} {choices}{EXAMPLES.get(f'{section}.{name}', '')}".strip()
        told += f" [{default}]" if default not in ("", (), {}) else ""
        row = f"  --{f'{section}.{name}'.replace('_', '-'):<28} {told}"
        lines += textwrap.wrap(row, WIDTH, subsequent_indent=" " * 33, break_on_hyphens=False)
    if not every:
        lines += ["", f"`{command} --help all` explains all {count} settings in full."]
    return "\n".join(lines)


def _choices(kind: Any) -> str:
    return f"({', '.join(get_args(kind))})" if get_origin(kind) is Literal else ""


def field_docs(section: Any) -> dict[str, str]:
    """The string under each field of a section."""
    from docstring_parser import parse_from_object

    found = parse_from_object(section).params
    return {param.arg_name: " ".join((param.description or "").split()) for param in found}
