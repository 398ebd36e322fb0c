"""manifest.json: what makes a checkpoint whole, written last and checked before anything is read.

No format notices a flipped bit by itself (torch.save, safetensors and DCP: 0 of 200), so every
file's size and sha256 stand in the manifest, the manifest carries its own digest, and its text must
be exactly what we would write: an edit is noticed even where JSON would not care. A folder may hold
the listed files and nothing else. Rejected: a checksum file for each file, which does not notice
a missing pair or a file of another checkpoint.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from foundling.checkpoint.folders import MANIFEST, step_of
from foundling.checkpoint.remote import Folder, FolderEntry, RemotePath, describe, look
from foundling.config.errors import CheckpointError
from foundling.runtime import files as files_module

META = "meta.json"
SCHEMA = 1
MAX_JSON_BYTES = 1 << 28
"""A manifest of a hundred thousand files has a tenth of it; what is larger is not ours."""
_FIELDS = {"schema", "step", "files", "digest"}
_PIECE = 1 << 20
HASHERS = 2
"""Files that are hashed at the same time."""


@dataclass(frozen=True)
class FileDigest:
    """Size and sha256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class CheckpointManifest:
    """A manifest: the step and the files that belong to it."""

    step: int
    files: dict[str, FileDigest]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files.values())


def write_manifest(folder: Folder, manifest: CheckpointManifest) -> None:
    """Write the manifest; from now on the folder counts as whole."""
    write_durably(folder / MANIFEST, _render(manifest).encode())


def write_durably(path: Folder, content: bytes) -> FileDigest:
    """Write a new file and force it to the disk; the digest is of the bytes meant, not of those
    read back, so that a check compares two different things."""
    files_module.failpoint("write")
    if isinstance(path, RemotePath):
        path.write_bytes(content)
    else:
        with open(path, "xb") as file:
            file.write(content)
            force_file(file)
    return FileDigest(len(content), hashlib.sha256(content).hexdigest())


def force_file(file: BinaryIO) -> None:
    """Make what was written to a local file survive a power cut."""
    file.flush()
    files_module.failpoint("fsync")
    os.fsync(file.fileno())


def read_manifest(path: Folder) -> CheckpointManifest:
    """The manifest of a checkpoint, known to be unedited; the files are not looked at."""
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist.")
    try:
        text = read_small(path, MANIFEST).decode()
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
    manifest = _parse(tree)
    if manifest is None or _render(manifest) != text:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {MANIFEST} was changed after it was written."
        )
    named = step_of(path)
    if named is not None and named != manifest.step:
        raise CheckpointError(
            f"checkpoint {path} is of step {manifest.step} by its {MANIFEST}; rename it to that"
            " step."
        )
    return manifest


def read_small(path: Folder, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
    """A file that is read whole: its size is looked at first, and a link is not followed."""
    entry = look(path / name)
    _check_plain(path, name, entry)
    if entry.size > limit:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {name} has {entry.size} bytes, and no such file of"
            " ours is that large."
        )
    return (path / name).read_bytes()


def verify(path: Folder, part: tuple[int, int] = (0, 1)) -> CheckpointManifest:
    """Raise CheckpointError unless every file of the checkpoint is there, bit for bit.

    With `part` (number, of how many) only this share of the files is hashed: the ranks of a job
    divide the work. Names and sizes are always compared for all.
    """
    manifest = read_manifest(path)
    try:
        check_sizes(path, manifest)
        mine = sorted(manifest.files)[part[0] :: part[1]]
        with ThreadPoolExecutor(HASHERS) as pool:
            # In this order, so that of two bad files the same one is always named.
            for _ in pool.map(lambda name: check_hash(path, name, manifest.files[name]), mine):
                pass
    except OSError as error:
        # Another process may be deleting it, or the disk may be failing: not whole either way.
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}.") from None
    return manifest


def check_sizes(path: Folder, manifest: CheckpointManifest) -> dict[str, FolderEntry]:
    """See that the listed files are there with their sizes, and nothing else; nothing is read."""
    present = describe(path)
    marker = present.pop(MANIFEST, None)
    if missing := sorted(manifest.files.keys() - present.keys()):
        raise CheckpointError(f"checkpoint {path} is damaged: {missing[0]} is missing.")
    if extra := sorted(present.keys() - manifest.files.keys()):
        raise CheckpointError(
            f"checkpoint {path} is damaged: {extra[0]} does not belong to it; move it away."
        )
    for name, expected in manifest.files.items():
        _check_plain(path, name, present[name])
        if present[name].size != expected.size:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} has {present[name].size} bytes, not"
                f" {expected.size}."
            )
    return present | ({MANIFEST: marker} if marker else {})


def check_hash(path: Folder, name: str, expected: FileDigest) -> None:
    """Read one file and compare it with the manifest."""
    if _sha256(path / name) != expected.sha256:
        raise CheckpointError(f"checkpoint {path} is damaged: {name} fails its checksum.")


def check_small(path: Folder, name: str, expected: FileDigest) -> bytes:
    """The content of a small file that agrees with the manifest."""
    content = read_small(path, name, max(expected.size, MAX_JSON_BYTES))
    if len(content) != expected.size:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {name} has {len(content)} bytes, not {expected.size}."
        )
    if hashlib.sha256(content).hexdigest() != expected.sha256:
        raise CheckpointError(f"checkpoint {path} is damaged: {name} fails its checksum.")
    return content


def load_meta(path: Folder) -> dict[str, Any]:
    """The JSON that was saved with the tensors, checked against its checksum."""
    manifest = read_manifest(path)
    try:
        meta = json.loads(check_small(path, META, manifest.files[META]))
    except (OSError, KeyError):
        raise CheckpointError(f"checkpoint {path} is damaged: {META} is missing.") from None
    except (ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict):
        raise CheckpointError(
            f"checkpoint {path} is not to be trusted: {META} is not JSON of ours."
        )
    return meta


def _check_plain(path: Folder, name: str, entry: FolderEntry) -> None:
    """A link is refused, since its target is not ours to trust."""
    if entry.kind != "file":
        raise CheckpointError(f"checkpoint {path} is damaged: {name} is not a plain file.")


def _sha256(path: Folder) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _render(manifest: CheckpointManifest) -> str:
    files = {name: asdict(manifest.files[name]) for name in sorted(manifest.files)}
    body: dict[str, Any] = {"schema": SCHEMA, "step": manifest.step, "files": files}
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, "digest": digest}, indent=2) + "\n"


def _parse(tree: Any) -> CheckpointManifest | None:
    """A manifest if the JSON has its form; comparing with `_render` then checks every value."""
    if not isinstance(tree, dict) or tree.keys() != _FIELDS:
        return None
    if type(tree["step"]) is not int or not isinstance(tree["files"], dict):
        return None
    files: dict[str, FileDigest] = {}
    for name, entry in tree["files"].items():
        if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"}:
            return None
        if type(entry["size"]) is not int or not isinstance(entry["sha256"], str):
            return None
        # A name with a folder in it could point outside the checkpoint.
        if name != os.path.basename(name) or name in ("", ".", "..", MANIFEST):
            return None
        files[name] = FileDigest(entry["size"], entry["sha256"])
    return CheckpointManifest(tree["step"], files)
