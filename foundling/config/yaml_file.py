"""YAML as we read it: safe, strict, and with a sentence for every way it can be wrong."""

import re
from pathlib import Path
from typing import Any

import yaml

from foundling.config.errors import ConfigError


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
            " that `foundling config PRESET -o FILE` has written."
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
