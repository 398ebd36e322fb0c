"""Where the numbers of a model's tensors lie in its files, found without torch.

Quick guesses, and none of them is believed: who takes what was copied by them compares each place,
kind and shape with what the readers say that check everything. Whatever is not as usual is
unfit, and is left to those.
"""

import json
import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foundling.runtime.archives import BYTES, LARGEST
from foundling.runtime.inert_pickle import InertUnpickler
from foundling.runtime.kernel_copy import Span

MAX_HEADER = 100 << 20
SIGN = "model.embed_tokens.weight"
"""The name of the embedding in Hugging Face's layout whose tensors lie as ours."""
OURS = "model."
"""Before the names of weights in our checkpoints."""
OUR_SIGN, TURNED_SIGN = "model.embed.weight", "model.positions.weight"
"""A name that all our models have; and one of those whose matrices Hugging Face turns round."""
KINDS = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
}
"""safetensors' names of torch's types; the second row is of what lies beside weights."""
MAX_INDEX = 16 << 20
"""Bytes of the index of a checkpoint whose tensors lie whole; it is read by Python alone."""
MAX_AT_ONCE = 256 << 10
"""... and of one that is read before anything else is begun, in a tenth of a second. Where ranks
saved their parts it has more, and then every file has weights."""
MOST_SIDES = 8
ARCHIVE_HEAD = 4096
"""Bytes of an archive of torch's that reach beyond the head of its numbers."""


class Payload(NamedTuple):
    """The numbers of one tensor."""

    span: Span
    kind: str
    shape: tuple[int, ...]
    name: str


class UnfitError(Exception):
    """What is there cannot be packed; the usual way says whether something is wrong with it."""


def folder_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder; none of anything else."""
    if (folder / "run.json").exists() or not (folder / "config.json").is_file():
        return []
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        shards = json.loads(index.read_text())["weight_map"].values()
        files = [folder / name for name in sorted(set(map(str, shards)))]
        return files if all(file.parent == folder and file.is_file() for file in files) else []
    return [single] if single.is_file() else []


def folder_payloads(files: Sequence[Path]) -> list[Payload]:
    """Of safetensors files, in their order."""
    found = [payload for file in files for payload in _of_file(file)]
    if SIGN not in {payload.name for payload in found}:
        raise UnfitError
    return found


def _of_file(path: Path) -> list[Payload]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER:
            raise UnfitError
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        begin, end = map(int, entry["data_offsets"])
        shape = tuple(map(int, entry["shape"]))
        payload = _payload(path, 8 + length + begin, entry["dtype"], shape, name)
        if not name.endswith((".weight", ".bias")) or end - begin != payload.span.size:
            raise UnfitError
        found.append(payload)
    return sorted(found)


def checkpoint_payloads(folder: Path) -> list[Payload]:
    """Of the weights in a checkpoint of ours, in the order of its files."""
    fields = _index(folder)
    entries = {
        name: entry.state
        for name, entry in fields["state_dict_metadata"].items()
        if name.startswith(OURS)
    }
    if OUR_SIGN not in entries or TURNED_SIGN in entries:
        raise UnfitError
    found = []
    for key, info in fields["storage_data"].items():
        name, spot = key.state["fqn"], info.state
        if name not in entries:
            continue
        if len(entries[name]["chunks"]) != 1 or "/" in spot["relative_path"]:
            raise UnfitError
        path = folder / spot["relative_path"]
        kind, shape = entries[name]["properties"].state[0], tuple(entries[name]["size"])
        found.append(_payload(path, _numbers(path, spot["offset"]), kind, shape, name))
    return sorted(found)


def weight_files(files: Sequence[Path]) -> list[Path]:
    """Of a checkpoint's files, those that whoever reads its weights will have hashed."""
    try:
        found: dict[str, bool] = {}
        for key, info in _index(files[0].parent, MAX_AT_ONCE)["storage_data"].items():
            file, is_weight = info.state["relative_path"], key.state["fqn"].startswith(OURS)
            found[file] = found.get(file, False) or is_weight
        return [file for file in files if found.get(file.name, True)]
    except Exception:  # nothing is known of it yet, and nothing is lost by all
        return list(files)


def _index(folder: Path, most: int = MAX_INDEX) -> dict[str, Any]:
    """The fields of a checkpoint's index, which nobody has checked."""
    file = folder / ".metadata"
    if _plain_size(file) > most:
        raise UnfitError
    fields: dict[str, Any] = InertUnpickler(file.read_bytes(), KINDS).load().state
    return fields


def _payload(path: Path, start: int, kind: str, shape: tuple[int, ...], name: str) -> Payload:
    # Nobody has checked what stands there: a product of anything can take all memory.
    if len(shape) > MOST_SIDES or not all(type(n) is int and 0 < n <= LARGEST for n in shape):
        raise UnfitError
    size = math.prod(shape) * BYTES.get(kind, 0)
    if not 0 < size <= LARGEST:
        raise UnfitError
    if start % BYTES[kind]:
        # As DCP's own writer leaves them: they cannot be mapped as numbers, and nobody will ask for
        # this span.
        raise UnfitError
    return Payload(Span(path, start, size), kind, shape, name)


def _numbers(path: Path, start: int) -> int:
    """Where the numbers begin in the archive of a tensor, by the head of their record."""
    _plain_size(path)
    with open(path, "rb", buffering=0) as file:
        head = os.pread(file.fileno(), ARCHIVE_HEAD, start)
    record = head.rfind(b"PK\3\4", 0, head.index(b"/data/0"))
    if record < 0:
        raise UnfitError
    lengths = head[record + 26 : record + 30]
    names, more = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
    return start + record + 30 + names + more


def _plain_size(path: Path) -> int:
    """Bytes of a file; a link is not followed, and who opens a pipe waits for ever."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise UnfitError
    return found.st_size
