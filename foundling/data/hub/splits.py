"""Which files of a repository make up a config and a split.

In this order: `configs` in the yaml head of its README; names of files and folders (data/train-
00000-of-00005.parquet, train/..., test.jsonl); and, where nothing readable is found that way, the
branch into which the hub converts data sets by itself (refs/convert/parquet). A choice that leaves
several possibilities is refused with their names: reading the test split for train would be worse.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from foundling.config.errors import DataError
from foundling.data.hub.download import NotThere, RemoteFile, Repo, fetch, offline, pin
from foundling.data.hub.recipes import HubUri

CONVERTED = "refs/convert/parquet"
_SHARDED = re.compile(r"(?:.*/)?(?:data/)?([\w.]+)-\d{5}-of-\d{5}[^/]*")
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
Readable = Callable[[str], bool]
Patterns = Mapping[str, Sequence[str]]
"""Patterns of paths by split."""


@dataclass(frozen=True)
class SplitFiles:
    """The files that were asked for, and the commit they are of."""

    repo: Repo
    files: tuple[RemoteFile, ...]


def choose(uri: HubUri, readable: Readable) -> SplitFiles:
    """The files that `uri` means; `readable` says by its name whether a file is data to us.

    No file at all is an answer too: then only the datasets library may know how to read it.
    """
    repo = pin(uri)
    if uri.path:
        files = tuple(_matching(repo, [uri.path], readable))
        if not files:
            raise DataError(f"{uri} matches no file that can be read; see {repo.page}/tree.")
        return SplitFiles(repo, files)
    configs, default = _readme_configs(uri, repo)
    if configs:
        config = _pick_config(uri, list(configs), default)
        split = _pick_split(uri, list(configs[config]))
        found = _matching(repo, configs[config][split], readable)
    else:
        found = _by_names(uri, [file for file in repo.tree() if readable(file.path)])
    choice = SplitFiles(repo, tuple(found))
    return choice if found else _converted(uri, choice)


def _readme_configs(uri: HubUri, repo: Repo) -> tuple[dict[str, Patterns], str]:
    """Configs of the README's yaml head: name to patterns by split, and which is the default."""
    from huggingface_hub import metadata_load

    readme = [f for f in repo.tree(recursive=False) if f.path == "README.md"]
    if not readme:
        return {}, ""
    path = fetch(repo, readme[0], remedy=f"foundling fetch {uri}")
    try:
        card = metadata_load(path)
    except (yaml.YAMLError, ValueError):
        card = None
    entries = (card or {}).get("configs")
    found: dict[str, Patterns] = {}
    default = "default"
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or not (patterns := _patterns(entry)):
            continue
        name = str(entry.get("config_name", "default"))
        found[name] = patterns
        default = name if entry.get("default") is True else default
    return found, default


def _patterns(entry: Mapping[str, Any]) -> dict[str, list[str]]:
    """`data_files` in its forms: one pattern, a list of them, or patterns by split."""
    stated = entry.get("data_files")
    folder = str(entry.get("data_dir") or "").strip("/")
    if stated is None:
        return {"train": [f"{folder}/**"]} if folder else {}
    result: dict[str, list[str]] = {}
    for item in stated if isinstance(stated, list) else [stated]:
        split, paths = "train", item
        if isinstance(item, dict):
            split, paths = str(item.get("split", "train")), item.get("path")
        for path in paths if isinstance(paths, list) else [paths]:
            if isinstance(path, str):
                full = f"{folder}/{path}" if folder else path
                result.setdefault(split, []).append(full.removeprefix("./"))
    return result


def _pick_config(uri: HubUri, names: Sequence[str], default: str = "default") -> str:
    """The config asked for, else the default, else the only one."""
    if uri.config in names:
        return uri.config
    if not uri.config and (len(names) == 1 or default in names):
        return default if default in names else names[0]
    asked = f"has no config {uri.config!r}" if uri.config else "has several configs"
    raise DataError(
        f"{uri} {asked}; write hf://datasets/{uri.repo}@CONFIG with one of {_some(names)}"
        " (a revision is written #REVISION)."
    )


