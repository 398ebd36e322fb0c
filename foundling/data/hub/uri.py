"""How a repository of the hub is named.

    hf://datasets/OWNER/NAME[@config][:split][#revision]
    hf://datasets/OWNER/NAME/path/of/files-*.parquet[#revision]
    hf://OWNER/NAME[#revision]                              a model, for its tokenizer

`@` is the config here and not the revision, because that is what people choose every day.
"""

import re
from dataclasses import dataclass
from typing import Literal

from foundling.config.errors import DataError

PREFIX = "hf://"
FORM = "hf://datasets/OWNER/NAME[@config][:split][#revision]"
_WORD = re.compile(r"[\w][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class HubUri:
    """What part of which repository, at which revision."""

    repo: str
    """OWNER/NAME."""
    kind: Literal["dataset", "model"] = "dataset"
    config: str = ""
    """Part of a data set; empty: its default."""
    split: str = ""
    """Empty: train, or the only one."""
    path: str = ""
    """Files by name or pattern, instead of a config and a split."""
    revision: str = ""
    """Branch, tag or commit; empty: main."""

    @property
    def name(self) -> str:
        """The repository without its owner."""
        return self.repo.rpartition("/")[2]

    def __str__(self) -> str:
        kind = "datasets/" if self.kind == "dataset" else ""
        text = f"{PREFIX}{kind}{self.repo}"
        for mark, value in (("/", self.path), ("@", self.config), (":", self.split)):
            text += mark + value if value else ""
        return text + (f"#{self.revision}" if self.revision else "")


def parse_uri(text: str) -> HubUri:
    """Read a name, or say in one sentence how it is written."""
    if not text.startswith(PREFIX):
        raise DataError(f"{text} does not begin with {PREFIX}; write {FORM}.")
    rest, _, revision = text[len(PREFIX) :].partition("#")
    is_data = rest.startswith("datasets/")
    rest = rest.removeprefix("datasets/").removeprefix("models/")
    owner, _, rest = rest.partition("/")
    name, slash, path = rest.partition("/")
    if slash and ("@" in name or ":" in name):
        raise DataError(f"{text} has a config or split and a path; give one of them ({FORM}).")
    name, _, split = name.partition(":")
    name, _, config = name.partition("@")
    if not (_WORD.fullmatch(owner) and _WORD.fullmatch(name)):
        raise DataError(f"{text} names no repository; write {FORM}.")
    if not is_data and (config or split or path):
        raise DataError(f"{text} is a model with a config, split or path; data is {FORM}.")
    return HubUri(
        repo=f"{owner}/{name}",
        kind="dataset" if is_data else "model",
        config=config,
        split=split,
        path=path.strip("/"),
        revision=revision,
    )
