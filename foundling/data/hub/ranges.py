"""Looking into a file that is elsewhere: byte ranges as they are asked for, nothing stored.

For the beginning of a file or the footer of a Parquet file, which say what it holds and where it
can be cut. Rows are never read this way: a range has no checksum.
"""

import io
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import BinaryIO, cast

from foundling.data.hub.transfer import Patience, ask, check, insist

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
            lambda: _get(url, start, stop, headers()), what=what, page=page, patience=patience
        )

    return cast(BinaryIO, io.BufferedReader(_Ranged(url, size, get, whole), BLOCK))


def _get(url: str, start: int, stop: int, headers: Mapping[str, str]) -> bytes | None:
    """Some bytes; None where the server would send all of them."""
    with ask(url, {**headers, "Range": f"bytes={start}-{stop - 1}"}) as response:
        check(response)
        if response.status_code == 200:
            return None
        return b"".join(response.iter_bytes())


def _keep(url: str, first: int, data: bytes) -> None:
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
                _keep(self._url, first, data)
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
