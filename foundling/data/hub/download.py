"""Downloads from the hub: listing, transfer with retries, ranges, checksums, room on the disk."""

import atexit
import contextlib
import fcntl
import hashlib
import io
import json
import os
import random
import re
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, TypeVar, cast
from urllib.parse import quote

from foundling.config.errors import DataError
from foundling.data.hub.recipes import HubUri
from foundling.runtime.console import console
from foundling.runtime.files import write_text_atomic

TRANSIENT = (408, 425, 429)
"""Besides 5xx: what another try may cure."""


class NotThere(DataError):  # noqa: N818 - an answer that callers may expect
    """A repository, revision or file that does not exist; callers may have another idea."""


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
    return status == 0 or status in TRANSIENT or status >= 500


def asked_wait_s(error: BaseException) -> float | None:
    """Seconds the server asks to wait: Retry-After as seconds or date, or the hub's RateLimit."""
    headers: Any = getattr(getattr(error, "response", None), "headers", None)
    if headers is None:
        return None
    if after := (headers.get("Retry-After") or "").strip():
        if after.isdigit():
            return float(after)
        try:
            return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
        except ValueError:
            return None
    limit = re.search(r";\s*r=0\s*;\s*t=(\d+)", headers.get("RateLimit") or "")
    return float(limit[1]) if limit else None


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
    return DataError(f"{what} could not be fetched from {page} ({brief(error)}); try again later.")


def brief(error: BaseException) -> str:
    """An error in a few words: addresses may be signed, so they are left out."""
    if status := status_of(error):
        return f"status {status}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"https?://\S+", "the server", lines[0])[:120]


# Bytes over HTTP into an open file: every byte, or a sentence.
#
# What huggingface_hub's own download lacks, measured against a server that misbehaves (2.4): it
# keeps nothing of a download that failed, so that the next try begins at zero; it gives up at once
# on a reset connection and on 5xx; after a cut it goes back to the last 10 MB; and it never
# compares the bytes with their checksum. So the loop is ours; the client (pool, proxies,
# certificates, offline switch) and the token are the hub's.

Progress = Callable[[int], None]
"""Called with bytes that arrived (negative when some have to be fetched again)."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often and how long to try again; a try that brought new bytes does not count."""

    tries: int = 8
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    longest_asked_s: float = 3600.0
    """A server that asks for more than this is not waited for."""

    def wait_s(self, failures: int, error: BaseException) -> float:
        """What the server asks for; else twice as long each time, spread so that many clients do
        not come back together."""
        asked = asked_wait_s(error)
        if asked is not None:
            return asked
        wait = min(self.longest_wait_s, self.first_wait_s * 2.0 ** (failures - 1))
        return wait * random.uniform(0.5, 1.0)


class Interrupted(Exception):  # noqa: N818 - never seen by a user
    """The body ended before the promised length."""


def insist(
    attempt: Callable[[], T],
    *,
    what: str,
    page: str,
    patience: Patience,
    gained: Callable[[], bool] = lambda: False,
    tick: Callable[[], None] = lambda: None,
) -> T:
    """Call `attempt` until it succeeds, waiting as the server asks; one sentence when it cannot.

    `gained` says whether the last try got further than any before; `tick` is called while waiting
    and may raise, to give up.
    """
    failures = 0
    while True:
        try:
            return attempt()
        except _passing() as error:
            if not is_transient(error):
                raise explain(error, what, page) from None
            failures = 1 if gained() else failures + 1
            wait = patience.wait_s(failures, error)
            if failures >= patience.tries or wait > patience.longest_asked_s:
                raise DataError(
                    f"{what} could not be fetched from {page} in {failures} tries (last:"
                    f" {brief(error)}); what arrived is kept, so run the same command again later."
                ) from None
            _warn_of_retry(what, wait, error)
            pause(wait, tick)


