"""The help of every setting, from the strings under the fields: for `foundling VERB --help`."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

from foundling.config.presets import PRESETS
from foundling.config.sections import RunConfig

EXAMPLES = {
    "data.sources": """'{"data/a": 2, "data/b": 1}' or one folder""",
    "data.phases": """'[{at: 0.9, seq_len: 4096, sources: {"data/a": 1}}]'""",
    "eval.prompts": """'["Once", "Dear"]'""",
    "eval.tasks": """'["core=eval_bundle.zip"]'""",
}


def settings_help() -> str:
    """Presets, then every setting with its help, its choices and RunConfig's default."""
    lines = [f"presets: {', '.join(PRESETS)}, and depth-N up to 99", ""]
    lines.append("settings (--section.field value; dashes and underscores are the same):")
    for section in fields(RunConfig):
        docs = field_docs(section.type)
        for item in fields(section.type):  # type: ignore[arg-type]
            name = f"{section.name}.{item.name}"
            default = getattr(getattr(RunConfig(), section.name), item.name)
            told = f"{docs[item.name]} {_choices(item.type)}{EXAMPLES.get(name, '')}".strip()
            shown = f" [{default}]" if default not in ("", (), {}) else ""
            lines.append(f"  --{name.replace('_', '-'):<28} {told}{shown}")
    return "\n".join(lines)


def _choices(kind: Any) -> str:
    return f"({', '.join(get_args(kind))})" if get_origin(kind) is Literal else ""


def field_docs(section: Any) -> dict[str, str]:
    """The string under each field of a section."""
    from docstring_parser import parse_from_object

    found = parse_from_object(section).params
    return {param.arg_name: " ".join((param.description or "").split()) for param in found}
