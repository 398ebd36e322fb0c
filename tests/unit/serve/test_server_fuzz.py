"""A thousand requests that no client means: none gets a 500, none hangs, no neighbour is lost."""

import httpx
import pytest

from tests.fuzzing import fire, fire_by_schema
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
    pytest.importorskip("schemathesis")
    fired = fire_by_schema(server.url, 300)
    assert fired.wrong == []
    assert sum(fired.statuses.values()) >= 300
    assert server.is_idle("chat")