def _pick_split(uri: HubUri, splits: Sequence[str]) -> str:
    if uri.split in splits:
        return uri.split
    if not uri.split and (len(splits) == 1 or "train" in splits):
        return "train" if "train" in splits else splits[0]
    asked = f"has no split {uri.split!r}" if uri.split else "has no split called train"
    example = replace(uri, split="SPLIT", revision="")
    raise DataError(f"{uri} {asked}; write {example} with one of {_some(splits)}.")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:12]) + (f" and {len(listed) - 12} more" if len(listed) > 12 else "")


def _matching(repo: Repo, patterns: Sequence[str], readable: Readable) -> list[RemoteFile]:
    """Files of the patterns in their order, each once; only the folders they name are listed."""
    from fsspec.utils import glob_translate

    found: dict[str, RemoteFile] = {}
    for pattern in patterns:
        try:
            match = re.compile(glob_translate(pattern))
        except ValueError as error:
            raise DataError(f"{pattern} is no pattern of files of {repo.name}: {error}.") from None
        inside = pattern.rstrip("/") + "/"
        for file in repo.tree(_fixed_folder(pattern)):
            wanted = match.match(file.path) or file.path.startswith(inside)
            if wanted and readable(file.path):
                found.setdefault(file.path, file)
    return list(found.values())


def _fixed_folder(pattern: str) -> str:
    """The folders of a pattern before its first wildcard."""
    words = pattern.split("/")
    fixed = next((i for i, word in enumerate(words) if re.search(r"[*?\[]", word)), None)
    return "/".join(words[: len(words) - 1 if fixed is None else fixed])


def _by_names(uri: HubUri, files: list[RemoteFile]) -> list[RemoteFile]:
    """Split by the names of files and folders; a config is a folder at the top or in data/."""
    if uri.config:
        roots = (f"{uri.config}/", f"data/{uri.config}/")
        files = [file for file in files if file.path.startswith(roots)]
    if not files:
        return []
    splits: dict[str, list[RemoteFile]] = {}
    for name_of in (_sharded_split, _folder_split, _file_split):
        splits = {}
        for file in files:
            if name := name_of(file.path):
                splits.setdefault(name, []).append(file)
        if splits:
            break
    splits = splits or {"train": files}
    return splits[_pick_split(uri, list(splits))]


def _sharded_split(path: str) -> str | None:
    match = _SHARDED.fullmatch(path)
    return match[1] if match else None


def _folder_split(path: str) -> str | None:
    return next((s for folder in path.split("/")[:-1] if (s := _word_split(folder))), None)


def _file_split(path: str) -> str | None:
    return _word_split(path.rpartition("/")[2])


def _word_split(text: str) -> str | None:
    words = [word for word in re.split(r"[-._ 0-9]+", text) if word]
    return next((s for s, known in _SPLITS.items() if any(w in known for w in words)), None)


def _converted(uri: HubUri, instead_of: SplitFiles) -> SplitFiles:
    """The hub's own Parquet copy, CONFIG/SPLIT/0000.parquet; one that is only a part is no copy."""
    if uri.revision:  # the copy is of main, and something else was asked for
        return instead_of
    try:
        repo = pin(replace(uri, revision=CONVERTED))
    except NotThere:
        return instead_of
    except DataError:
        if offline():
            return instead_of
        raise
    configs: dict[str, dict[str, list[RemoteFile]]] = {}
    for file in repo.tree():
        config, _, rest = file.path.partition("/")
        split, _, name = rest.partition("/")
        if name.endswith(".parquet") and not split.startswith("partial-"):
            configs.setdefault(config, {}).setdefault(split, []).append(file)
    if not configs:
        return instead_of
    config = _pick_config(uri, list(configs))
    split = _pick_split(uri, list(configs[config]))
    return SplitFiles(repo, tuple(configs[config][split]))
