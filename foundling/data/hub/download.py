"""Downloads from the hub by huggingface_hub: pinned, tried again, compared with their checksums.

huggingface_hub does every transfer (with Xet where that is installed) and keeps it in its cache.
Ours is what it lacks: it gives up on a reset connection and on 5xx, and never compares the bytes of
a plain download with their checksum.
"""

import contextlib
import hashlib
import json
import logging
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, cast
from urllib.parse import quote

from foundling.config.errors import DataError
from foundling.data.hub.recipes import HubUri
from foundling.runtime.console import console, warn
from foundling.runtime.files import DISK_FULL, write_text_atomic

TRIES = 5
"""Of one request or file, each with the tries that huggingface_hub makes by itself."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
LONGEST_ASKED_S = 3600.0
"""A server that asks for more than this is not waited for."""
_WORTH_SAYING = 200_000_000
"""A build that waits for a larger file says what it waits for."""
_AS_IT_IS = {"Accept-Encoding": "identity"}
"""A compressed body has other lengths and offsets than the file."""
_ABANDONED_S = 86_400.0
"""A part of a file that has not grown for so long belongs to a killed download."""

Progress = Callable[[int], None]
"""Called with bytes that arrived (negative when some have to be fetched again)."""
T = TypeVar("T")


class NotThere(DataError):  # noqa: N818 - an answer that callers may expect
    """A repository, revision or file that does not exist; callers may have another idea."""


def quiet(count: int) -> None:
    """No progress shown."""


# Errors, and trying again.


def network_errors() -> tuple[type[Exception], ...]:
    """What a connection can end in. The hub's library has changed its HTTP client more than once;
    the base of that client's errors is always the first base of its own."""
    from huggingface_hub.errors import HfHubHTTPError

    client: type[Exception] = HfHubHTTPError.__bases__[0]
    return (client, OSError)


def status_of(error: BaseException) -> int:
    """The HTTP status an error carries; 0 without one."""
    response = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0) or 0)


def is_transient(error: BaseException) -> bool:
    """Whether another try may succeed: cut, reset, timed out, too many requests, server trouble."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled | FileNotFoundError | PermissionError):
        return False
    status = status_of(error)
    if status == 0:
        return getattr(error, "errno", None) not in DISK_FULL
    return status in (408, 425, 429) or status >= 500


def asked_wait_s(error: BaseException) -> float:
    """Seconds the server asks to wait, by Retry-After or the hub's RateLimit; 0 if it does not."""
    headers: Any = getattr(getattr(error, "response", None), "headers", {})
    after = headers.get("Retry-After", "").strip()
    if after.isdigit():
        return float(after)
    limit = re.search(r";\s*r=0\s*;\s*t=(\d+)", headers.get("RateLimit", ""))
    return float(limit[1]) if limit else 0.0


