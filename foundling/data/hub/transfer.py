"""Bytes over HTTP into an open file: every byte, or a sentence.

What huggingface_hub's own download lacks, measured against a server that misbehaves (2.4): it keeps
nothing of a download that failed, so that the next try begins at zero; it gives up at once on a
reset connection and on 5xx; after a cut it goes back to the last 10 MB; and it never compares the
bytes with their checksum. So the loop is ours; the client (pool, proxies, certificates, offline
switch) and the token are the hub's.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from foundling.config.errors import DataError
from foundling.data.hub.errors import asked_wait_s, brief, explain, is_transient, network_errors

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
            _tell(what, wait, error)
            pause(wait, tick)


def pause(seconds: float, tick: Callable[[], None]) -> None:
    """Sleep, looking up every second."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        tick()
        time.sleep(min(left, 1.0))


def _passing() -> tuple[type[Exception], ...]:
    return (*network_errors(), Interrupted)


def _tell(what: str, wait: float, error: BaseException) -> None:
    from foundling.runtime.log import warn

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
