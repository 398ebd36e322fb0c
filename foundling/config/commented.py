"""A config as YAML with every field explained beside it: what `foundling config` writes.

Read back it is equal: comments are the fields' own help and what the plan worked out.
"""

import textwrap
from collections.abc import Sequence
from typing import Any

import yaml

from foundling.config.resolve import CONFIG_SCHEMA, SECTIONS, plain_tree
from foundling.config.sections import RunConfig
from foundling.config.settings_help import field_docs

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
