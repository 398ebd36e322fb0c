"""Bodies and heads that are made to hurt: each is refused in a moment, with a sentence."""

import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.serving import Running
from tests.unit.serve.conftest import KEY

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Who?"}]
ASKED = {"model": "chat", "messages": HELLO, "max_tokens": 2}
MANY = 400_000


def post(server: Running, path: str, body: Any, **headers: str) -> httpx.Response:
    content = json.dumps(body, separators=(",", ":")).encode()
    headers = {"content-type": "application/json", **headers}
    return httpx.post(server.url + path, content=content, headers=headers, timeout=60)


def refusal(answer: httpx.Response) -> tuple[str, str | None]:
    """What was said about which field."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["message"], error["param"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"model": "chat", "tokens": [""] * MANY}, "tokens.0"),
        ("/detokenize", {"model": "chat", "tokens": [5] * MANY}, "tokens"),
        ("/tokenize", {"model": "chat", "prompt": "a b " * MANY}, "prompt"),
        ("/tokenize", {"model": "chat", "messages": [{}] * MANY}, "messages.0.role"),
        (TEXT, {"model": "base", "prompt": [{}] * MANY}, "prompt.0"),
        (TEXT, {"model": "base", "prompt": [[""] * MANY]}, "prompt.0.0"),
        (TEXT, {"model": "base", "prompt": [5] * MANY, "echo": True}, None),
        (CHAT, {**ASKED, "messages": [{}] * MANY}, "messages.0.role"),
        (CHAT, {**ASKED, "messages": HELLO * 40_000}, "messages"),
        (CHAT, {**ASKED, "messages": [{**HELLO[0], "content": [{}] * MANY}]},
         "messages.0.content.0.type"),
        (CHAT, {**ASKED, "stop": [1] * MANY}, "stop.0"),
        (CHAT, {**ASKED, "stop": ["a"] * MANY}, "stop"),
        (CHAT, {**ASKED, "stop": ["x" * 900] * 5}, "stop"),
        (CHAT, {**ASKED, "tools": [{}] * MANY}, "tools.0.type"),
        (CHAT, {**ASKED, "logit_bias": {str(n): "" for n in range(MANY // 2)}}, "logit_bias"),
        (CHAT, {**ASKED, "stream_options": dict.fromkeys(map(str, range(MANY // 2)))},
         "stream_options"),
        (CHAT, {**ASKED, "foo": [[]] * MANY}, "foo"),
    ],
)  # fmt: skip
def test_long_lists_are_refused_in_a_moment(
    server: Running, path: str, body: Any, param: str | None
) -> None:
    began = time.monotonic()
    assert refusal(post(server, path, body))[1] == param
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize("size", [8000, 20])
def test_a_conversation_that_cannot_fit_is_not_rendered(guarded: Running, size: int) -> None:
    """By a template from elsewhere, which takes its time."""
    call = {"name": "f", "arguments": json.dumps("x y " * size)}
    messages = [{"role": "assistant", "tool_calls": [{"id": "a", "function": call}]}]
    body = {**ASKED, "model": "tools", "messages": messages if size > 1000 else HELLO * 700}
    told, param = refusal(post(guarded, CHAT, body, authorization=f"Bearer {KEY}"))
    assert "context" in told
    assert param == "messages"


@pytest.mark.parametrize("name", ["日本", "a\nb", "a\x00b", "a" * 65, "", "a b", "\r\n"])
@pytest.mark.parametrize("place", ["a chat", "a message", "/tokenize"])
def test_names_that_no_header_can_list_are_refused(server: Running, name: str, place: str) -> None:
    path, body = CHAT, {**ASKED, name: None}
    if place == "a message":
        body = {**ASKED, "messages": [{**HELLO[0], name: None}]}
    elif place == "/tokenize":
        path, body = place, {"model": "chat", "prompt": "a", name: None}
    assert "is no field's name" in refusal(post(server, path, body))[0]


def test_too_many_names_are_refused_and_one_is_listed_once(server: Running) -> None:
    few = {f"x{n}": None for n in range(40)}
    answer = post(server, CHAT, {**ASKED, "messages": [{**HELLO[0], **few}] * 3})
    assert len(answer.headers["x-foundling-ignored"].split(",")) == 40
    many = {f"x{n}": None for n in range(100_000)}
    assert "100,000 fields have no effect" in refusal(post(server, CHAT, {**ASKED, **many}))[0]


def tool(parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"response_format": {"type": "text", "json_schema": {"name": "a"}}},
         "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a"}}},
         "response_format.json_schema"),
        ({"tools": [tool(strict=True)]}, "tools.0.function.strict"),
        ({"messages": [{**HELLO[0], "tool_call_id": "a"}]}, "messages.0.tool_call_id"),
        ({"messages": [{**HELLO[0], "tool_calls": []}]}, "messages.0.tool_calls"),
        ({"messages": [{**HELLO[0], "name": "Ann"}]}, "messages.0.name"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
        ({"best_of": True}, "best_of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages.0.content.0.type"),
        *(({"tools": [tool({"$defs": wrong})], "tool_choice": "required"}, "tools")
          for wrong in (7, [1], "ab", [["a", 1]])),
        # On these llguidance ends the process.
        ({"tools": [tool({"const": -(2**63)})], "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "a", "schema": {"enum": [[1 - 2**63]]}}}}, "response_format"),
    ],
)  # fmt: skip
def test_what_would_be_dropped_is_refused_by_name(
    guarded: Running, more: dict[str, Any], param: str
) -> None:
    body = {**ASKED, "model": "tools", **more}
    assert refusal(post(guarded, CHAT, body, authorization=f"Bearer {KEY}"))[1] == param


def test_tools_keep_their_own_definitions(guarded: Running) -> None:
    """Two tools name different things alike, and one refers to itself."""

    def of(name: str, day: str) -> dict[str, Any]:
        return tool(
            {
                "type": "object",
                "$defs": {"day": {"const": day}},
                "properties": {
                    "day": {"$ref": "#/$defs/day"},
                    "same": {"$ref": "#/properties/day"},
                },
                "required": ["day", "same"],
                "additionalProperties": False,
            },
            name=name,
        )

    seen = set()
    for seed in range(12):
        body = {**ASKED, "model": "tools", "seed": seed, "max_tokens": 90}
        body |= {"tools": [of("a", "monday"), of("b", "friday")], "tool_choice": "required"}
        answer = post(guarded, CHAT, body, authorization=f"Bearer {KEY}").json()
        [call] = answer["choices"][0]["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        seen.add((call["function"]["name"], arguments["day"], arguments["same"]))
    assert seen <= {("a", "monday", "monday"), ("b", "friday", "friday")}


def said(server: Running, head: bytes) -> bytes:
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), timeout=20) as asking:
        asking.sendall(head)
        found = b""
        while chunk := asking.recv(1 << 16):
            found += chunk
    return found


LOCAL = b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /" + b"a" * 60_000 + LOCAL + b"\r\n", b"431"),
        (b"GET /health" + LOCAL + b"x: y\r\n" * 3000 + b"\r\n", b"431"),
        (b"GET /health?" + b"a" * 20_000 + LOCAL + b"\r\n", b"431"),
        (b"\x16\x03\x01\x02\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n", b"400"),
        (b"POST /v1/embeddings" + LOCAL + b"content-length: 0\r\n\r\n", b"404"),
        (b"PUT /health" + LOCAL + b"content-length: 0\r\n\r\n", b"405"),
        (b"GET /health HTTP/1.1\r\nhost: [::1].evil.example\r\nconnection: close\r\n\r\n", b"403"),
        (b"GET /health HTTP/1.1\r\nhost: localhost:1@evil\r\nconnection: close\r\n\r\n", b"403"),
        (b"GET /health HTTP/1.1\r\nhost: [::1]:8000\r\nconnection: close\r\n\r\n", b"200"),
        (b"HEAD /health" + LOCAL + b"\r\n", b"200"),
        (b"HEAD /" + LOCAL + b"\r\n", b"200"),
        (b"POST /v1/chat/completions" + LOCAL + b"content-length: 2\r\n\r\n{}", b"400"),
        (
            b"POST /tokenize"
            + LOCAL
            + b"transfer-encoding: chunked\r\n\r\n"
            + b"1\r\n \r\n" * 12_000,
            b"400",
        ),
    ],
)
def test_heads_and_what_they_are_told(server: Running, head: bytes, status: bytes) -> None:
    answer, _, body = said(server, head).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 " + status), answer
    if head.startswith(b"HEAD"):
        assert body == b""
    elif status != b"200":
        error = json.loads(body)["error"]
        assert error["message"].endswith(".")
        for part, word in ((b"{}", "content-type"), (b"chunked", "tiny chunks")):
            assert part not in head or word in error["message"]
    assert "Traceback" not in server.log.read_text()
