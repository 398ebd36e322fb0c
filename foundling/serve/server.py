"""The process: models are opened, a socket is bound, uvicorn answers, and SIGTERM drains.

One process with one event loop and a thread a model. TLS is a proxy's work (docs/serve.md), and
more machines are more processes behind it.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from foundling.config.errors import ConfigError
from foundling.runtime.console import say, warn
from foundling.serve.access import AccessLayer, Admission, Limits, error_body
from foundling.serve.routes import build_app
from foundling.serve.served_model import EngineLimits, ServedModel, open_models
from foundling.serve.service import Service

KEYS_VARIABLE = "FOUNDLING_API_KEYS"
DRAIN_S = 30.0
"""Seconds that running answers have to end after SIGTERM."""
GRACE_S = 3.0
"""Seconds for those that were given up to be told so."""
CONNECTIONS = 4096
TINY_CHUNK = re.compile(rb"\r\n[0-9a-fA-F]{1,2}\r\n")
MOST_TINY_CHUNKS = 4000
"""In what comes at once."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How a server is reached, and by whom."""

    engine: EngineLimits
    host: str = "127.0.0.1"
    port: int = 8000
    follow: bool = False
    admission: Admission = field(default_factory=Admission)
    limits: Limits = field(default_factory=Limits)
    logs: bool = True
    logs_prompts: bool = False
    when_ready: Callable[[str], object] = print
    """Told the address."""


def read_keys(path: Path | None) -> tuple[str, ...]:
    """API keys: a line each of a file, or of the environment; never of the command line, which
    anybody on the machine can read."""
    where = str(path)
    if path is None:
        text = os.environ.get(KEYS_VARIABLE, "")
        where = f"the variable {KEYS_VARIABLE}"
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not valid UTF-8 text.") from None
    keys = tuple(key for line in text.replace(",", "\n").splitlines() if (key := line.strip()))
    if not keys and (path is not None or KEYS_VARIABLE in os.environ):
        raise ConfigError(f"{where} holds no key; write one a line, or leave it away.")
    if short := [key for key in keys if len(key) < 16]:
        raise ConfigError(
            f"a key has {len(short[0])} characters and can be guessed; use 16 or more, as from"
            " `openssl rand -hex 24`."
        )
    return keys


def serve(sources: Sequence[str], options: ServeOptions) -> None:
    """Serve these models until a signal ends it."""
    listener = _bound(options.host, options.port)
    # Of a body with a million lists the collector would walk through all modules again and again.
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)
    with contextlib.closing(listener):
        models = open_models(sources, options.engine, follow=options.follow)
        for model in models.values():
            _tell(model)
        if not options.admission.keys and not _is_local(options.host):
            warn(
                f"whoever reaches {options.host} may use the models; give --api-keys FILE, and"
                " --allow-host NAME for each name that it is reached by."
            )
        service = Service(models, options.limits, logs_prompts=options.logs_prompts)
        layer = AccessLayer(
            build_app(service), options.admission, options.limits, logs=options.logs
        )
        service.statuses = layer.statuses
        try:
            asyncio.run(_run(layer, listener, service, options))
        finally:
            for model in models.values():
                model.now.thread.stop()
                model.now.thread.join()
        if service.given_up:
            warn(
                f"{service.given_up:,} answers were given up before their end; the server is down."
            )
        else:
            say("all answers have ended; the server is down.")


async def _run(app: Any, listener: socket.socket, service: Service, options: ServeOptions) -> None:
    limits = options.limits
    config = uvicorn.Config(
        app,
        http=_protocol(limits.header_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=limits.header_bytes,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=round(DRAIN_S + GRACE_S),
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = _Server(config, lambda: options.when_ready(address), service.end)
    followed = service.models.values() if options.follow else ()
    followers = [asyncio.create_task(model.follow()) for model in followed]
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in followers:
            task.cancel()


class _Server(uvicorn.Server):
    """uvicorn's, which ends its process by the signal that it heard; ours ends by returning."""

    def __init__(
        self, config: uvicorn.Config, when_ready: Callable[[], object], end: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._when_ready, self._end = when_ready, end
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._when_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers end; after a time give them up, and after a little more cut them."""
        drained = asyncio.get_running_loop().call_later(DRAIN_S, self._give_up)
        await super().shutdown(sockets)
        drained.cancel()

    def _give_up(self) -> None:
        self._end()
        # Of what is cut afterwards uvicorn would print a traceback each.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        asyncio.get_running_loop().call_later(GRACE_S, setattr, self, "force_exit", True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal drains, a second one gives up what runs."""
        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._heard) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self.should_exit = True
        elif self._loop is None:
            self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._give_up)


def _protocol(header_s: float) -> type[H11Protocol]:
    """uvicorn's protocol, on which a head that does not come ends the connection, and one that is
    none is told so in OpenAI's shape."""

    class Timed(H11Protocol):
        late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.late = self.loop.call_later(header_s, self.end_late)

        def data_received(self, data: bytes) -> None:
            # A body in chunks of a byte costs h11 seconds, in which the loop stands still.
            if len(TINY_CHUNK.findall(data)) > MOST_TINY_CHUNKS:
                self.refuse(400, "Bad Request", "the body comes in tiny chunks; send larger ones.")
                return
            super().data_received(data)
            waits = self.conn.their_state is h11.IDLE
            if self.late is not None and not waits:
                self.late.cancel()
                self.late = None
            elif self.late is None and waits and not self.transport.is_closing():
                self.late = self.loop.call_later(header_s, self.end_late)

        def connection_lost(self, exc: Exception | None) -> None:
            if self.late is not None:
                self.late.cancel()
            super().connection_lost(exc)

        def end_late(self) -> None:
            self.refuse(408, "Request Timeout", "the head of the request did not come in time.")

        def send_400_response(self, msg: str) -> None:
            if getattr(sys.exc_info()[1], "error_status_hint", 400) == 431:
                told = "the head of the request is too large; send less."
                self.refuse(431, "Request Header Fields Too Large", told)
            else:
                self.refuse(400, "Bad Request", "the request is no HTTP; send HTTP/1.1.")

        def refuse(self, status: int, phrase: str, message: str) -> None:
            cycle = self.cycle
            if cycle is None or cycle.response_complete or not cycle.response_started:
                head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
                body = json.dumps(error_body(message))
                length = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
                self.transport.write((head + length + body).encode())
            self.transport.close()

    return Timed


def _bound(host: str, port: int) -> socket.socket:
    """The socket, before minutes are spent on models."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host} is no address of this machine ({error}).") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        told = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{host}:{port} cannot be listened at ({told}); give another --port or --host."
        ) from None
    listener.listen(512)
    return listener


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _tell(model: ServedModel) -> None:
    opened = model.now
    engine = opened.thread.text.engine
    kind = "answers chats" if model.can_chat else "continues texts (it was never taught to answer)"
    fits = engine.blocks.capacity // max(1, opened.context)
    say(
        f"{model.id}: {kind}; requests of {opened.context:,} tokens, {fits:,} of the longest at a"
        f" time, on {engine.device}"
    )
