"""Which files a path, a folder or a pattern names."""

import difflib
import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path

from foundling.config.errors import DataError
from foundling.config.manifest import MANIFEST_NAME
from foundling.data.sources.opening import COMPRESSIONS, FORMATS, LocalFile, form_of

_NOTES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""What other tools write about the data beside it."""
KNOWN = f"{', '.join(FORMATS)} (also {', '.join(COMPRESSIONS)})"
"""Endings of files, as a sentence names them."""


def local_files(spec: str, names: Sequence[str] = ()) -> tuple[str, tuple[LocalFile, ...]]:
    """The name of what `spec` means and its files, in order of their names; `names` are others that
    it may have been meant for."""
    path = Path(spec)
    if path.is_dir():
        _refuse_built(path)
        root, paths = path, _in_folder(path)
    elif path.is_file():
        root, paths = path.parent, [path] if form_of(path.name) else []
    else:
        root, paths = _matching(spec)
    if not paths:
        close = difflib.get_close_matches(spec, names, n=1)
        if close:
            raise DataError(f"{spec} is no source; did you mean {close[0]}?")
        if path.is_dir():
            raise DataError(f"{spec} holds no file that can be read; give one with {KNOWN}.")
        raise DataError(
            f"{spec} is no source: give hamlet, hamlet:chat, a file, folder or pattern of"
            f" {KNOWN}, or a data set of a hub."
        )
    name = path.name or path.resolve().name
    files = (LocalFile(path.relative_to(root).as_posix(), os.fspath(path)) for path in paths)
    return name, tuple(files)


def _refuse_built(folder: Path) -> None:
    """A data set of ours holds tokens and no text: its files would be read as something else."""
    try:
        built = "token_dtype" in json.loads((folder / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError, TypeError):
        return
    if built:
        raise DataError(f"{folder} is a data set that is built already; give what it was made of.")


def _in_folder(folder: Path) -> list[Path]:
    """Every file of a known format; hidden ones and notes about the data are no data."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and form_of(path.name))
    return [
        path
        for path in found
        if path.name not in _NOTES
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    ]


def _matching(pattern: str) -> tuple[Path, list[Path]]:
    """Files that fit a pattern, and the folder that their names are relative to."""
    if not glob.has_magic(pattern):
        return Path(), []
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    paths = [path for path in paths if path.is_file()]
    for path in paths:
        if form_of(path.name) is None:
            raise DataError(
                f"{pattern} matches {path}, which is of no format that can be read; narrow the"
                " pattern."
            )
    parts = Path(pattern).parts
    fixed = next(n for n, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:fixed]), paths
