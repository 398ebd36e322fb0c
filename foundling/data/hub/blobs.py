"""Files of Software Heritage's archive by their id: fetched many at a time, unpacked, decoded.

The archive is a public bucket, so plain https does; AWS_ENDPOINT_URL_S3 points elsewhere (a mirror,
a bucket inside a cloud) as it does for every tool of that cloud.
"""

import os
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from foundling.config.errors import DataError
from foundling.data.hub.transfer import Interrupted, Patience, ask, check, insist
from foundling.data.sources.making import Bad

PUBLIC = "https://softwareheritage.s3.amazonaws.com"
BUCKET = "softwareheritage"
PARALLEL = 32
"""Small files wait for the network and not for us, so many are asked for at once."""
LONGEST = 1 << 26
"""Unpacked bytes of one file; a longer one is no source code."""
_DOUBT = 20
"""So many refusals without one success mean that all is refused, and not that files are missing."""

A = TypeVar("A")
B = TypeVar("B")


def archive_url() -> str:
    """Where blobs are, without the slash and the id."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3", "").rstrip("/")
    return f"{endpoint}/{BUCKET}/content" if endpoint else f"{PUBLIC}/content"


class Blobs:
    """Contents by id; None for one that the archive does not have."""

    def __init__(self, patience: Patience) -> None:
        self.url = archive_url()
        self.patience = patience
        self._good = self._refused = 0

    def text(self, file: Mapping[str, Any]) -> str | Bad | None:
        """The decoded content of a row with `blob_id` and `src_encoding`."""
        blob = file.get("blob_id")
        if not isinstance(blob, str) or not blob.isalnum():
            return Bad("no blob id", str(blob)[:40])
        content = self._content(blob)
        if content is None or isinstance(content, Bad):
            return content
        encoding = file.get("src_encoding") or "UTF-8"
        try:
            return content.decode(str(encoding))
        except (UnicodeDecodeError, LookupError):
            return Bad(f"not {str(encoding)[:20]}", content[:100].decode("ascii", "replace"))

    def _content(self, blob: str) -> bytes | Bad | None:
        damaged = 0

        def attempt() -> bytes | Bad | None:
            nonlocal damaged
            packed = self._packed(blob)
            if packed is None:
                return None
            try:
                return unpacked(packed)
            except (zlib.error, EOFError):
                damaged += 1
                if damaged > 1:  # twice the same: it lies there like that
                    return Bad("damaged in the archive", blob)
                raise Interrupted("a damaged body") from None

        return insist(attempt, what=f"blob {blob}", page=self.url, patience=self.patience)

    def _packed(self, blob: str) -> bytes | None:
        with ask(f"{self.url}/{blob}", {}) as response:
            return self._answered(response)

    def _answered(self, response: Any) -> bytes | None:
        if response.status_code == 404:
            return None
        if response.status_code == 403:
            # How a bucket that may not be listed says that a file is not there.
            self._refused += 1
            if self._refused >= _DOUBT and not self._good:
                raise DataError(
                    f"{self.url} refuses every blob (403); ask Software Heritage for access, or set"
                    " AWS_ENDPOINT_URL_S3 to a mirror that has them."
                )
            return None
        check(response)
        self._good += 1
        return bytes(response.read())


def unpacked(packed: bytes) -> bytes | Bad:
    """A gzip file's content, whose own checksum is compared; raises where it is damaged."""
    machine = zlib.decompressobj(31)
    content = machine.decompress(packed, LONGEST)
    if machine.unconsumed_tail:
        return Bad(f"over the limit of {LONGEST} bytes a row")
    if not machine.eof:
        raise EOFError("it ends early")
    return content


def in_order(
    work: Callable[[A], B], items: Iterable[A], workers: int
) -> Generator[tuple[A, B], None, None]:
    """Results in the order of the items, with at most twice `workers` items under way."""
    waiting: deque[tuple[A, Future[B]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(work, item)))
                if len(waiting) >= 2 * workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
