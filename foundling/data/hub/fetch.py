"""Files of the hub, here: parallel, resumed, compared with their checksum, kept in its cache.

A file is used only after its content was hashed: sha256 for large files, git's sha1 for small ones,
both as the hub lists them. A body that arrives damaged is fetched once more and then refused; a
damaged file in the cache is replaced, or refused where there is no network.
"""

import contextlib
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, BinaryIO

from foundling.config.errors import DataError
from foundling.data.hub.client import Hub, RemoteFile, Repo
from foundling.data.hub.spooled import check_room, spooled
from foundling.data.hub.transfer import Progress, download
from foundling.runtime.files import write_text_atomic
from foundling.runtime.log import console

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
