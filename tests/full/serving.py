"""A server under load: 200 streams, 50,000 fuzzed requests, and what it adds to a token."""

import asyncio
import json
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as every command of foundling

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.fuzzing import fire, fire_by_schema
from tests.serving import SETTINGS, Running, load, raise_family, served
from tests.village import build_village

CLIENTS = int(os.environ.get("SERVING_CLIENTS", "200"))
MINUTES = float(os.environ.get("SERVING_MINUTES", "5"))
REQUESTS = int(os.environ.get("SERVING_REQUESTS", "50000"))
BY_SCHEMA = REQUESTS // 5
"""Of them, those that schemathesis makes from the served schema."""
STREAMS, TOKENS, ROUNDS = 64, 64, 3
MOST_OVERHEAD = 0.15
"""Of the engine's time per token, on two cores."""
LARGER = {"model.dim": "512", "model.layers": "8", "model.heads": "8", "model.ffn-dim": "1536"}
Figures = dict[str, Any]


def serving() -> Figures:
    """200 streaming clients for five minutes, then 50,000 fuzzed requests, on one server."""
    with tempfile.TemporaryDirectory() as home:
        family = raise_family(Path(home) / "runs", build_village(Path(home)))
        with served(family.chat, family.base, options=("--quiet",)) as running:
            figures: Figures = {"load": load(running, CLIENTS, 60 * MINUTES)}
            figures["fuzz"] = _fuzz(running)
            assert running.end() == 0, "the server did not end cleanly"
    return figures


def _fuzz(running: Running) -> Figures:
    before = running.resident_bytes()
    began = time.monotonic()
    by_schema = fire_by_schema(running.url, BY_SCHEMA)
    made = sum(by_schema.statuses.values())
    fired = fire(running.url, seed=29, count=REQUESTS - made)
    fired.statuses += by_schema.statuses
    fired.wrong += by_schema.wrong
    figures = {
        "requests": sum(fired.statuses.values()),
        "of them by schemathesis": made,
        "seconds": round(time.monotonic() - began, 1),
        "by status": {str(status): count for status, count in sorted(fired.statuses.items())},
        "wrong": fired.wrong[:5],
        "resident, MB: before and after": [
            round(size / 1e6) for size in (before, running.resident_bytes())
        ],
    }
    assert not fired.wrong, figures
    assert made > BY_SCHEMA // 2, figures
    assert running.is_idle("chat", 30), "blocks are held after the fuzzed requests"
    assert running.is_idle("base", 30), "blocks are held after the fuzzed requests"
    return figures


def server_overhead() -> Figures:
    """What the server adds to the engine's time per token at 64 streams: medians of rounds."""
    from foundling.config.load import load_config
    from foundling.runtime.run_dir import RunDir
    from foundling.train import loop

    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        village = build_village(home)
        config = load_config("hamlet", {**SETTINGS, **LARGER, "train.horizon": "1"})
        config = config.replace(data={"sources": {str(village.text): 1.0}})
        loop.train(config, RunDir(home / "model"))
        # A thread for each engine: the clients, who compute here too, have the other core.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        engine = _Engine(home / "model")
        alone, behind = list[tuple[float, float]](), list[tuple[float, float]]()
        with served(home / "model", options=("--quiet",)) as running:
            for number in range(ROUNDS + 1):
                begun = _processor_s(os.getpid())
                here = engine.time(seed=number), _processor_s(os.getpid()) - begun
                begun = _processor_s(running.process.pid)
                wall = asyncio.run(_stream_all(running.url, number))
                there = wall, _processor_s(running.process.pid) - begun
                if number:  # the first warms both up
                    alone.append(here)
                    behind.append(there)
    tokens = STREAMS * TOKENS

    def per_token(pairs: list[tuple[float, float]], which: int) -> list[float]:
        return [round(1e6 * pair[which] / tokens, 1) for pair in pairs]

    def overhead(which: int) -> float:
        medians = [statistics.median(per_token(pairs, which)) for pairs in (behind, alone)]
        return round(medians[0] / medians[1] - 1, 4)

    figures = {
        "streams": STREAMS,
        "tokens each": TOKENS,
        "parameters": engine.parameters,
        "engine, us per token": per_token(alone, 0),
        "server, us per token": per_token(behind, 0),
        "overhead": overhead(0),
        # What other programs do beside the measurement does not change these.
        "engine, us of processor per token": per_token(alone, 1),
        "server, us of processor per token": per_token(behind, 1),
        "overhead of processor": overhead(1),
    }
    assert overhead(0) < MOST_OVERHEAD, figures
    return figures


def _prompt(seed: int, number: int) -> str:
    return f"About {seed} and {number}"


class _Engine:
    """The same model in this process, without a server."""

    def __init__(self, run: Path) -> None:
        from foundling.checkpoint.bundle import load_bundle
        from foundling.generate.text import TextEngine, open_engine

        bundle = load_bundle(run)
        self.parameters = sum(p.numel() for p in bundle.model.parameters())
        self._text = TextEngine(
            open_engine(bundle.model, max_length=bundle.context), bundle.tokenizer
        )

    def time(self, seed: int) -> float:
        """Seconds for all streams."""
        from foundling.generate.request import Request
        from foundling.generate.sampling import Sampling

        tokenizer = self._text.tokenizer
        requests = [
            Request(
                prompt=[tokenizer.bos_id, *tokenizer.encode(_prompt(seed, number))],
                max_tokens=TOKENS,
                sampling=Sampling(temperature=1.0, seed=number),
            )
            for number in range(STREAMS)
        ]
        began = time.perf_counter()
        counts = [0] * STREAMS
        for piece in self._text.stream([(request, ()) for request in requests]):
            counts[piece.number] += piece.output is not None and piece.output.id is not None
        assert counts == [TOKENS] * STREAMS
        return time.perf_counter() - began


async def _stream_all(url: str, seed: int) -> float:
    """Seconds until the last of all streams has ended; clients that cost next to nothing."""
    host, port = url.removeprefix("http://").split(":")

    async def one(number: int) -> int:
        body = json.dumps(
            {
                "model": "model",
                "prompt": _prompt(seed, number),
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "seed": number,
                "stream": True,
            }
        ).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        said = b"".join([chunk async for chunk in _chunks(reader)])
        writer.close()
        assert b"[DONE]" in said, said[-500:]
        return said.count(b"data: ")

    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(STREAMS)))
    return time.perf_counter() - began


async def _chunks(reader: asyncio.StreamReader) -> Any:
    while chunk := await reader.read(1 << 16):
        yield chunk


def _processor_s(process: int) -> float:
    """Seconds that a process has computed, with all its threads."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
