"""Who may ask, from where and how much: keys, Host, Origin, size and time of a body.

One ASGI layer before the routes. Keys are compared in constant time, all of them, and appear in no
log; a browser is asked for one as a password (Basic), so that the page works with keys too. Host
must be an address or a listed name, so that a foreign name that is made to point here (DNS
rebinding) is refused, and a page of another origin is refused unless it is listed.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL_NAMES = frozenset({"localhost"})
POLICY = [
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'none';"
     b" frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request may cost before it is answered, and the answer."""

    body_bytes: int = 4 << 20
    body_s: float = 20.0
    """Seconds in which the whole body must have come."""
    header_bytes: int = 16 << 10
    header_s: float = 5.0
    """Seconds in which the whole head of a request must have come."""
    answer_s: float = 600.0
    """Seconds in which an answer must have ended."""
    sequences: int = 256
    """Sequences that wait or run at a time."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Who may ask."""

    keys: tuple[str, ...] = ()
    hosts: frozenset[str] = frozenset()
    """Names under which this server is reached, beside localhost and addresses."""
    origins: frozenset[str] = frozenset()
    """Pages of other origins that may ask (CORS)."""


def error_body(
    message: str, *, param: str | None = None, code: str | None = None, kind: str = ""
) -> dict[str, Any]:
    """OpenAI's shape."""
    kind = kind or "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class AccessLayer:
    """The layer around the routes."""

    def __init__(self, app: App, admission: Admission, limits: Limits, *, logs: bool) -> None:
        self._app, self._admission, self._limits, self._logs = app, admission, limits, logs
        self._digests = [hashlib.sha256(key.encode()).digest() for key in admission.keys]
        self.statuses: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        began, status = time.perf_counter(), 0
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        origin = headers.get("origin")
        listed = origin in self._admission.origins

        async def answered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *POLICY]
                if listed and origin:
                    message["headers"] += _cors(origin)
            await send(message)

        try:
            refusal = self._too_large(scope) or self._refusal(headers, listed)
            if refusal is None and listed and scope["method"] == "OPTIONS":
                await _respond(answered, 204, b"", [])
            elif refusal is None:
                refusal = self._wrong_key(scope["path"], headers)
                if refusal is None:
                    refusal = await self._pass_on(scope, headers, receive, answered)
            if refusal is not None:
                code, body, more = refusal
                await _respond(answered, code, json.dumps(body).encode(), more)
        except asyncio.CancelledError:  # the server ends
            if not status:
                body = error_body("the server ends; ask again in a while.", kind="server_error")
                await _respond(answered, 503, json.dumps(body).encode(), [])
        finally:
            self.statuses[status] += 1
            if self._logs:
                path = scope["path"].encode("unicode_escape").decode("ascii")[:200]
                seconds = time.perf_counter() - began
                line = f"{scope['method']} {path} {status or 'left'} {seconds * 1e3:,.0f} ms"
                print(line, file=sys.stderr, flush=True)

    def _too_large(self, scope: Scope) -> "Refusal | None":
        """h11 counts a head only while it comes in pieces."""
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size <= self._limits.header_bytes:
            return None
        told = f"the head of the request is larger than {self._limits.header_bytes:,} bytes;"
        return 431, error_body(f"{told} send less."), [(b"connection", b"close")]

    def _refusal(self, headers: MutableMapping[str, str], listed: bool) -> "Refusal | None":
        host = headers.get("host", "")
        if not self._knows(_name_of(host)):
            told = f"the Host {host[:100]!r} is not served here; list it with --allow-host."
            return 403, error_body(told, code="host_not_allowed"), []
        origin = headers.get("origin")
        if origin is not None and not listed and _authority(origin) != host.lower():
            told = (
                f"pages of {origin[:100]!r} may not ask here; list the origin with --allow-origin."
            )
            return 403, error_body(told, code="origin_not_allowed"), []
        return None

    def _knows(self, name: str) -> bool:
        if name in LOCAL_NAMES or name in self._admission.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _wrong_key(self, path: str, headers: MutableMapping[str, str]) -> "Refusal | None":
        if not self._digests:
            return None
        given = hashlib.sha256(_key_of(headers.get("authorization", ""))).digest()
        found = False
        for digest in self._digests:  # all of them, however early one fits
            found |= hmac.compare_digest(given, digest)
        if found:
            return None
        told = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`."
        scheme = b"Bearer" if path.startswith("/v1") else b'Basic realm="foundling"'
        body = error_body(told, code="invalid_api_key", kind="authentication_error")
        return 401, body, [(b"www-authenticate", scheme)]

    async def _pass_on(
        self, scope: Scope, headers: MutableMapping[str, str], receive: Receive, send: Send
    ) -> "Refusal | None":
        """Read the body within its limits, then let the routes answer."""
        most, close = self._limits.body_bytes, [(b"connection", b"close")]
        too_large = error_body(f"the body is larger than {most:,} bytes; send less.")
        length = headers.get("content-length", "0")
        if (length.isdecimal() and len(length) > 18) or int(length or 0) > most:
            return 413, too_large, close
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        return 413, too_large, close
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            told = f"the body did not come within {self._limits.body_s:g} seconds; send it faster."
            return 408, error_body(told), close
        whole: list[Message] = [{"type": "http.request", "body": b"".join(parts)}]

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        method = (
            "GET" if scope["method"] == "HEAD" else scope["method"]
        )  # uvicorn leaves out bodies
        await self._app({**scope, "method": method}, again, send)
        return None


Refusal = tuple[int, dict[str, Any], list[tuple[bytes, bytes]]]


async def _respond(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    kind = [(b"content-type", b"application/json")] if body else []
    length = [(b"content-length", str(len(body)).encode())]
    start = {"type": "http.response.start", "status": status, "headers": [*kind, *length, *headers]}
    await send(start)
    await send({"type": "http.response.body", "body": body})


def _cors(origin: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (b"access-control-allow-headers", b"authorization, content-type"),
        (b"vary", b"origin"),
    ]


def _key_of(authorization: str) -> bytes:
    """The key of `Bearer KEY`, or of a browser's `Basic` as the password."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return rest.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def _name_of(host: str) -> str:
    """The name or address of a Host header, without its port; empty where it is none."""
    found = re.fullmatch(r"(?:\[([^][]*)\]|([^:@]*))(?::\d*)?", host)
    return (found[1] or found[2] or "").lower() if found else ""


def _authority(origin: str) -> str:
    """Host and port of an origin; empty where it is none, such as `null`."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
