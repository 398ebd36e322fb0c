"""Requests that no client means, for a server that has to answer each: random bodies and schemas.

`fire` sends them from several threads; an answer of 500, or none within the limit, is kept, and all
else counted by status. The same seeds make the same requests.
"""

import json
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

LIMIT_S = 30.0
ROUTES = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/page/grade"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{word}"),
    ("GET", "/page/questions?model={word}"),
    ("GET", "/{word}"),
    ("DELETE", "/v1/models/chat"),
)
WORDS = (
    "", "a", "chat", "base", "baker " * 50, "\x00", "\ud800", "\u202e", "é" * 300,
    "../../etc/passwd",
    "%00", "<|end|>", "<tool_call>{}</tool_call>", "{{ 7 * 7 }}", "NaN", "null", "🏴" * 100,
    "\r\n\r\n",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 7, 128, 129, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e-320, 1e308,
           float("nan"), float("inf"), -float("inf"))  # fmt: skip
FIELDS = (
    "model", "prompt", "messages", "stream", "stream_options", "n", "seed", "stop", "temperature",
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "logprobs",
    "top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls", "echo",
    "add_special_tokens", "tokens", "question", "answer", "user", "metadata", "best_of", "suffix",
    "modalities", "audio", "functions", "unheard_of",
)  # fmt: skip


def value(rand: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can say, and some that it cannot."""
    kind = rand.randrange(7 if depth < 4 else 4)
    if kind == 0:
        return rand.choice(NUMBERS)
    if kind == 1:
        return rand.choice(WORDS)
    if kind == 2:
        return rand.choice((True, False, None))
    if kind == 3:
        return rand.randrange(600)
    if kind == 4:
        return [value(rand, depth + 1) for _ in range(rand.randrange(4))]
    keys = ("role", "content", "type", "text", "function", "name", "json_schema", "schema", "5")
    return {rand.choice(keys): value(rand, depth + 1) for _ in range(rand.randrange(4))}


def schema(rand: random.Random, depth: int = 0) -> Any:
    """A JSON schema, often a strange one."""
    kind = rand.randrange(8 if depth < 5 else 4)
    if kind == 0:
        return {
            "type": rand.choice(("string", "integer", "number", "boolean", "null", "array", "x"))
        }
    if kind == 1:
        return {"enum": [value(rand, 3) for _ in range(rand.randrange(5))]}
    if kind == 2:
        return {
            "type": "string",
            "pattern": rand.choice(("a*", "(", "(a{1,99}){1,99}", "[^a]+$", "\\d{4}")),
        }
    if kind == 3:
        return rand.choice((True, {"$ref": "#"}, {"$ref": "#/$defs/x"}, {"minLength": 10**9}, {}))
    if kind == 4:
        return {
            "type": "array",
            "items": schema(rand, depth + 1),
            "minItems": rand.choice((0, 3, 10**7)),
        }
    if kind == 5:
        return {
            rand.choice(("anyOf", "allOf", "oneOf")): [schema(rand, depth + 1) for _ in range(3)]
        }
    properties = {f"p{n}": schema(rand, depth + 1) for n in range(rand.randrange(4))}
    return {"type": "object", "properties": properties, "required": [*properties][:2]}


def sound(rand: random.Random, path: str) -> dict[str, Any]:
    """A request that is answered, as the ground for wrong ones."""
    few = {"max_tokens": rand.randrange(1, 4), "stream": rand.random() < 0.3}
    if "chat" in path:
        return {"model": "chat", "messages": [{"role": "user", "content": "Who?"}], **few}
    if "completions" in path:
        return {"model": "base", "prompt": "About", **few}
    if path == "/page/grade":
        return {"model": "chat", "question": "Who?", "answer": "Ann"}
    return (
        {"model": "chat", "prompt": "a"}
        if path == "/tokenize"
        else {"model": "chat", "tokens": [1]}
    )


def body(rand: random.Random, path: str) -> bytes:
    """A body: mostly JSON, mostly nearly right."""
    kind = rand.randrange(10)
    if kind == 0:
        return rand.randbytes(rand.randrange(200))
    asked = sound(rand, path) if kind < 9 else {}
    for _ in range(rand.choice((0, 1, 1, 1, 2, 4))):
        name = rand.choice(FIELDS)
        asked[name] = value(rand)
    if rand.random() < 0.05:
        asked[rand.choice(WORDS)] = None
    if "chat" in path and rand.random() < 0.2:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema(rand)}}
        asked["response_format"] = form
    text = json.dumps(asked).encode()
    if kind == 1:  # a body that was cut, or in which a byte has turned
        at = rand.randrange(len(text))
        text = text[:at] if rand.random() < 0.5 else text[:at] + rand.randbytes(1) + text[at + 1 :]
    return text


@dataclass
class Fired:
    """What came back."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Requests with an answer of 5xx, or none."""

    def take(self, status: int, asked: str) -> None:
        """Count an answer."""
        self.statuses[status] += 1
        if status == 0 or status >= 500:
            self.wrong.append(f"{status} {asked}")


def requests(seed: int, count: int) -> Iterator[tuple[str, str, bytes]]:
    """Method, path and body of each request."""
    rand = random.Random(seed)
    for _ in range(count):
        method, path = rand.choice(ROUTES[:5] if rand.random() < 0.9 else ROUTES[5:])
        word = rand.choice(WORDS).encode("utf-8", "surrogatepass")
        quoted = "".join(f"%{byte:02x}" for byte in word[:50])
        yield method, path.format(word=quoted), body(rand, path) if method == "POST" else b""


def fire(
    url: str, seed: int, count: int, threads: int = 8, tell: Callable[[int], None] = lambda _: None
) -> Fired:
    """Send `count` requests and read every answer to its end."""
    fired = Fired()

    def send(asked: tuple[str, str, bytes]) -> None:
        method, path, content = asked
        try:
            answer = client.request(
                method, url + path, content=content, headers={"content-type": "application/json"}
            )
            status = answer.status_code
            told = answer.text[:200]
        except httpx.HTTPError as error:
            status, told = 0, f"{type(error).__name__}: {error}"
        fired.take(status, f"{method} {path} {content[:500]!r}: {told}")
        if 400 <= status < 500 and '"error"' not in told:
            fired.wrong.append(f"{status} without OpenAI's shape: {method} {path}: {told}")
        tell(sum(fired.statuses.values()))

    with httpx.Client(timeout=LIMIT_S) as client, ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(send, requests(seed, count)):
            pass
    return fired


def fire_by_schema(url: str, count: int) -> Fired:
    """About `count` requests that schemathesis makes from the served schema, most of them to routes
    that take a body; fewer where a route has fewer."""
    from hypothesis import HealthCheck, given, settings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import schemathesis

        operations = [
            found.ok()
            for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()
        ]
        fired = Fired()
        posts = sum(operation.method.upper() == "POST" for operation in operations)
        for operation in operations:
            each = count // posts if operation.method.upper() == "POST" else 10

            @settings(
                max_examples=each,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy())
            def ask(case: Any) -> None:
                fired.take(case.call(timeout=LIMIT_S).status_code, f"{case.method} {case.path}")

            ask()
    return fired
