"""A thousand requests that no client means: none gets a 500, none hangs, no neighbour is lost."""

import warnings

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzzing import fire
from tests.serving import Running


def test_hand_made_requests(server: Running) -> None:
    alone = {"model": "chat", "messages": [{"role": "user", "content": "Who?"}], "seed": 3}
    before = httpx.post(f"{server.url}/v1/chat/completions", json=alone).json()["choices"]
    fired = fire(server.url, seed=20, count=700)
    assert fired.wrong == []
    assert fired.statuses[200] > 50
    assert fired.statuses[400] > 300
    assert server.is_idle("chat")
    assert server.is_idle("base")
    after = httpx.post(f"{server.url}/v1/chat/completions", json=alone).json()["choices"]
    assert after == before


def test_requests_made_from_the_served_schema(server: Running) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schemathesis = pytest.importorskip("schemathesis")
        served = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in served.get_all_operations()]
    assert len(operations) >= 10
    counted = 0
    for operation in operations:
        examples = 60 if operation.method.upper() == "POST" else 10

        @settings(
            max_examples=examples, deadline=None, database=None, derandomize=True,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def ask(case: object) -> None:
            nonlocal counted
            counted += 1
            answer = case.call(timeout=30)  # type: ignore[attr-defined]
            assert answer.status_code < 500

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ask()
    assert counted >= 250
