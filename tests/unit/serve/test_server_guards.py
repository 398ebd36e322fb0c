"""Keys, hosts, origins, limits and tools, against a real process that has them."""

import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.serving import Running
from tests.unit.serve.conftest import KEY

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How old is Ann?"}]
BEARER = {"authorization": f"Bearer {KEY}"}
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"day": {"enum": ["monday", "friday"]}},
                "required": ["day"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "market")
]


def every_route(server: Running) -> list[tuple[str, str]]:
    paths = httpx.get(f"{server.url}/openapi.json", headers=BEARER).json()["paths"]
    found = [(method, path) for path, methods in paths.items() for method in methods]
    return [*found, ("get", "/"), ("get", "/openapi.json"), ("get", "/nothing"), ("put", "/health")]


def test_wrong_and_missing_keys_get_401_on_every_route(guarded: Running) -> None:
    routes = every_route(guarded)
    assert len(routes) >= 14
    for method, path in routes:
        for key in (None, "wrong", KEY[:-1], KEY + "x", "é"):
            sent = {} if key is None else {"authorization": f"Bearer {key}".encode()}
            answer = httpx.request(method, guarded.url + path, headers=sent)
            assert answer.status_code == 401, (method, path, key)
    assert httpx.get(f"{guarded.url}/health", headers=BEARER).status_code == 200
    # A browser asks for a password and sends it for the page's own requests too.
    assert httpx.get(guarded.url).headers["www-authenticate"].startswith("Basic")
    assert httpx.get(guarded.url, auth=("anyone", KEY)).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        guarded.client("wrong-key-0123456789").models.list()
    assert KEY not in guarded.log.read_text()


def test_foreign_hosts_and_origins_are_refused(guarded: Running) -> None:
    def status(**headers: str) -> int:
        return httpx.get(f"{guarded.url}/health", headers={**BEARER, **headers}).status_code

    assert status(host="evil.example") == 403
    assert status(host="models.example:8000") == 200
    assert status(host="192.168.3.4") == 200
    assert status(origin="https://evil.example") == 403
    assert status(origin="null") == 403
    assert status(origin=guarded.url) == 200
    answer = httpx.options(f"{guarded.url}/health", headers={"origin": "https://page.example"})
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    answer = httpx.get(f"{guarded.url}/health", headers={**BEARER, "origin": guarded.url})
    assert "access-control-allow-origin" not in answer.headers


def test_bodies_that_are_too_large_are_refused(guarded: Running) -> None:
    def post(content: Any) -> httpx.Response:
        return httpx.post(f"{guarded.url}/v1/chat/completions", content=content, headers=BEARER)

    assert post(b"x" * 10_000_000).status_code == 413
    assert post(b"x" * 10_000 for _ in range(30)).status_code == 413  # of unknown length
    answer = post(b"x" * 90_000)
    assert answer.status_code == 400


def test_a_head_that_is_too_long_or_never_ends_is_refused(guarded: Running) -> None:
    place = urlsplit(guarded.url)
    with socket.create_connection((place.hostname, place.port), timeout=20) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 40_000)
        assert slow.recv(100).startswith(b"HTTP/1.1 431")
    with socket.create_connection((place.hostname, place.port), timeout=20) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        began = time.monotonic()
        assert slow.recv(100).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - began < 15


def test_more_than_the_limit_is_told_to_come_again(guarded: Running) -> None:
    client = guarded.client(KEY)
    asked = {"model": "tools", "messages": HELLO, "extra_body": {"ignore_eos": True}}
    held = client.chat.completions.create(**asked, n=4, stream=True, max_tokens=500)
    next(iter(held))
    statuses = set()
    for _ in range(3):
        answer = httpx.post(
            f"{guarded.url}/v1/chat/completions",
            json={"model": "tools", "messages": HELLO, "n": 4, "max_tokens": 40},
            headers=BEARER,
        )
        statuses.add(answer.status_code)
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) > 0
    list(held)
    assert 429 in statuses
    assert client.chat.completions.create(**asked, max_tokens=2).choices
    with pytest.raises(openai.BadRequestError, match="at most 4"):
        client.chat.completions.create(**asked, n=5)


def test_a_tool_that_must_be_called_is_called_by_its_schema(guarded: Running) -> None:
    client = guarded.client(KEY)
    asked: dict[str, Any] = {"model": "tools", "messages": HELLO, "tools": TOOLS, "seed": 3}
    answer = client.chat.completions.create(**asked, tool_choice="required", max_tokens=60)
    [call] = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name in ("weather", "market")
    assert json.loads(call.function.arguments)["day"] in ("monday", "friday")
    named: Any = {"type": "function", "function": {"name": "market"}}
    chunks = list(client.chat.completions.create(**asked, tool_choice=named, stream=True))
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in calls] == ["market"]
    assert json.loads(calls[0].function.arguments)["day"] in ("monday", "friday")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    # What was called and came back is part of the conversation.
    more: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    told = {**asked, "messages": more}
    assert client.chat.completions.create(**told, max_tokens=2).choices[0].message.content
    answer = client.chat.completions.with_raw_response.create(**asked, tool_choice="none")
    assert answer.headers["x-foundling-ignored"] == "tools"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "none of the tools"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "mcp"}]}, "tools.0.type"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": "<|end|>"}}]},
            "special token",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}
                ],
                "tool_choice": "required",
            },
            "cannot be used",
        ),
    ],
)  # fmt: skip
def test_tools_that_are_none(guarded: Running, more: dict[str, Any], told: str) -> None:
    body = {"model": "tools", "messages": HELLO, "tools": TOOLS, **more}
    with pytest.raises(openai.BadRequestError) as caught:
        guarded.client(KEY).chat.completions.create(model="tools", messages=HELLO, extra_body=body)
    assert told in caught.value.body["message"]  # type: ignore[index]


def test_a_client_that_reads_nothing_harms_nobody(guarded: Running) -> None:
    place = urlsplit(guarded.url)
    body = json.dumps({"model": "tools", "messages": HELLO, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}"
    head += f"\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((place.hostname, place.port)) as silent:
        silent.sendall(head.encode() + body)
        other = threading.Thread(
            target=guarded.client(KEY).chat.completions.create,
            kwargs={"model": "tools", "messages": HELLO, "max_tokens": 5},
        )
        other.start()
        other.join(20)
        assert not other.is_alive()
