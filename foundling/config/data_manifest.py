"""The Manifest: what a built data set holds, as plain JSON.

It lives here and not in `data` because `plan` reads it too and must not load Arrow. It is written
last, so a folder without one is a build that did not finish. A build that is followed while it goes
on writes it after every wave of shards, with `complete` false until the end; shards are only ever
appended.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from foundling.config.errors import DataError

MANIFEST_NAME = "manifest.json"
MANIFEST_SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """One Arrow file: what it holds and what it must hash to."""

    name: str
    """Path relative to the manifest's folder."""
    documents: int
    tokens: int
    """BOS and EOS (or the chat's own markers) included."""
    targets: int
    """Tokens that a loss would count: all but the first of a document, or the assistant's."""
    text_bytes: int
    """UTF-8 bytes of the text."""
    file_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        parts = self.name.split("/")
        if not self.name or self.name.startswith("/") or "\\" in self.name or ".." in parts:
            raise DataError(f"a manifest names {self.name!r}, which is outside of its folder.")


def shard_problem(folder: Path, info: ShardInfo) -> str:
    """Why a shard cannot be read, as a sentence, from its size alone; empty where nothing is wrong.
    Cheap, so that `plan` can say what `train` will say."""
    path = f"{folder}/{info.name}"
    try:
        size = os.stat(path).st_size
    except OSError:
        return f"{path} is missing; copy it back or build the data set again."
    if size != info.file_bytes:
        return (
            f"{path} has {size} bytes where the manifest says {info.file_bytes}; copy it again or"
            " build the data set again."
        )
    return ""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A built data set: its splits, its tokenizer and where it came from."""

    name: str
    kind: Literal["text", "chat"]
    tokenizer: str
    """Fingerprint of the tokenizer the tokens were made with."""
    vocab_size: int
    token_dtype: Literal["uint16", "uint32"]
    train: tuple[ShardInfo, ...]
    val: tuple[ShardInfo, ...]
    recipe: dict[str, Any] = field(default_factory=dict)
    """What was built from what, enough to build it again."""
    complete: bool = True
    """Whether no more shards will come."""
    schema: int = MANIFEST_SCHEMA

    @cached_property
    def digest(self) -> str:
        """Identity of the content: two manifests with one digest hold the same tokens, and runs on
        them read them in the same order. What is noted beside the content changes neither."""
        fields = {**asdict(self), "schema": 1}  # a constant, so that a newer schema keeps digests
        del fields["complete"]
        if "result" in self.recipe:
            counts = {name: self.recipe["result"].get(name) for name in ("rows", "quarantined")}
            fields["recipe"] = {**self.recipe, "result": counts}
        return _hashed(fields)

    @property
    def train_tokens(self) -> int:
        return sum(shard.tokens for shard in self.train)

    def save(self, folder: Path) -> None:
        """Write manifest.json atomically, with its digest and a checksum of all of it inside."""
        fields = asdict(self)
        data = {"digest": self.digest, "seal": _hashed(fields), **fields}
        temporary = folder / (MANIFEST_NAME + ".tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / MANIFEST_NAME)

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read and check manifest.json; a missing, damaged or edited one is refused by name."""
        path = folder / MANIFEST_NAME
        if not folder.exists():
            remedy = f"build it with `foundling data build ... -o {folder}`"
            raise DataError(f"the data set {folder} does not exist; {remedy}.")
        if folder.is_file():
            remedy = f"build one of it with `foundling data build {folder} --tokenizer T -o DIR`"
            raise DataError(f"{folder} is a file and no built data set; {remedy}.")
        if not path.is_file():
            raise DataError(
                f"{folder} holds no {MANIFEST_NAME}: it is no data set, or its build did not"
                f" finish; build it with `foundling data build ... -o {folder}`."
            )
        try:
            return cls._from_json(json.loads(path.read_text()), path)
        except KeyError as error:
            raise DataError(
                f"{path} is no data set's (it has no {error}); build the data set again."
            ) from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{path} cannot be read ({error}); build the data set again.") from None

    @classmethod
    def _from_json(cls, data: dict[str, Any], path: Path) -> "Manifest":
        stated, checksum = data.pop("digest"), data.pop("seal", None)
        if data["schema"] != MANIFEST_SCHEMA:
            raise DataError(
                f"{path} has schema {data['schema']} and this version reads {MANIFEST_SCHEMA};"
                " build the data set again."
            )
        is_unedited = checksum == _hashed(data)
        for split in ("train", "val"):
            data[split] = tuple(ShardInfo(**shard) for shard in data[split])
        manifest = cls(**data)
        if manifest.digest != stated or not is_unedited:
            raise DataError(f"{path} was changed after it was written; build the data set again.")
        return manifest


def _hashed(fields: dict[str, Any]) -> str:
    body = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(body.encode()).hexdigest()