def pause(seconds: float, tick: Callable[[], None]) -> None:
    """Sleep, looking up every second."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        tick()
        time.sleep(min(left, 1.0))


def _passing() -> tuple[type[Exception], ...]:
    return (*network_errors(), Interrupted)


def _warn_of_retry(what: str, wait: float, error: BaseException) -> None:
    from foundling.runtime.console import warn

    if wait >= 5:  # shorter ones pass unnoticed and need no words
        warn(f"{what}: {brief(error)}; trying again in {wait:.0f} s.")


def download(
    url: str,
    out: IO[bytes],
    *,
    size: int | None,
    what: str,
    page: str,
    headers: Mapping[str, str] | None = None,
    patience: Patience | None = None,
    progress: Progress = lambda count: None,
) -> None:
    """Fill `out` up to `size` bytes, going on behind what it already holds."""
    patience = patience or Patience()
    best = out.seek(0, 2)

    def gained() -> bool:
        # Compared with the furthest ever: a server that ignores ranges and always breaks off at
        # the same place must not keep us here for ever.
        nonlocal best
        before, best = best, max(best, out.seek(0, 2))
        return best > before

    def attempt() -> None:
        have = out.seek(0, 2)
        if size is not None and have > size:
            progress(-have)
            out.truncate(0)
            have = 0
        if size is None or have < size:
            _get(url, out, have, size, headers or {}, progress)
        if size is not None and out.seek(0, 2) < size:
            raise Interrupted(f"{out.tell():,} of {size:,} bytes")

    insist(
        attempt,
        what=what,
        page=page,
        patience=patience,
        gained=gained,
        tick=lambda: progress(0),
    )


def ask(url: str, headers: Mapping[str, str], method: str = "GET") -> Any:
    """A request by the hub's own client: a context of the answer, whose body is read by need."""
    from huggingface_hub import constants, get_session

    # identity: a compressed body has other lengths and offsets than the file.
    asked = {**headers, "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    return get_session().stream(method, url, headers=asked, timeout=timeout)


def check(response: Any) -> None:
    """Raise what the hub's library makes of a refusal."""
    import huggingface_hub.utils

    if response.status_code >= 400:
        response.read()
    utils: Any = huggingface_hub.utils
    utils.hf_raise_for_status(response)


def _get(
    url: str,
    out: IO[bytes],
    have: int,
    size: int | None,
    headers: Mapping[str, str],
    progress: Progress,
) -> None:
    """One request: the rest of the file, or the whole where the server knows no ranges."""
    place = {"Range": f"bytes={have}-"} if have else {}
    with ask(url, {**headers, **place}) as response:
        if have and not _goes_on(response, have):
            progress(-have)
            out.truncate(0)
            out.seek(0)
            have = 0
            if response.status_code == 416:
                raise Interrupted("the server knows no such range")
        check(response)
        for chunk in response.iter_bytes():
            have += len(chunk)
            if size is not None and have > size:
                out.truncate(0)
                raise Interrupted(f"more than the {size:,} bytes it should have")
            write(out, chunk)
            progress(len(chunk))


def _goes_on(response: Any, have: int) -> bool:
    """Whether a body begins where we stand; an error's body is not looked at."""
    if response.status_code == 206:
        place = response.headers.get("Content-Range", "").removeprefix("bytes").strip()
        return bool(place.startswith(f"{have}-"))
    return response.status_code not in (200, 416)


def write(out: IO[bytes], chunk: bytes) -> None:
    """Write, and keep a full disk apart from a bad connection: trying again cures only one."""
    try:
        out.write(chunk)
    except OSError as error:
        raise DataError(
            f"a download cannot be written ({error.strerror}); make room, or set HF_HUB_CACHE (with"
            " --stream: TMPDIR) to a larger disk."
        ) from None


# Requests to the hub (or HF_ENDPOINT), and its listings of repositories, which are cached.
#
# Listings are cached in the repository's folder of the hub's own cache, so that a machine without
# network finds later what was fetched, by the same name.
#
# HF_HUB_CACHE/datasets--OWNER--NAME
#     /blobs/CHECKSUM           a file, whole and checked
#     /blobs/CHECKSUM.part      a file being downloaded
#     /snapshots/COMMIT/PATH    a link to it, as the hub's tools do
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
    def folder(self) -> str:
        return f"{self.kind}s--{self.name.replace('/', '--')}"


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Where to ask and where to keep; picklable, and the token is never part of it."""

    endpoint: str = ""
    """Empty: HF_ENDPOINT, else the public hub."""
    cache: str = ""
    """Empty: HF_HUB_CACHE."""
    patience: Patience = field(default_factory=Patience)

    @property
    def offline(self) -> bool:
        """HF_HUB_OFFLINE: nothing is asked, only what was fetched is used."""
        from huggingface_hub import constants

        return bool(constants.HF_HUB_OFFLINE)

    @property
    def url(self) -> str:
        from huggingface_hub import constants

        return (self.endpoint or constants.ENDPOINT).rstrip("/")

    def home(self, repo: Repo) -> Path:
        """The repository's folder in the hub's cache."""
        from huggingface_hub import constants

        return Path(self.cache or constants.HF_HUB_CACHE).expanduser() / repo.folder

    def page(self, repo: Repo) -> str:
        """Where a person looks, and accepts a licence."""
        kind = "datasets/" if repo.kind == "dataset" else ""
        return f"{self.url}/{kind}{repo.name}"

    def file_url(self, repo: Repo, path: str) -> str:
        return f"{self.page(repo)}/resolve/{repo.commit}/{quote(path)}"

    def headers(self) -> dict[str, str]:
        """Our name, and the user's token from HF_TOKEN or the hub's login."""
        import huggingface_hub.utils

        utils: Any = huggingface_hub.utils
        return dict(utils.build_hf_headers(library_name="foundling"))

    def pin(self, uri: HubUri) -> Repo:
        """The repository at the commit its revision means now (offline: meant when last asked)."""
        if re.fullmatch(r"[0-9a-f]{40}", uri.revision):
            return Repo(uri.kind, uri.repo, uri.revision)
        loose = Repo(uri.kind, uri.repo, "")
        note = self.home(loose) / "foundling" / "refs" / quote(uri.revision or "main", safe="")
        if self.offline:
            if not note.is_file():
                raise DataError(
                    f"{uri} was never fetched and HF_HUB_OFFLINE is set; run `foundling"
                    f" fetch {uri}` where there is network, with this cache."
                )
            return Repo(uri.kind, uri.repo, note.read_text().strip())
        commit = self._ask(loose, str(uri), lambda api: _commit(api, uri))
        repo = Repo(uri.kind, uri.repo, commit)
        _keep(note, repo.commit)
        return repo

    def tree(self, repo: Repo, under: str = "", *, recursive: bool = True) -> list[RemoteFile]:
        """Files of a folder (empty: of the repository), in order of their names."""
        name = quote(under, safe="") + ("" if recursive else ",top")
        note = self.home(repo) / "foundling" / "trees" / repo.commit / f"{name or ',all'}.json"
        if note.is_file():  # a commit never changes
            return [RemoteFile(*entry) for entry in json.loads(note.read_text())]
        if self.offline:
            raise DataError(
                f"the files of {repo.name} were never listed here and HF_HUB_OFFLINE is set; run"
                " `foundling fetch` where there is network, with this cache."
            )
        try:
            files = self._ask(repo, repo.name, lambda api: _files(api, repo, under, recursive))
        except NotThere:
            if not under:
                raise
            files = []
        _keep(note, json.dumps([[f.path, f.size, f.checksum] for f in files]))
        return files

    def _ask(self, repo: Repo, what: str, question: Callable[[Any], T]) -> T:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.url, library_name="foundling")
        # Few tries: the first request shows whether there is a network at all.
        patience = replace(self.patience, tries=min(self.patience.tries, 5))
        return insist(lambda: question(api), what=what, page=self.page(repo), patience=patience)


def _commit(api: Any, uri: HubUri) -> str:
    revision = uri.revision or "main"
    info = api.repo_info(uri.repo, repo_type=uri.kind, revision=revision, expand=["sha"])
    return str(info.sha)


def _files(api: Any, repo: Repo, under: str, recursive: bool) -> list[RemoteFile]:
    from huggingface_hub.hf_api import RepoFile

    entries = api.list_repo_tree(
        repo.name, under or None, recursive=recursive, revision=repo.commit, repo_type=repo.kind
    )
    files = [
        RemoteFile(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
        for entry in entries
        if isinstance(entry, RepoFile)
    ]
    return sorted(files, key=lambda file: file.path)


def _keep(note: Path, text: str) -> None:
    """Remember an answer; a cache that is read-only is still good for reading."""
    with contextlib.suppress(OSError):
        if not note.is_file() or note.read_text() != text:
            write_text_atomic(note, text)


# Files of the hub, here: parallel, resumed, compared with their checksum, kept in its cache.
#
# A file is used only after its content was hashed: sha256 for large files, git's sha1 for small
# ones, both as the hub lists them. A body that arrives damaged is fetched once more and then
# refused; a damaged file in the cache is replaced, or refused where there is no network.

PARALLEL = 8
"""Files on their way at once; a single connection seldom fills a line."""
_BLOCK = 1 << 20
_WORTH_SAYING = 200_000_000
"""A build that waits for a larger file says what it waits for."""


def quiet(count: int) -> None:
    """No progress shown."""


def fetch(
    hub: Hub, repo: Repo, file: RemoteFile, *, remedy: str = "", progress: Progress = quiet
) -> Path:
    """The file's checked local path, downloaded if it is not here.

    `remedy` is the command that an offline user is told to run elsewhere.
    """
    what = f"{file.path} of {repo.name}"
    for found in here(hub, repo, file):
        if _is_right(hub, repo, found, file):
            progress(file.size)
            return _link(hub, repo, file, found)
        if hub.offline and found.is_file():
            raise DataError(
                f"{what} is damaged in {hub.home(repo)} and HF_HUB_OFFLINE is set; run `{remedy}`"
                " where there is network."
            )
    if hub.offline:
        raise DataError(
            f"{what} is not here and HF_HUB_OFFLINE is set; run `{remedy}` where there is network,"
            " with this cache."
        )
    blob = hub.home(repo) / "blobs" / file.checksum
    blob.parent.mkdir(parents=True, exist_ok=True)
    with _part(blob) as part:
        if not _is_right(hub, repo, blob, file):  # another process may have brought it meanwhile
            check_room(blob.parent, file.size - os.fstat(part.fileno()).st_size, what)
            if progress is quiet and file.size > _WORTH_SAYING:
                console(stderr=True).print(f"fetching {what}, {file.size / 1e9:.1f} GB")
            _fill(hub, repo, file, part, progress)
            part.flush()
            os.fsync(part.fileno())
            os.replace(part.name, blob)
            _note(hub, repo, blob, file)
    return _link(hub, repo, file, blob)


def spool(hub: Hub, repo: Repo, file: RemoteFile, *, progress: Progress = quiet) -> BinaryIO:
    """The file's checked content without a name on disk, for builds that store no raw source.

    Chosen over reading ranges as they are needed: a checksum is over the whole file, and a stream
    that cannot be checked could fool its owner. It takes the room of one file a worker in TMPDIR.
    """
    what = f"{file.path} of {repo.name}"
    if hub.offline:
        raise DataError(
            f"{what} cannot be streamed while HF_HUB_OFFLINE is set; leave --stream out to use what"
            " was fetched."
        )
    key = f"{hub.file_url(repo, file.path)} {file.checksum}"
    return spooled(key, file.size, what, lambda out: _fill(hub, repo, file, out, progress))


def fetch_all(
    hub: Hub,
    repo: Repo,
    files: Sequence[RemoteFile],
    *,
    workers: int = PARALLEL,
    progress: Progress = quiet,
    done: Callable[[RemoteFile], None] = lambda file: None,
) -> list[Path]:
    """Many files at once, in the given order; the first failure stops the others, whose bytes
    so far are kept."""
    stopped = threading.Event()

    def count(arrived: int) -> None:
        if stopped.is_set():
            raise _Stopped
        progress(arrived)

    def one(file: RemoteFile) -> Path:
        path = fetch(hub, repo, file, progress=count)
        done(file)
        return path

    with ThreadPoolExecutor(workers) as pool:
        try:
            waiting = [pool.submit(one, file) for file in files]
            return [future.result() for future in waiting]
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


class _Stopped(BaseException):
    """Another download failed; no error of its own, so nothing may take it for a bad network."""


def checksum_of(stream: IO[bytes], file: RemoteFile) -> str:
    """The content's checksum, of the kind that the hub lists for this file."""
    digest = hashlib.sha256()
    if len(file.checksum) == 40:
        size = os.fstat(stream.fileno()).st_size
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    stream.seek(0)
    while block := stream.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()


def _fill(hub: Hub, repo: Repo, file: RemoteFile, out: IO[bytes], progress: Progress) -> None:
    """Download into `out` and compare; a second damaged body is refused."""
    what, page = f"{file.path} of {repo.name}", hub.page(repo)
    progress(out.seek(0, 2))
    for _ in range(2):
        download(
            hub.file_url(repo, file.path),
            out,
            size=file.size,
            what=what,
            page=page,
            headers=hub.headers(),
            patience=hub.patience,
            progress=progress,
        )
        out.flush()
        if checksum_of(out, file) == file.checksum:
            return
        progress(-file.size)
        out.truncate(0)
    raise DataError(
        f"{what} arrived damaged twice: its checksum is not {file.checksum[:12]}... as the hub"
        " says; something between here and there changes bytes, so nothing was kept."
    )


def here(hub: Hub, repo: Repo, file: RemoteFile) -> list[Path]:
    """Where the file may be: by its checksum, or by name where links are impossible."""
    home = hub.home(repo)
    places = (home / "blobs" / file.checksum, home / "snapshots" / repo.commit / file.path)
    return [place for place in places if place.is_file()]


def _is_right(hub: Hub, repo: Repo, path: Path, file: RemoteFile) -> bool:
    """Whether a file has the listed content: hashed once, and again when it was touched.

    Pieces of one file are read by many processes; each of them hashing it would cost more than a
    tenth of a build.
    """
    try:
        if path.stat().st_size != file.size:
            return False
        note = _checked(hub, repo, file)
        if note.is_file() and note.read_text() == _stamp(path):
            return True
        with open(path, "rb") as stream:
            if checksum_of(stream, file) != file.checksum:
                return False
    except FileNotFoundError:
        return False
    _note(hub, repo, path, file)
    return True


def _checked(hub: Hub, repo: Repo, file: RemoteFile) -> Path:
    return hub.home(repo) / "foundling" / "checked" / file.checksum


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size} bytes, changed {stat.st_mtime_ns}"