def explain(error: BaseException, what: str, page: str) -> DataError:
    """One sentence for an error that another try will not cure; `page` is where `what` lives."""
    from huggingface_hub import errors

    status = status_of(error)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return DataError(
            f"{what} is gated ({status}): accept its licence at {page} and set HF_TOKEN to a token"
            " of that account."
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return NotThere(
            f"{what} is not at {page} or needs permission ({status}): check the name, and if it is"
            " private or gated, accept its licence there and set HF_TOKEN."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return NotThere(f"{what} has no such revision; see {page} for those it has.")
    if isinstance(error, PermissionError):
        return DataError(f"{what} may not be read ({brief(error)}); check your credentials for it.")
    if status == 404 or isinstance(error, FileNotFoundError):
        return NotThere(f"{what} is not at {page}; check the name.")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return DataError(f"{what} is not here and HF_HUB_OFFLINE is set; unset it to fetch.")
    if getattr(error, "errno", None) in DISK_FULL:
        return DataError(
            f"{what} cannot be written ({cast(OSError, error).strerror}); make room, or set"
            " HF_HUB_CACHE (with --stream: TMPDIR) to a larger disk."
        )
    return DataError(f"{what} could not be fetched from {page} ({brief(error)}); try again later.")


def brief(error: BaseException) -> str:
    """An error in a few words: addresses may be signed, so they are left out."""
    if status := status_of(error):
        return f"status {status}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"https?://\S+", "the server", lines[0])[:120]


def insist(
    attempt: Callable[[], T],
    what: str,
    page: str,
    *,
    reached: Callable[[], int] = lambda: 0,
    progress: Progress = quiet,
) -> T:
    """Call `attempt` until it succeeds, waiting as the server asks; one sentence when it cannot.

    `reached` says how far it has come: a try that got further than any before begins the count of
    tries anew. `progress` is called while waiting and may raise, to give up.
    """
    _hush_library()
    failures, best = 0, reached()
    while True:
        try:
            return attempt()
        except network_errors() as error:
            if not is_transient(error):
                raise explain(error, what, page) from None
            failures = 1 if reached() > best else failures + 1
            best = max(best, reached())
            longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (failures - 1))
            # Spread, so that many clients do not come back together.
            wait = asked_wait_s(error) or longest * random.uniform(0.5, 1.0)
            if failures >= TRIES or wait > LONGEST_ASKED_S:
                raise DataError(
                    f"{what} could not be fetched from {page} in {failures} tries (last:"
                    f" {brief(error)}); files that arrived whole are kept, so run the same command"
                    " again later."
                ) from None
            if wait >= 5:  # shorter ones pass unnoticed and need no words
                warn(f"{what}: {brief(error)}; trying again in {wait:.0f} s.")
            pause(wait, progress)


def pause(seconds: float, progress: Progress) -> None:
    """Sleep, looking up every second."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        progress(0)
        time.sleep(min(left, 1.0))


def _hush_library() -> None:
    """We speak of retries ourselves: the library's warnings show signed addresses."""
    _utils()  # which sets the level that it wants
    logger = logging.getLogger("huggingface_hub")
    if logger.level == logging.WARNING:  # the user did not choose another
        logger.setLevel(logging.ERROR)


# Requests by the library's own client: its pool, proxies, certificates and offline switch.


def _utils() -> Any:
    """The library's helpers, of which it gives no types."""
    import huggingface_hub.utils

    return huggingface_hub.utils


def hub_headers() -> dict[str, str]:
    """Our name, and the user's token from HF_TOKEN or the hub's login."""
    return dict(_utils().build_hf_headers(library_name="foundling"))


@contextlib.contextmanager
def ask(url: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Iterator[Any]:
    """A request's answer, whose body is read by need; a refusal is raised."""
    from huggingface_hub import constants, get_session

    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    headers = {**(headers or {}), **_AS_IT_IS}
    with get_session().stream(method, url, headers=headers, timeout=timeout) as response:
        if response.status_code >= 400:
            response.read()
        _utils().hf_raise_for_status(response)
        yield response


def _progress_bar(count: Progress) -> Any:
    """A class of progress bars for the library: they draw nothing and tell `count` instead."""
    library_bar: Any = _utils().tqdm

    class Bar(library_bar):  # type: ignore[misc]
        monitor_interval = 0  # no thread

        def __init__(self, *_: Any, initial: int = 0, total: int | None = None, **__: Any) -> None:
            super().__init__(disable=True, total=total)
            count(initial)

        def update(self, n: int = 1) -> None:
            count(n)

        def update_transfer(self, n: int) -> None:
            """Xet counts the network's bytes beside those of the file, which are enough."""

        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None: ...

    return Bar


def download(
    url: str,
    out: BinaryIO,
    size: int | None,
    what: str,
    page: str,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Fill `out` up to `size` bytes, going on behind what it already holds."""
    from huggingface_hub.file_download import http_get

    def attempt() -> None:
        have = out.seek(0, 2)
        if size is not None and have > size:
            have = out.truncate(0)
        if size is None or have < size:
            out.seek(have)
            asked = {**(headers or {}), **_AS_IT_IS}
            try:
                http_get(url, out, resume_size=have, headers=asked, tqdm_class=_progress_bar(quiet))
            except network_errors() as error:
                if status_of(error) != 416:
                    raise
                # A body without a length was cut at its very end, or is another one by now.
                out.truncate(0)
                raise OSError("nothing behind what has arrived") from None
        if size is not None and out.seek(0, 2) != size:
            raise OSError(f"{out.tell():,} of {size:,} bytes")

    insist(attempt, what, page, reached=lambda: out.seek(0, 2))


def spooled(size: int | None, what: str, fill: Callable[[BinaryIO], None]) -> BinaryIO:
    """What `fill` writes, from its first byte: a file without a name, so that nothing of the raw
    source is left behind, not even by a kill."""
    check_room(Path(tempfile.gettempdir()), size or 0, what)
    with contextlib.ExitStack() as undo:
        out = cast(BinaryIO, undo.enter_context(tempfile.TemporaryFile(prefix="foundling-")))
        fill(out)
        out.seek(0)
        undo.pop_all()
    return out


def check_room(folder: Path, needed: int, what: str) -> None:
    """Say that a disk is too small before it is full."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{what} needs {needed / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} free; make room,"
            " or set HF_HUB_CACHE (with --stream: TMPDIR) to a larger disk."
        )


# The hub (or HF_ENDPOINT) and its listings of repositories.
#
# Listings are kept in the repository's folder of the hub's own cache, so that a machine without
# network finds later what was fetched, by the same name.
#
# HF_HUB_CACHE/datasets--OWNER--NAME
#     /blobs, snapshots         the files, as every tool of the hub finds them
#     /foundling/refs, trees    the hub's listings
#     /foundling/checked        which files were compared, and when they were changed


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub lists it."""

    path: str
    size: int
    checksum: str
    """sha256 of the content for large files (64 digits), else git's sha1 of it (40 digits)."""

    @property
    def identity(self) -> str:
        return f"{self.path} {self.size} {self.checksum}"


@dataclass(frozen=True)
class Repo:
    """One repository at one commit; names never move once this is made."""

    kind: Literal["dataset", "model"]
    name: str
    commit: str

    @property
    def home(self) -> Path:
        """Its folder in the hub's cache."""
        from huggingface_hub import constants

        folder = f"{self.kind}s--{self.name.replace('/', '--')}"
        return Path(constants.HF_HUB_CACHE).expanduser() / folder

    @property
    def page(self) -> str:
        """Where a person looks, and accepts a licence."""
        from huggingface_hub import constants

        kind = "datasets/" if self.kind == "dataset" else ""
        return f"{constants.ENDPOINT.rstrip('/')}/{kind}{self.name}"

    def url(self, path: str) -> str:
        """Where a file of it is."""
        return f"{self.page}/resolve/{self.commit}/{quote(path)}"

    def tree(self, under: str = "", *, recursive: bool = True) -> list[RemoteFile]:
        """Files of a folder (empty: of the repository), in order of their names."""
        name = quote(under, safe="") + ("" if recursive else ",top")
        note = self.home / "foundling" / "trees" / self.commit / f"{name or ',all'}.json"
        if note.is_file():  # a commit never changes
            return [RemoteFile(*entry) for entry in json.loads(note.read_text())]
        if offline():
            raise DataError(
                f"the files of {self.name} were never listed here and HF_HUB_OFFLINE is set; run"
                " `foundling fetch` where there is network, with this cache."
            )

        def attempt() -> list[RemoteFile]:
            entries = _api().list_repo_tree(
                self.name,
                under or None,
                recursive=recursive,
                revision=self.commit,
                repo_type=self.kind,
            )
            # Folders are listed too, and have no blob.
            return [
                RemoteFile(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
                for entry in entries
                if hasattr(entry, "blob_id")
            ]

        try:
            files = insist(attempt, self.name, self.page)
        except NotThere:
            if not under:
                raise
            files = []
        files.sort(key=lambda file: file.path)
        _keep(note, json.dumps([[f.path, f.size, f.checksum] for f in files]))
        return files


def offline() -> bool:
    """HF_HUB_OFFLINE: nothing is asked, only what was fetched is used."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def pin(uri: HubUri) -> Repo:
    """The repository at the commit its revision means now (offline: meant when last asked)."""
    if re.fullmatch(r"[0-9a-f]{40}", uri.revision):
        return Repo(uri.kind, uri.repo, uri.revision)
    loose = Repo(uri.kind, uri.repo, "")
    revision = uri.revision or "main"
    note = loose.home / "foundling" / "refs" / quote(revision, safe="")
    if offline():
        if not note.is_file():
            raise DataError(
                f"{uri} was never fetched and HF_HUB_OFFLINE is set; run `foundling fetch {uri}`"
                " where there is network, with this cache."
            )
        return replace(loose, commit=note.read_text().strip())

    def attempt() -> str:
        info = _api().repo_info(uri.repo, repo_type=uri.kind, revision=revision, expand=["sha"])
        return str(info.sha)

    repo = replace(loose, commit=insist(attempt, str(uri), loose.page))
    _keep(note, repo.commit)
    return repo


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="foundling")


def _keep(note: Path, text: str) -> None:
    """Remember an answer; a cache that is read-only is still good for reading."""
    with contextlib.suppress(OSError):
        if not note.is_file() or note.read_text() != text:
            write_text_atomic(note, text)


# Files of the hub, here: compared with their checksum, kept in its cache.
#
# A file is used only after its content was hashed: sha256 for large files, git's sha1 for small
# ones, both as the hub lists them. A body that arrives damaged is fetched once more and then
# refused; a damaged file in the cache is replaced, or refused where there is no network.


def fetch(repo: Repo, file: RemoteFile, *, remedy: str = "", progress: Progress = quiet) -> Path:
    """The file's checked local path, downloaded if it is not here.

    `remedy` is the command that an offline user is told to run elsewhere.
    """
    what, home = f"{file.path} of {repo.name}", repo.home
    places = here(repo, file)
    good = [place for place in places if _is_right(repo, place, file)]
    if good:
        progress(file.size)
        return _named(repo, file, good[0], places)
    if offline():
        state = f"damaged in {home}" if places else "not here"
        raise DataError(
            f"{what} is {state} and HF_HUB_OFFLINE is set; run `{remedy}` where there is network,"
            " with this cache."
        )
    home.mkdir(parents=True, exist_ok=True)
    _drop_abandoned(home, file)
    check_room(home, file.size, what)
    if progress is quiet and file.size > _WORTH_SAYING:
        console(stderr=True).print(f"fetching {what}, {file.size / 1e9:.1f} GB")
    for again in (bool(places), True):
        path = _transfer(repo, file, what, again, progress)
        if _is_right(repo, path, file):
            return path
        progress(-file.size)
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    raise _damaged(what, file)


def _named(repo: Repo, file: RemoteFile, good: Path, places: Sequence[Path]) -> Path:
    """The content by the file's name at this commit, as the library would link it; by its checksum
    where the cache cannot be written. Nothing is asked of the network."""
    name = repo.home / "snapshots" / repo.commit / file.path
    if good == name:
        return good
    try:
        if name in places:  # and damaged
            name.unlink()
        name.parent.mkdir(parents=True, exist_ok=True)
        name.symlink_to(os.path.relpath(good, name.parent))
    except OSError:  # or another process was quicker
        return good
    return name


def _drop_abandoned(home: Path, file: RemoteFile) -> None:
    """Remove what downloads of this file left that were killed: the library begins a new one."""
    for part in (home / "blobs").glob(f"{file.checksum}.*incomplete"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _ABANDONED_S:
                part.unlink()


def _transfer(repo: Repo, file: RemoteFile, what: str, again: bool, progress: Progress) -> Path:
    """Where the library put the file, which it fetches `again` even if it has it."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    arrived = 0

    def count(part: int) -> None:
        nonlocal arrived
        arrived += part
        progress(part)

    def attempt() -> str:
        count(-arrived)
        try:
            return hf_hub_download(
                repo.name,
                file.path,
                repo_type=repo.kind,
                revision=repo.commit,
                library_name="foundling",
                force_download=again,
                tqdm_class=_progress_bar(count),
            )
        except (LocalEntryNotFoundError, ValueError) as error:  # around what really happened
            raise error.__cause__ or DataError(f"{what} cannot be fetched: {error}") from None
        except RuntimeError as error:  # Xet's, for damage, a broken task and much else
            raise OSError(brief(error)) from error
        except PermissionError as error:
            if error.filename is None:  # Xet's, for a signed address that has expired
                raise OSError(brief(error)) from error
            raise DataError(
                f"{error.filename} may not be written; set HF_HUB_CACHE to a folder of yours."
            ) from None

    path = insist(attempt, what, repo.page, reached=lambda: arrived, progress=progress)
    progress(file.size - arrived)
    return Path(path)


def spool(repo: Repo, file: RemoteFile) -> BinaryIO:
    """The file's checked content without a name on disk, for builds that store no raw source.

    Chosen over reading ranges as they are needed: a checksum is over the whole file, and a stream
    that cannot be checked could fool its owner. It takes the room of one file a worker in TMPDIR.
    """
    what, page = f"{file.path} of {repo.name}", repo.page
    if offline():
        raise DataError(
            f"{what} cannot be streamed while HF_HUB_OFFLINE is set; leave --stream out to use what"
            " was fetched."
        )

    def fill(out: BinaryIO) -> None:
        for _ in range(2):
            url = repo.url(file.path)
            download(url, out, file.size, what, page, hub_headers())
            if checksum_of(out, file) == file.checksum:
                return
            out.truncate(0)
        raise _damaged(what, file)

    return spooled(file.size, what, fill)


def _damaged(what: str, file: RemoteFile) -> DataError:
    return DataError(
        f"{what} arrived damaged twice: its checksum is not {file.checksum[:12]}... as the hub"
        " says; something between here and there changes bytes, so nothing was kept."
    )


def checksum_of(stream: BinaryIO, file: RemoteFile) -> str:
    """The content's checksum, of the kind that the hub lists for this file."""
    digest = hashlib.sha256()
    if len(file.checksum) == 40:
        size = stream.seek(0, 2)
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    stream.seek(0)
    return hashlib.file_digest(cast(Any, stream), lambda: digest).hexdigest()


def here(repo: Repo, file: RemoteFile) -> list[Path]:
    """Where the file is: by its name, or by its checksum where another commit brought it."""
    home = repo.home
    places = (home / "snapshots" / repo.commit / file.path, home / "blobs" / file.checksum)
    return [place for place in places if place.is_file()]


def _is_right(repo: Repo, path: Path, file: RemoteFile) -> bool:
    """Whether a file has the listed content: hashed once, and again when it was touched. Each of
    the many processes that read pieces of it would hash it, over a tenth of a build."""
    note = repo.home / "foundling" / "checked" / file.checksum
    try:
        stat = path.stat()
        stamp = f"{stat.st_size} bytes, changed {stat.st_mtime_ns}"
        if stat.st_size != file.size:
            return False
        if note.is_file() and note.read_text() == stamp:
            return True
        with open(path, "rb") as stream:
            if checksum_of(stream, file) != file.checksum:
                return False
    except FileNotFoundError:
        return False
    _keep(note, stamp)
    return True
