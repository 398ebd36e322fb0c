"""Section, the base of every settings model; numbers such as 20B, and YAML as it is read here."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from foundling.config.errors import ConfigError, UnusedSettingError, sentence_of

Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_OPENING = ("[", "{", "(")


class Section(BaseModel):
    """Settings that belong together: frozen, with names of their own only, and finite numbers. The
    string under a field is its help. A value that is none ends as one sentence (ConfigError)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # where a field allows infinity, JSON brings it back
    )
    section_name: ClassVar[str] = ""
    """What the section is called in sentences and files."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(
                sentence_of(
                    error.errors(include_url=False)[0], self.section_name, type(self).model_fields
                )
            ) from None

    @field_validator("*", mode="before")
    @classmethod
    def _read_text(cls, value: Any, info: ValidationInfo) -> Any:
        """20B and 1e9 as numbers; lists and mappings of a flag, whose brackets may be missing."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if kind in (int, float):
            if isinstance(value, bool):
                return str(value).lower()  # true is no number
            return parse_number(value, kind) if isinstance(value, str) else value
        if get_origin(kind) not in (tuple, dict):
            return value
        if isinstance(value, str) and value.lstrip().startswith(_OPENING):
            value = parse_yaml(value.strip().replace("(", "[").replace(")", "]"))
        elif isinstance(value, str):
            value = [word for part in value.split(",") if (word := part.strip())]
        item = get_args(kind)[0]
        if not isinstance(value, list) or getattr(item, "__origin__", item) is not int:
            return value
        return [parse_number(word, int) if isinstance(word, str) else word for word in value]

    def replace(self, /, **changes: Any) -> Self:
        """A copy with other values, checked like any; a mapping sets its keys alone (of a section,
        and where keys are known). What a change makes unused goes back to its default."""
        values = {**dict(self), **{n: self._merged(n, value) for n, value in changes.items()}}
        while True:
            try:
                return type(self)(**values)
            except UnusedSettingError as unused:
                section, _, name = unused.setting.rpartition(".")
                if section != self.section_name or name in changes:
                    raise
                del values[name]

    def _merged(self, name: str, value: Any) -> Any:
        """A new value of a field: of a mapping with known keys those that are given, and {} is none
        of them; a flag's brackets may be missing."""
        old, field = getattr(self, name, None), type(self).model_fields.get(name)
        kind = field.annotation if field else None
        is_map = get_origin(kind) is dict and get_args(kind)[0] is not str
        if isinstance(value, str) and (is_map or isinstance(old, Section)):
            value = parse_yaml(f"{{{value.strip().removeprefix('{').removesuffix('}')}}}")
        if isinstance(old, Section) and isinstance(value, Mapping):
            return old.replace(**{str(key): item for key, item in value.items()})
        return (
            {**(old or {}), **value} if is_map and value and isinstance(value, Mapping) else value
        )

    def is_set(self, name: str) -> bool:
        """Whether a field differs from its default: a resolved config states every one."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    def refuse_unused(self, name: str, when: str, remedy: str) -> None:
        """Refuse a field that is set and has no effect."""
        if self.is_set(name):
            raise UnusedSettingError(
                f"{self.section_name}.{name}", when, f"remove it or use {remedy}"
            )


def parse_number(text: str, kind: Any) -> Any:
    """The number a text stands for (20B, 1e9), or the text itself if it is none."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d+)?)([KMBTkmbt]?)", text)
    if not match or text.isdigit():
        return text
    value = float(match[1]) * _SUFFIXES.get(match[2].upper(), 1)
    if math.isinf(value) and kind is int:
        return text
    return int(value) if kind is int and value == int(value) else value if kind is float else text


def whole_number(text: str) -> int:
    """A whole number as people write it: 300, 20B, 3.5M, 1e9."""
    value = parse_number(text, int)
    if re.fullmatch(r"-\d+", text):
        raise ConfigError(f"{text} is below zero; give a whole number such as 300, 20B or 1e9.")
    if not str(value).isdigit():
        raise ConfigError(f"{text} is not a whole number such as 300, 20B or 1e9.")
    return int(value)


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


def parse_yaml(text: str) -> Any:
    """What YAML says, or a sentence about why it says nothing."""
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"not valid YAML{line}: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise ConfigError("nested too deeply to be settings.") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping, or a sentence about why there is none."""
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; name a preset, a run directory, or a file"
            " that `foundling plan PRESET -o FILE` has written."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text, so it cannot be YAML.") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections, such as `train:` with fields below it.")
    return {str(key): value for key, value in tree.items()}