def _note(hub: Hub, repo: Repo, path: Path, file: RemoteFile) -> None:
    with contextlib.suppress(OSError):  # a cache that is read-only is hashed every time
        write_text_atomic(_checked(hub, repo, file), _stamp(path))


@contextlib.contextmanager
def _part(blob: Path) -> Iterator[IO[bytes]]:
    """The file on its way, held by one process at a time; what another left is gone on with."""
    path = blob.with_name(blob.name + ".part")
    while True:
        part = open(path, "a+b")  # noqa: SIM115 - closed in every way out of here
        fcntl.flock(part, fcntl.LOCK_EX)
        # While we waited the holder may have renamed it away; then the name is free or another's.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(part.fileno()), path.stat()):
                break
        part.close()
    try:
        yield part
    finally:
        # A part that another process made superfluous, or that held only damage, is not left.
        with contextlib.suppress(FileNotFoundError):
            here = os.path.samestat(os.fstat(part.fileno()), path.stat())
            if here and (blob.exists() or not os.fstat(part.fileno()).st_size):
                path.unlink()
        part.close()


def _link(hub: Hub, repo: Repo, file: RemoteFile, found: Path) -> Path:
    """Give the file its name in the commit's folder, where the hub's own tools find it too."""
    name = hub.home(repo) / "snapshots" / repo.commit / file.path
    if found == name or name.exists():
        return name
    with contextlib.suppress(OSError):  # read-only, or no links here: the content is what counts
        name.parent.mkdir(parents=True, exist_ok=True)
        name.unlink(missing_ok=True)
        name.symlink_to(os.path.relpath(found, name.parent))
        return name
    return found


