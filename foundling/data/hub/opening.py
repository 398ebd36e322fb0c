"""From a hub name to a source, and `fetch` of files before a machine goes offline."""

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from foundling.config.errors import ConfigError, DataError
from foundling.data.hub.download import (
    Progress,
    RemoteFile,
    Repo,
    check_room,
    fetch,
    here,
    offline,
    pin,
    quiet,
)
from foundling.data.hub.recipes import PREFIX, Recipe, merged, parse_uri, recipe_of
from foundling.data.hub.remote_source import HubFile, RemoteSource, library_source, remote_files
from foundling.data.hub.splits import choose
from foundling.data.hub.stack import StackSource
from foundling.data.readers.file_formats import form_of
from foundling.data.readers.source import ReadOptions, Source

PARALLEL = 8
"""Files on their way at once; a single connection seldom fills a line."""


def readable(name: str) -> bool:
    """Whether a file is data to us, by its name."""
    if name.rpartition("/")[2] in ("dataset_info.json", "dataset_infos.json", "config.json"):
        return False
    try:
        return form_of(name) is not None
    except DataError:
        return False


def open_remote(spec: str, options: ReadOptions, *, documents: int | None = None) -> Source:
    """The source that an address or a recipe's name means; little is fetched before it is read."""
    stream, options = options.stream, replace(options, stream=False)
    known = recipe_of(spec)
    if known is None and not spec.startswith(PREFIX):  # nothing is kept, with or without --stream
        path = spec.partition("?")[0].rstrip("/")
        name = path.rpartition("/")[2] or spec
        return RemoteSource(name, tuple(remote_files(spec, readable)), documents, options)
    recipe, uri = known or (None, parse_uri(spec))
    if uri.kind != "dataset":
        raise DataError(f"{spec} is a model; data is hf://datasets/{uri.repo}.")
    name = recipe.name if recipe else uri.name
    options = merged(recipe, options) if recipe else options
    choice = choose(uri, readable)
    if recipe and recipe.blobs:
        _refuse_for_code(name, options, documents)
        return StackSource(name, spec, choice.repo, choice.files, options, stream)
    if not choice.files:
        return library_source(name, uri, choice.repo, options, documents)
    files = tuple(
        HubFile(file.path, choice.repo, file, f"foundling fetch {spec} --shards {number}", stream)
        for number, file in enumerate(choice.files, 1)
    )
    return RemoteSource(name, files, documents, options)


def _refuse_for_code(name: str, options: ReadOptions, documents: int | None) -> None:
    if documents is not None:
        raise DataError(f"{name} cannot be limited by documents; limit its tokens.")
    if options.template or options.text != "content" or options.schema != "text":
        raise ConfigError(
            f"a document of {name} is a file of source code, so --text, --template and --schema"
            " have no effect; leave them out."
        )


# Fetching ahead, for machines that are offline later: how many files, how large, how many tokens.
#
# Tokens are estimates: of the recipe where its authors state a size, else of the bytes, by the
# usual compression of each format. A tenth more than asked for is fetched, so that an offline build
# seldom finds itself short; when it does, it says so.

MARGIN = 1.1
BYTES_PER_TOKEN = {".parquet": 2.4, ".gz": 1.7, ".zst": 1.6, ".xz": 1.4, ".bz2": 1.4}
PLAIN_BYTES_PER_TOKEN = 4.4
CHARS_PER_TOKEN_OF_CODE = 3.3
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "original/tokenizer.model",
)


@dataclass(frozen=True)
class Ahead:
    """What will be fetched."""

    spec: str
    repo: Repo
    files: tuple[RemoteFile, ...]
    of: int
    """Files there are."""
    tokens: float
    """About how many the files hold."""
    wanted: float | None
    """Tokens asked for, where they were."""
    recipe: Recipe | None = None

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(file.size for file in self.files)


def tokens_in(files: Sequence[RemoteFile], recipe: Recipe | None) -> float:
    """About how many tokens files hold."""
    if recipe is not None and recipe.tokens_per_file:
        return recipe.tokens_per_file * len(files)
    rates = [BYTES_PER_TOKEN.get(os.path.splitext(f.path)[1], PLAIN_BYTES_PER_TOKEN) for f in files]
    return sum(file.size / rate for file, rate in zip(files, rates, strict=True))


