"""A config with some fields of one section changed."""

from dataclasses import replace
from typing import Any

from foundling.config.run import RunConfig


def set_in(config: RunConfig, section: str, **changes: Any) -> RunConfig:
    changed: dict[str, Any] = {section: replace(getattr(config, section), **changes)}
    return replace(config, **changed)
