"""The Manifest: what a built data set holds, as plain JSON.

It lives here and not in `data` because `plan` reads it too and must not load Arrow. It is written
last, so a folder without one is a build that did not finish.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from foundling.config.errors import DataError

MANIFEST_NAME = "manifest.json"
MANIFEST_SCHEMA = 1


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
    schema: int = MANIFEST_SCHEMA

    @property
    def digest(self) -> str:
        """Identity of the content: two manifests with one digest hold the same tokens."""
        return hashlib.sha256(self._body().encode()).hexdigest()

    @property
    def train_tokens(self) -> int:
        return sum(shard.tokens for shard in self.train)

    def _body(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def save(self, folder: Path) -> None:
        """Write manifest.json atomically, with its own digest inside."""
        data = {"digest": self.digest, **asdict(self)}
        temporary = folder / (MANIFEST_NAME + ".tmp")
        temporary.write_text(json.dumps(data, indent=2) + "\n")
        temporary.replace(folder / MANIFEST_NAME)

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read and check manifest.json; a missing, damaged or edited one is refused by name."""
        path = folder / MANIFEST_NAME
        if not path.is_file():
            raise DataError(
                f"{folder} holds no {MANIFEST_NAME}: the data set is missing or its build did not"
                f" finish; build it with `foundling data build ... -o {folder}`."
            )
        try:
            return cls._from_json(json.loads(path.read_text()), path)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{path} cannot be read ({error}); build the data set again.") from None

    @classmethod
    def _from_json(cls, data: dict[str, Any], path: Path) -> "Manifest":
        stated = data.pop("digest")
        if data["schema"] != MANIFEST_SCHEMA:
            raise DataError(
                f"{path} has schema {data['schema']} and this version reads {MANIFEST_SCHEMA};"
                " build the data set again."
            )
        for split in ("train", "val"):
            data[split] = tuple(ShardInfo(**shard) for shard in data[split])
        manifest = cls(**data)
        if manifest.digest != stated:
            raise DataError(f"{path} was changed after it was written; build the data set again.")
        return manifest


def packed_rows(folder: Path, manifest: Manifest, packing: str, seq_len: int) -> tuple[int, bool]:
    """Rows in one epoch without opening a shard, and whether that is exact: it is for concat and
    for a packing that was computed before; otherwise it is as if every row were full."""
    noted = _rows_note(folder, packing, seq_len)
    if packing != "concat" and noted.is_file():
        note = json.loads(noted.read_text())
        if note["digest"] == manifest.digest:
            return int(note["rows"]), True
    rows = sum(-(-shard.tokens // seq_len) for shard in manifest.train)
    return rows, packing == "concat"


def note_packed_rows(folder: Path, digest: str, packing: str, seq_len: int, rows: int) -> None:
    """Leave the number of rows where `plan` finds it, because only `data` can pack."""
    path = _rows_note(folder, packing, seq_len)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.write_text(json.dumps({"digest": digest, "rows": rows}) + "\n")
    temporary.replace(path)


def _rows_note(folder: Path, packing: str, seq_len: int) -> Path:
    return folder / f"rows-{packing}-{seq_len}.json"