def plan_fetch(spec: str, *, shards: int | None = None, tokens: int | None = None) -> Ahead:
    """Which files the first `shards`, or about the first `tokens`, are (neither: all)."""
    if shards is not None and tokens is not None:
        raise ConfigError("--shards and --tokens exclude each other; give one of them.")
    known = recipe_of(spec)
    if known is None and not spec.startswith(PREFIX):
        raise DataError(
            f"{spec} is neither a recipe nor hf://datasets/...; `foundling data build --list` lists"
            " the recipes."
        )
    recipe, uri = known or (None, parse_uri(spec))
    choice = choose(uri, readable)
    files = choice.files
    if not files:
        raise DataError(f"{spec} has no file that can be fetched and read; stream it instead.")
    if shards is not None and shards > len(files):
        raise DataError(f"{spec} has {len(files)} files, not {shards}; give a smaller --shards.")
    if shards is not None:
        files = files[:shards]
    elif tokens is not None and not (recipe and recipe.blobs):
        counts = range(1, len(files) + 1)
        enough = (n for n in counts if tokens_in(files[:n], recipe) >= tokens * MARGIN)
        files = files[: next(enough, len(files))]
    return Ahead(
        spec=spec,
        repo=choice.repo,
        files=files,
        of=len(choice.files),
        tokens=tokens_in(files, recipe),
        wanted=tokens,
        recipe=recipe,
    )


def fetch_ahead(plan: Ahead, *, workers: int = PARALLEL, progress: Progress = quiet) -> Path:
    """Fetch it all; the folder of the repository."""
    home = plan.repo.home
    if not offline():
        home.mkdir(parents=True, exist_ok=True)
        missing = [file.size for file in plan.files if not here(plan.repo, file)]
        check_room(home, sum(missing), plan.spec)
    fetch_all(plan.repo, plan.files, workers=workers, progress=progress)
    return home


def fetch_all(
    repo: Repo,
    files: Sequence[RemoteFile],
    *,
    workers: int = PARALLEL,
    progress: Progress = quiet,
) -> list[Path]:
    """Many files at once, in the given order; the first failure stops the others."""
    stopped = threading.Event()

    def count(arrived: int) -> None:
        if stopped.is_set():
            raise _Stopped
        progress(arrived)

    with ThreadPoolExecutor(workers) as pool:
        try:
            waiting = [pool.submit(fetch, repo, file, progress=count) for file in files]
            return [future.result() for future in waiting]
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


class _Stopped(BaseException):
    """Another download failed; no error of its own, so nothing may take it for a bad network."""


def fetch_blobs(
    plan: Ahead, done: Callable[[str, int, float], None], where: tuple[str, ...] = ()
) -> float:
    """What the ids of a fetched recipe point at, until the tokens asked for are there; about how
    many there are.

    `done` hears of each piece: its name, documents and tokens so far. `where` are the filters that
    the build will have: what they leave out is not fetched.
    """
    source = open_remote(plan.spec, ReadOptions(where=where))
    assert isinstance(source, StackSource)
    wanted = {file.path for file in plan.files}
    documents, tokens = 0, 0.0
    for piece in source.pieces():
        if source.files[piece.number].path not in wanted:
            break
        for row in piece.rows():
            documents += 1
            tokens += len(row.text or "") / CHARS_PER_TOKEN_OF_CODE
        done(piece.name, documents, tokens)
        if plan.wanted is not None and tokens >= plan.wanted * MARGIN:
            break
    return tokens


def fetch_tokenizer(
    spec: str, output: Path | None, progress: Progress = quiet
) -> tuple[Path, list[str]]:
    """A model's tokenizer files: where they are now, and which there were."""
    if not spec.startswith(PREFIX) or "/" not in spec.removeprefix(PREFIX):
        raise DataError(f"{spec} is no model of a hub; write hf://OWNER/NAME[#revision].")
    uri = parse_uri(spec)
    if uri.kind != "model":
        raise DataError(f"{spec} is a data set; a tokenizer is hf://OWNER/NAME of a model.")
    repo = pin(uri)
    listed = repo.tree(recursive=False) + repo.tree("original")
    files = [file for file in listed if file.path in TOKENIZER_FILES]
    names = {file.path for file in files}
    if "tokenizer.model" in names:
        files = [file for file in files if file.path != "original/tokenizer.model"]
    if not names & {"tokenizer.json", "tokenizer.model", "vocab.json", "original/tokenizer.model"}:
        raise DataError(
            f"{spec} holds no tokenizer (no tokenizer.json, tokenizer.model, vocab.json)."
        )
    paths = fetch_all(repo, files, progress=progress)
    if output is None:
        return repo.home / "snapshots" / repo.commit, [file.path for file in files]
    for file, path in zip(files, paths, strict=True):
        _copy(path, output / Path(file.path).name)
    return output, [Path(file.path).name for file in files]


def _copy(source: Path, target: Path) -> None:
    """Copy a whole file; one that is there and differs is left alone."""
    if target.exists():
        if target.read_bytes() != source.read_bytes():
            raise DataError(f"{target} is there already and differs; give another folder.")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        shutil.copyfile(source, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
