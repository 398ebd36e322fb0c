"""From sequences to a response: their limit, whole answers, streams, and clients that leave."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request, Response

from foundling.serve.access import Limits, error_body
from foundling.serve.answers import Answer
from foundling.serve.engine_thread import EngineEndedError, Ticket, Wanted
from foundling.serve.protocol import ApiError
from foundling.serve.served_model import ServedModel

RETRY_AFTER_S = 2


class Service:
    """The models, and how many sequences are on their way."""

    def __init__(
        self, models: Mapping[str, ServedModel], limits: Limits, *, logs_prompts: bool = False
    ) -> None:
        self.models, self.limits, self.logs_prompts = models, limits, logs_prompts
        self.statuses: Mapping[int, int] = {}
        """Responses by status; the access layer counts."""
        self.sequences = 0
        self.given_up = 0
        """Answers that the server's end left unfinished."""
        self._tickets: set[Ticket] = set()
        self._is_ending = False

    def model(self, id: str | None) -> ServedModel:
        """By its name; without one, the only one."""
        if id is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if id is None:
            told = f"model is missing; there are {', '.join(self.models)}."
            raise ApiError(told, param="model")
        if id not in self.models:
            told = f"there is no model {id[:100]!r}; there are {', '.join(self.models)}."
            raise ApiError(told, status=404, param="model", code="model_not_found")
        return self.models[id]

    def end(self) -> None:
        """Give up all answers, and whatever comes after."""
        self._is_ending = True
        for ticket in list(self._tickets):
            if ticket.left and not ticket.is_closed:
                self.given_up += 1
                ticket.give_up(_ending())

    @asynccontextmanager
    async def running(self, served: ServedModel, wanted: Sequence[Wanted]) -> AsyncIterator[Ticket]:
        """Sequences on their way, within the server's limits; they are given up on leaving."""
        most = self.limits.sequences
        if len(wanted) > most:
            raise ApiError(
                f"the request asks for {len(wanted):,} answers at once; at most {most:,} are given."
            )
        if self.sequences + len(wanted) > most:
            raise ApiError(
                f"{self.sequences:,} answers are on their way and at most {most:,} may be; try"
                " again soon.",
                status=429,
                code="too_many_requests",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )
        self.sequences += len(wanted)
        ticket = None
        try:
            ticket = await self._submitted(served, wanted)
            self._tickets.add(ticket)
            if self._is_ending:  # since it was sent
                self.end()
            yield ticket
        finally:
            self.sequences -= len(wanted)
            if ticket is not None:
                self._tickets.discard(ticket)
                ticket.close()

    async def _submitted(self, served: ServedModel, wanted: Sequence[Wanted]) -> Ticket:
        """Taken on by the newest engine: it may have changed since the request was read."""
        while not self._is_ending:
            thread = served.now.thread
            try:
                return await thread.submit(wanted)
            except EngineEndedError:
                if thread is served.now.thread:
                    break
        raise _ending()


class Json(Response):
    """JSON of ASCII alone, which any text can be written in."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Plain values as bytes."""
        return json.dumps(content).encode()


async def _left(request: Request, ticket: Ticket) -> None:
    """Give a ticket up when its client goes."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    ticket.close()


class EventStream(Response):
    """An answer as server-sent events, in one write for all that came at once."""

    def __init__(
        self,
        service: Service,
        answer: Answer,
        running: Any,
        ticket: Ticket,
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._service, self._answer, self._running, self._ticket = service, answer, running, ticket

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send until all is said, the client has gone, or its time is over."""
        ticket, limit = self._ticket, self._service.limits.answer_s
        loop = asyncio.get_running_loop()
        clock = loop.call_later(limit, ticket.give_up, _late(limit))
        watch = loop.create_task(_left(Request(scope, receive), ticket))
        try:
            # One who reads nothing holds the last write back, also beyond the limit.
            async with asyncio.timeout(limit + 10):
                head = {"status": 200, "headers": self.raw_headers}
                await send({"type": "http.response.start", **head})
                text = self._answer.opening()
                try:
                    while events := await ticket.events():
                        text += self._answer.chunks(events)
                        if text:
                            await send(_part(text))
                        text = ""
                    text += self._answer.closing()
                except ApiError as error:
                    told = error_body(str(error), code=error.code, kind="server_error")
                    text += f"data: {json.dumps(told)}\n\n"
                await send({**_part(text), "more_body": False})
        except TimeoutError:
            pass
        finally:
            clock.cancel()
            watch.cancel()
            await self._running.__aexit__(None, None, None)


def _part(text: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


def _late(limit: float) -> ApiError:
    told = f"the answer did not end within {limit:g} seconds; ask for fewer tokens."
    return ApiError(told, status=408, code="timeout")


def _ending() -> ApiError:
    return ApiError("the server ends; ask again in a while.", status=503, code="server_ends")


async def answered(
    service: Service,
    http: Request,
    answer: Answer,
    wanted: Sequence[Wanted],
    served: ServedModel,
    *,
    stream: bool,
    headers: dict[str, str],
) -> Response:
    """A response with these headers, whole or as a stream."""
    running = service.running(served, wanted)
    ticket = await running.__aenter__()
    if stream:
        return EventStream(service, answer, running, ticket, headers)
    limit = service.limits.answer_s
    clock = asyncio.get_running_loop().call_later(limit, ticket.give_up, _late(limit))
    watch = asyncio.get_running_loop().create_task(_left(http, ticket))
    try:
        while events := await ticket.events():
            for event in events:
                answer.take(event)
        if any(choice.finish is None for choice in answer.choices):  # nobody is there to read
            return Response(status_code=499)
        return Json(answer.whole().model_dump(), headers=headers)
    finally:
        clock.cancel()
        watch.cancel()
        await running.__aexit__(None, None, None)
