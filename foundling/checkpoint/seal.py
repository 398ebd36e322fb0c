"""manifest.json: what makes a checkpoint whole, written last and checked before anything is read.

No format notices a flipped bit by itself (torch.save, safetensors and DCP: 0 of 200), so every
file's size and sha256 stand in the manifest, the manifest carries its own digest, and its text must
be exactly what we would write: an edit is noticed even where JSON would not care. A folder may hold
the listed files and nothing else. Rejected: a checksum file beside each file, which does not notice
a missing pair or a file of another checkpoint.
"""

import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foundling.checkpoint.folders import step_of
from foundling.config import CheckpointError
from foundling.runtime import sha256_file

MANIFEST = "manifest.json"
META = "meta.json"
SCHEMA = 1
_FIELDS = {"schema", "step", "files", "digest"}


@dataclass(frozen=True)
class FileSeal:
    """Size and sha256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Seal:
    """A manifest: the step and the files that belong to it."""

    step: int
    files: dict[str, FileSeal]


def write_seal(folder: Path, seal: Seal) -> None:
    """Write the manifest; from now on the folder counts as whole."""
    write_durably(folder / MANIFEST, _render(seal).encode())


def write_durably(path: Path, content: bytes) -> FileSeal:
    """Write a new file and force it to the disk; the seal is of the bytes meant, not of those read
    back, so that a check compares two different things."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileSeal(len(content), hashlib.sha256(content).hexdigest())


def read_seal(path: Path) -> Seal:
    """The manifest of a checkpoint, known to be unedited; the files are not looked at."""
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist.")
    try:
        text = (path / MANIFEST).read_bytes().decode()
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} is torn: it has no {MANIFEST}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"checkpoint {path} has an unreadable {MANIFEST}: {error}.") from None
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} is not JSON.") from None
    if isinstance(tree, dict) and tree.get("schema") != SCHEMA:
        raise CheckpointError(
            f"checkpoint {path} has schema {tree.get('schema')!r} and this version reads {SCHEMA};"
            " use the version of foundling that wrote it."
        )
    seal = _parse(tree)
    if seal is None or _render(seal) != text:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {MANIFEST} was changed after it was written."
        )
    named = step_of(path)
    if named is not None and named != seal.step:
        raise CheckpointError(
            f"checkpoint {path} is of step {seal.step} by its {MANIFEST}; rename it to that step."
        )
    return seal


def verify(path: Path) -> None:
    """Raise CheckpointError unless every file of the checkpoint is there, bit for bit."""
    seal = read_seal(path)
    try:
        present = set(os.listdir(path)) - {MANIFEST}
        if missing := sorted(seal.files.keys() - present):
            raise CheckpointError(f"checkpoint {path} is damaged: {missing[0]} is missing.")
        if extra := sorted(present - seal.files.keys()):
            raise CheckpointError(
                f"checkpoint {path} is damaged: {extra[0]} does not belong to it; move it away."
            )
        for name, expected in seal.files.items():
            check_file(path, name, expected)
    except OSError as error:
        # Another process may be deleting it, or the disk may be failing: not whole either way.
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}.") from None


def check_file(path: Path, name: str, expected: FileSeal) -> None:
    """Compare one file with its seal; a link is refused, since its target is not ours to trust."""
    status = os.lstat(path / name)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"checkpoint {path} is damaged: {name} is not a plain file.")
    if status.st_size != expected.size:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {name} has {status.st_size} bytes, not {expected.size}."
        )
    if sha256_file(path / name) != expected.sha256:
        raise CheckpointError(f"checkpoint {path} is damaged: {name} fails its checksum.")


def is_whole(path: Path) -> bool:
    """Whether `verify` passes."""
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def _render(seal: Seal) -> str:
    files = {name: asdict(seal.files[name]) for name in sorted(seal.files)}
    body: dict[str, Any] = {"schema": SCHEMA, "step": seal.step, "files": files}
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, "digest": digest}, indent=2) + "\n"


def _parse(tree: Any) -> Seal | None:
    """A seal if the JSON has its form; comparing with `_render` then checks every value."""
    if not isinstance(tree, dict) or tree.keys() != _FIELDS:
        return None
    if type(tree["step"]) is not int or not isinstance(tree["files"], dict):
        return None
    files: dict[str, FileSeal] = {}
    for name, entry in tree["files"].items():
        if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"}:
            return None
        if type(entry["size"]) is not int or not isinstance(entry["sha256"], str):
            return None
        # A name with a folder in it could point outside the checkpoint.
        if name != os.path.basename(name) or name in ("", ".", "..", MANIFEST):
            return None
        files[name] = FileSeal(entry["size"], entry["sha256"])
    return Seal(tree["step"], files)
