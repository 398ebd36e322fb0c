"""A config with some fields of one section changed."""

from typing import Any

from foundling.config.run import RunConfig


def set_in(config: RunConfig, section: str, **changes: Any) -> RunConfig:
    changed: dict[str, Any] = {section: getattr(config, section).replace(**changes)}
    return config.replace(**changed)
