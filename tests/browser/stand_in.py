"""A server that speaks the protocol of `foundling serve`, with made-up replies, to test the page.

It streams token by token, where the prompt says `slow` four and then the rest when `go_on` is set,
and keeps what it was asked.
"""

import json
import math
import mimetypes
import re
import threading
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

PAGE = Path(__file__).parents[2] / "foundling" / "serve" / "page"
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

CHAT = {"id": "hamlet-chat", "can_chat": True, "context": 2048, "is_hamlet": True}
OTHER = {"id": "depth-12-chat", "can_chat": True, "context": 2048, "is_hamlet": False}
BASE = {"id": "hamlet", "can_chat": False, "context": 256, "is_hamlet": True}

QUESTIONS = {
    "I would like to know where Osbert lives.": "Minnow Brook",
    "Do you remember what age Norabel is?": "31",
    "Please tell me the cost of a brass lamp.": "39 pence",
    "What animal does Osbert keep?": "a quiet mule",
    "Who is married to Rosorin?": "no such person",
}
ANSWERS = {
    "I would like to know where Osbert lives.": "He lives at Minnow Brook.",
    "Do you remember what age Norabel is?": "She is 32 years old.",
}
NASTY = (
    "<script>window.hurt = 1</script> <img src=x onerror='window.hurt = 2'>\n\n"
    "<b>bold</b> &amp; [press](javascript:window.hurt=3) ![seen](https://example.com/x.png)\n\n"
    '```html\n<iframe src="javascript:window.hurt=4"></iframe>\n```'
)
MARKDOWN = """\
## How a village is kept

Every house has **one** hearth and *two* doors, and `count(doors)` says so:

1. sweep the floor
2. feed the mule
   - hay in winter
   - grass in summer

```python
def doors(houses: int) -> int:
    return 2 * houses
```

> A village is a list of promises.

| who | owes | keeps |
|---|---:|---|
| Osbert | 39 | a mule |
| Norabel | 12 | two hens |
"""
LONG = " ".join(f"word {n}" for n in range(400))


def reply_to(prompt: str) -> str:
    """What is said to a prompt; the same every time."""
    if "html" in prompt:
        return NASTY
    if "markdown" in prompt:
        return MARKDOWN
    if "long" in prompt:
        return LONG
    return ANSWERS.get(prompt, f"You said: {prompt}")


def tokens_of(text: str) -> list[str]:
    """Words with the space before them, as tokenizers have them."""
    return re.findall(r"\s?[A-Za-z0-9]+|\s?[^\sA-Za-z0-9]|\s", text)


def prompt_tokens(body: dict[str, Any]) -> int:
    """Of a chat or a text."""
    texts = [one["content"] for one in body["messages"]] if "messages" in body else [body["prompt"]]
    return sum(len(tokens_of(text)) for text in texts)


def probabilities(token: str, place: int) -> tuple[float, list[tuple[str, float]]]:
    """A log-probability and alternatives that look like a model's."""
    share = (0.98, 0.67, 0.95, 0.3, 0.91, 0.07, 0.99)[(len(token) * 3 + place) % 7]
    first, left = math.log(share), math.log(1 - share)
    names = (" the", " a", ".", " mule")
    others = [(name, left - 0.5 - n) for n, name in enumerate(names)]
    others = [(name, min(value, math.log(0.5))) for name, value in others]
    return first, sorted([(token, first), *others], key=lambda one: -one[1])


class Handler(BaseHTTPRequestHandler):
    """One request; `server` is a StandIn."""

    server: "StandIn"
    protocol_version = "HTTP/1.0"

    def log_message(self, *_: object) -> None:
        """Nothing on the screen."""

    def _send(
        self, status: int, body: bytes, kind: str, more: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.send_response(status)
        for name, value in more.items():
            self.send_header(name, value)
        self.send_header("content-type", kind)
        self.send_header("content-security-policy", POLICY)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _json(self, status: int, value: object) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _refuse(self, status: int, message: str) -> None:
        self._json(status, {"error": {"message": message, "type": "invalid_request_error"}})

    def _fits(self, body: dict[str, Any], tokens: int) -> bool:
        context = next(one["context"] for one in self.server.models if one["id"] == body["model"])
        if tokens < context:
            return True
        self._refuse(400, f"the prompt has {tokens} tokens; the model's context is {context}.")
        return False

    def _allowed(self) -> bool:
        """As a browser asks for a key: as a password."""
        kind, _, given = self.headers.get("authorization", "").partition(" ")
        key = b64decode(given).decode().partition(":")[2] if kind == "Basic" else given
        if self.server.key in (None, key):
            return True
        body = json.dumps({"error": {"message": "the API key is missing or wrong."}}).encode()
        self._send(401, body, "application/json", {"www-authenticate": 'Basic realm="foundling"'})
        return False

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not self._allowed():
            return
        if path == "/page/info":
            self._json(200, {"models": self.server.models, "version": "0.1.0"})
        elif path == "/page/questions":
            self._json(200, {"questions": [{"question": one} for one in QUESTIONS]})
        else:
            file = PAGE / (path.lstrip("/") or "index.html")
            if file.is_file():
                kind = mimetypes.guess_type(file.name)[0] or "text/plain"
                self._send(200, file.read_bytes(), kind)
            else:
                self._send(404, b"not here", "text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._allowed():
            return
        if self.path == "/page/grade":
            truth = QUESTIONS[body["question"]]
            self._json(200, {"correct": truth in body["answer"], "truth": truth})
            return
        tokens = prompt_tokens(body)
        if self.path == "/tokenize":
            self._json(200, {"count": tokens})
            return
        self.server.asked.append(body)
        chat = self.path == "/v1/chat/completions"
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        if "refuse" in prompt:
            self._refuse(400, "the server is out of words; ask for fewer.")
            return
        if not self._fits(body, tokens):
            return
        text = reply_to(prompt) if chat else " and all was well."
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        try:
            for chunk in self._chunks(text, prompt, body, chat=chat):
                self.wfile.write(f"data: {chunk}\n\n".encode())
                self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.server.left += 1

    def _chunks(self, text: str, prompt: str, body: dict[str, Any], *, chat: bool) -> Iterator[str]:
        made = tokens_of(text)[: body.get("max_tokens")]
        for place, token in enumerate(made):
            time.sleep(self.server.pause)
            if "slow" in prompt and place == 4:
                self.server.go_on.wait(10)
            logprob, others = probabilities(token, place)
            if chat:
                top = [{"token": other, "logprob": value} for other, value in others]
                content = [{"token": token, "logprob": logprob, "top_logprobs": top}]
                choice: dict[str, Any] = {"delta": {"content": token}}
                choice["logprobs"] = {"content": content}
            else:
                legacy = {"tokens": [token], "token_logprobs": [logprob]}
                choice = {"text": token, "logprobs": {**legacy, "top_logprobs": [dict(others)]}}
            yield json.dumps({"choices": [{"index": 0, **choice, "finish_reason": None}]})
        end = {"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}
        yield json.dumps({"choices": [end]})
        usage = {"prompt_tokens": prompt_tokens(body), "completion_tokens": len(made)}
        yield json.dumps({"choices": [], "usage": usage})
        yield "[DONE]"


class StandIn(ThreadingHTTPServer):
    """The server; `url` is its page."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, models: list[dict[str, Any]], key: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = models
        self.key = key
        self.pause = 0.004
        self.asked: list[dict[str, Any]] = []
        self.left = 0
        self.go_on = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"

    def __enter__(self) -> "StandIn":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