# Looking into a file that is elsewhere: byte ranges as they are asked for, nothing stored.
#
# For the beginning of a file or the footer of a Parquet file, which say what it holds and where it
# can be cut. Rows are never read this way: a range has no checksum.

BLOCK = 1 << 20
_KEPT = 8
_blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
"""Ends of the last few files: a footer is often looked at twice in a row."""


def ranged(
    url: str,
    size: int,
    *,
    headers: Callable[[], Mapping[str, str]],
    what: str,
    page: str,
    patience: Patience,
    whole: Callable[[], BinaryIO],
) -> BinaryIO:
    """A file by its ranges; `whole` opens it where the server knows none."""

    def get(start: int, stop: int) -> bytes | None:
        return insist(
            lambda: _get_range(url, start, stop, headers()), what=what, page=page, patience=patience
        )

    return cast(BinaryIO, io.BufferedReader(_Ranged(url, size, get, whole), BLOCK))


def _get_range(url: str, start: int, stop: int, headers: Mapping[str, str]) -> bytes | None:
    """Some bytes; None where the server would send all of them."""
    with ask(url, {**headers, "Range": f"bytes={start}-{stop - 1}"}) as response:
        check(response)
        if response.status_code == 200:
            return None
        return b"".join(response.iter_bytes())


