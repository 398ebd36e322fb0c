"""What the hub's refusals mean, each in one sentence with a remedy."""

import re
import time
from email.utils import parsedate_to_datetime
from typing import Any

from foundling.config.errors import DataError

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
