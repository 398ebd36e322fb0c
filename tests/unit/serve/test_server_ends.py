"""A server that ends, one whose model grows, and twenty clients: no request is lost."""

import asyncio
import json
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from foundling.config.errors import ConfigError
from foundling.serve import served_model
from foundling.serve.access import Limits
from foundling.serve.engine_thread import EngineEndedError, EngineThread
from foundling.serve.protocol import ApiError
from foundling.serve.server import KEYS_VARIABLE, read_keys
from foundling.serve.service import Service
from tests.serving import Family, Running, load, served

LONG = {"model": "chat", "messages": [{"role": "user", "content": "a"}], "ignore_eos": True}


@pytest.mark.parametrize("how", ["a second signal", "time"])
def test_what_does_not_end_is_told_so(family: Family, how: str) -> None:
    told: dict[bool, httpx.Response] = {}

    def ask(running: Running, stream: bool) -> None:
        body = {**LONG, "max_tokens": 60_000, "stream": stream}
        told[stream] = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)

    options = ("--max-length", "64000", "--cache-gb", "0.2")
    drain = "server.DRAIN_S = 1.0" if how == "time" else ""
    with served(family.chat, options=options, changes=drain) as running:
        asking = [threading.Thread(target=ask, args=(running, stream)) for stream in (True, False)]
        for one in asking:
            one.start()
        while running.gauge("running", "chat") < 2:
            time.sleep(0.05)
        running.process.send_signal(signal.SIGTERM)
        if how == "a second signal":
            time.sleep(0.3)
            running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
        for one in asking:
            one.join()
        log = running.log.read_text()
    assert told[False].status_code == 503
    assert told[False].json()["error"]["code"] == "server_ends"
    last = told[True].text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_ends"
    assert "2 answers were given up" in log
    assert "Traceback" not in log


def test_a_newer_checkpoint_is_taken_without_losing_a_request(
    family: Family, tmp_path: Path
) -> None:
    run, newest = tmp_path / "chat", Path("checkpoints", "step-00000006")
    shutil.copytree(family.chat, run)
    shutil.move(run / newest, tmp_path / "newest")
    with served(run, options=("--follow",), changes="served_model.FOLLOW_S = 0.1") as running:
        assert "is now of step" not in running.log.read_text()
        taken = threading.Event()

        def ask(number: int) -> list[int]:
            form = {"type": "json_object"} if number % 2 else {"type": "text"}
            body = {**LONG, "max_tokens": 9, "response_format": form, "stream": number % 3 == 0}
            statuses, rounds = list[int](), 0
            while not taken.is_set() or (rounds := rounds + 1) < 5:
                url = f"{running.url}/v1/chat/completions"
                statuses.append(httpx.post(url, json=body, timeout=30).status_code)
            return statuses

        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(ask, number) for number in range(6)]
            time.sleep(0.5)
            shutil.move(tmp_path / "newest", run / newest)
            deadline = time.monotonic() + 40
            while "is now of step 6" not in running.log.read_text():
                assert time.monotonic() < deadline, running.log.read_text()
                time.sleep(0.05)
            taken.set()
            statuses = {status for one in asked for status in one.result()}
        assert statuses == {200}
        assert running.is_idle("chat")


class Idle:
    """An engine with nothing to do."""

    class engine:  # noqa: N801
        has_work = False


def test_an_engine_that_has_ended_takes_nothing_on_and_the_next_one_is_asked() -> None:
    old = EngineThread(Idle(), "old")  # type: ignore[arg-type]
    late = EngineThread(Idle(), "late")  # type: ignore[arg-type]
    late.stop(when_idle=True)
    late.join()

    class Model:
        now: Any = type("Opened", (), {"thread": old})

    async def scene() -> None:
        with pytest.raises(EngineEndedError):
            await late.submit([])
        # What came into the queue after the last look is refused as well.
        old._commands.put(("stop", None))
        waiting = asyncio.create_task(old.submit([]))
        with pytest.raises(EngineEndedError):
            await asyncio.wait_for(waiting, 5)
        service = Service({}, Limits())
        model: Any = Model()
        with pytest.raises(ApiError, match="the server ends"):
            async with service.running(model, []):
                pass
        assert service.sequences == 0

    asyncio.run(scene())


def test_twenty_clients_stream_for_twenty_seconds(server: Running, record_property: Any) -> None:
    figures = load(server, clients=20, seconds=20)
    record_property("load", figures)
    print(figures)
    assert figures["p99 gap between tokens, ms"] < 2000
    assert figures["streams that ended"] > 100


def test_a_cache_that_does_not_fit_is_refused_and_following_halves_it(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(
        served_model, "ServedModel", lambda source, id, limits, cache: taken.append(cache)
    )
    import torch

    def open_all(gb: float, *, follow: bool) -> int:
        limits = served_model.EngineLimits(device=torch.device("cpu"), cache_bytes=int(gb * 1e9))
        served_model.open_models([str(family.chat)], limits, follow=follow)
        return taken.pop()

    assert open_all(0.5, follow=False) == 2 * open_all(0.5, follow=True)
    assert open_all(0, follow=True) < 0.6 * open_all(0, follow=False)
    with pytest.raises(ConfigError, match=r"--cache-gb asks for .* are left beside"):
        open_all(100_000, follow=False)


@pytest.mark.parametrize("text", ["", " , ", "\n"])
def test_a_variable_that_holds_no_key_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{KEYS_VARIABLE} holds no key"):
        read_keys(None)
    monkeypatch.delenv(KEYS_VARIABLE)
    assert read_keys(None) == ()