def _keep_range(url: str, first: int, data: bytes) -> None:
    _blocks[url, first] = data
    while len(_blocks) > _KEPT:
        _blocks.popitem(last=False)


class _Ranged(io.RawIOBase):
    """Raw reads by requests of at least a block."""

    def __init__(
        self,
        url: str,
        size: int,
        get: Callable[[int, int], bytes | None],
        whole: Callable[[], BinaryIO],
    ) -> None:
        self._url, self._size, self._get, self._open = url, size, get, whole
        self._whole: BinaryIO | None = None
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview | bytearray") -> int:  # type: ignore[override]
        wanted = min(len(buffer), self._size - self._place)
        if wanted <= 0:
            return 0
        data = self._read(self._place, wanted)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def _read(self, start: int, wanted: int) -> bytes:
        if self._whole is None:
            # Aligned to the end, because footers are there.
            first = max(0, self._size - BLOCK) if start >= self._size - BLOCK else start
            stop = min(self._size, max(start + wanted, first + BLOCK))
            data = _blocks.get((self._url, first))
            if data is None or len(data) < stop - first:
                data = self._get(first, stop)
            if data is not None:
                _keep_range(self._url, first, data)
                return data[start - first : start - first + wanted]
            self._whole = self._open()
        self._whole.seek(start)
        return self._whole.read(wanted)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = max(0, (0, self._place, self._size)[whence] + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def close(self) -> None:
        if self._whole is not None:
            self._whole.close()
        super().close()


# Files without a name: content that is on disk only while it is read.
#
# A temporary file is unlinked as soon as it is made, so that nothing of the raw source is left
# behind, not even by a kill. One is remembered in each process, because some formats are opened
# twice in a row: once to see what they are, and once to read them.

BUFFER = 1 << 20
_lock = threading.Lock()
_last: list[tuple[str, IO[bytes]]] = []


def spooled(key: str, size: int | None, what: str, fill: Callable[[IO[bytes]], None]) -> BinaryIO:
    """What `fill` writes, to be read from the start; the last `key` of a process is not filled
    again."""
    with _lock:
        if not _last or _last[0][0] != key:
            _drop()
            out = _nameless(size or 0, what)
            with contextlib.ExitStack() as undo:
                undo.callback(out.close)
                fill(out)
                out.flush()
                undo.pop_all()
            _last.append((key, out))
        return cast(BinaryIO, io.BufferedReader(_View(os.dup(_last[0][1].fileno())), BUFFER))


def forget() -> None:
    """Give back the room of the last one; readers keep what they have open."""
    with _lock:
        _drop()


def _drop() -> None:
    while _last:
        _last.pop()[1].close()


atexit.register(forget)


def check_room(folder: Path, needed: int, what: str) -> None:
    """Say that a disk is too small before it is full."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{what} needs {needed / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} free; make room,"
            " or set HF_HUB_CACHE (with --stream: TMPDIR) to a larger disk."
        )


def _nameless(size: int, what: str) -> IO[bytes]:
    check_room(Path(tempfile.gettempdir()), size, what)
    return tempfile.TemporaryFile(prefix="foundling-")


class _View(io.RawIOBase):
    """One reader of a file that others read too: with a place of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview | bytearray") -> int:  # type: ignore[override]
        count = os.preadv(self._descriptor, [buffer], self._place)
        self._place += count
        return count

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._place, os.fstat(self._descriptor).st_size)[whence]
        self._place = max(0, base + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()
