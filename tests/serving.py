"""A server process for tests: started, asked over TCP, ended by SIGTERM."""

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from foundling.config.load import load_config
from foundling.runtime.run_dir import RunDir
from tests.village import TINY, Village

ROOT = Path(__file__).parents[1]
START_S = 90
SETTINGS = {
    **TINY,
    "train.seq-len": "128",
    "train.batch-size": "2",
    "train.horizon": "6",
    "checkpoint.every": "3",
    "optim.lr": "0.003",
}
TOOLS_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>tools:{% for tool in tools %}"
    "{{ tool['function'] | tojson }}{% endfor %} call: <tool_call>{}</tool_call><|end|>{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>"
    "{{ call['function'] | tojson }}</tool_call>{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""In the way of Hermes and Qwen."""


@dataclass(frozen=True)
class Family:
    """Runs to serve."""

    base: Path
    """Pretrained."""
    chat: Path
    """Fine-tuned on it."""
    tools: Path
    """The same with a template that knows tools."""


def raise_family(home: Path, village: Village) -> Family:
    """Two runs of a few steps, and one with another template."""
    from shutil import copytree

    from foundling.train import loop

    base = load_config("hamlet", SETTINGS)
    base = base.replace(data={"sources": {str(village.text): 1.0}})
    loop.train(base, RunDir(home / "base"))
    chat = load_config("hamlet-chat", {**SETTINGS, "train.start": str(home / "base")})
    chat = chat.replace(data={"sources": {str(village.chat): 1.0}})
    loop.train(chat, RunDir(home / "chat"))
    copytree(home / "chat", home / "tools")
    (home / "tools" / "tokenizer" / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    return Family(home / "base", home / "chat", home / "tools")


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    process: subprocess.Popen[str]
    log: Path
    clients: list[openai.OpenAI] = field(default_factory=list)
    """Closed in the end."""

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        """OpenAI's own client."""
        url = f"{self.url}/v1"
        made = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60, **options)
        self.clients.append(made)
        return made

    def gauge(self, name: str, model: str) -> float:
        """A number of /metrics."""
        text = httpx.get(f"{self.url}/metrics").text
        found = re.search(rf'^foundling_{name}{{model="{model}"}} (\S+)$', text, re.MULTILINE)
        assert found, text
        return float(found[1])

    def is_idle(self, model: str, within_s: float = 10.0) -> bool:
        """Whether all blocks of the cache are free, now or soon."""
        names = ("running", "waiting", "blocks_used")
        deadline = time.monotonic() + within_s
        while any(self.gauge(name, model) for name in names):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def resident_bytes(self) -> int:
        """Memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]

    def end(self, within_s: float = 30.0) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within_s)


@contextmanager
def served(
    *sources: Path,
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    changes: str = "",
) -> Iterator[Running]:
    """A server of these models on a free port, with `changes` to `served_model` and `server`."""
    program = f"from foundling.serve import served_model, server; {changes or 'pass'}\n"
    program += "from foundling.__main__ import main; main()"
    words = ["serve", *map(str, sources), "--port", "0", *options]
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", program, *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            )
        try:
            running = Running(_address(process, log), process, log)
            yield running
            for client in running.clients:
                client.close()
        finally:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[str], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while not (found := re.search(r"open (http://\S+) in a browser", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return found[1]


def load(running: Running, clients: int, seconds: float) -> dict[str, Any]:
    """So many clients that stream from the model `chat`, one request after the other: every one
    ends, memory is flat, no block is held in the end; what was measured."""
    stop = time.monotonic() + seconds
    lock = threading.Lock()
    gaps, firsts, ended, refused = list[float](), list[float](), 0, 0
    resident: list[int] = []

    def client(number: int) -> None:
        nonlocal ended, refused
        with httpx.Client(timeout=120) as http:
            asked = 0
            while time.monotonic() < stop:
                asked += 1
                own_gaps, first = list[float](), 0.0
                began = last = time.perf_counter()
                body = {
                    "model": "chat",
                    "messages": [{"role": "user", "content": f"Who is number {number}?"}],
                    "stream": True,
                    "max_tokens": 8 + (number * 7 + asked * 13) % 80,
                    "seed": asked,
                }
                whole = False
                with http.stream("POST", f"{running.url}/v1/chat/completions", json=body) as answer:
                    if answer.status_code == 429:
                        with lock:
                            refused += 1
                        time.sleep(float(answer.headers["retry-after"]))
                        continue
                    assert answer.status_code == 200, answer.read()
                    for line in answer.iter_lines():
                        if '"content"' in line:
                            now = time.perf_counter()
                            own_gaps.append(now - last)
                            last, first = now, first or now - began
                        whole = whole or line == "data: [DONE]"
                assert whole, "a stream ended without its end"
                with lock:
                    ended += 1
                    gaps.extend(own_gaps[2:])
                    firsts.append(first)

    def watch() -> None:
        while time.monotonic() < stop:
            resident.append(running.resident_bytes())
            time.sleep(min(2, seconds / 40))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(clients) as pool:
        for _ in pool.map(client, range(clients)):
            pass
    watcher.join()
    assert running.is_idle("chat", 30), "blocks are held although nobody asks"
    third = max(1, len(resident) // 3)
    early, late = (
        statistics.median(resident[third : 2 * third]),
        statistics.median(resident[-third:]),
    )
    figures = {
        "clients": clients,
        "seconds": seconds,
        "streams that ended": ended,
        "told to come again": refused,
        "tokens": round(running.gauge("generated_tokens_total", "chat")),
        "p50 gap between tokens, ms": round(1e3 * _share(gaps, 0.5), 1),
        "p99 gap between tokens, ms": round(1e3 * _share(gaps, 0.99), 1),
        "p50 first token, ms": round(1e3 * _share(firsts, 0.5), 1),
        "p99 first token, ms": round(1e3 * _share(firsts, 0.99), 1),
        "resident, MB: middle and end": [round(early / 1e6), round(late / 1e6)],
    }
    assert ended > clients, figures
    assert late < 1.05 * early, figures
    return figures


def _share(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
