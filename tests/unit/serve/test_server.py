"""OpenAI's client against the real process over TCP, with a trained tiny model."""

import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.serving import Family, Running, served

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Who is the baker?"}]


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.client()


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "chat", "messages": HELLO, "max_tokens": 8, "seed": 1, **more}
    )


def refusal(client: openai.OpenAI, **more: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, **more)
    return caught.value


def test_models_are_listed_and_found(client: openai.OpenAI, server: Running) -> None:
    assert [model.id for model in client.models.list()] == ["chat", "base"]
    assert client.models.retrieve("base").id == "base"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-7'"):
        client.models.retrieve("gpt-7")
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"


def test_a_chat_is_answered_and_its_tokens_counted(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.choices[0].message.role == "assistant"
    assert 0 < answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_seed_gives_the_same_answer_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = ask(client, max_completion_tokens=8).choices[0].message.content
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-1].usage.completion_tokens == 8
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert ask(client, seed=2).choices[0].message.content != whole


def test_n_answers_differ_and_the_first_is_the_one_alone(client: openai.OpenAI) -> None:
    alone = ask(client).choices[0].message.content
    four = ask(client, n=4)
    texts = [choice.message.content for choice in four.choices]
    assert texts[0] == alone
    assert len(set(texts)) == 4
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
    assert four.usage.completion_tokens == 32
    streamed = [""] * 4
    for chunk in ask(client, n=4, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_a_prompt_that_came_before_is_told_as_cached(client: openai.OpenAI) -> None:
    long: list[ChatCompletionMessageParam] = [{"role": "user", "content": "tell me more " * 8}]
    first, again = (ask(client, messages=long, max_tokens=1).usage for _ in range(2))
    assert again.prompt_tokens_details.cached_tokens > 0
    assert again.prompt_tokens_details.cached_tokens % 16 == 0
    assert again.prompt_tokens == first.prompt_tokens


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=24).choices[0].message.content
    stop = whole[len(whole) // 2]
    cut = ask(client, max_tokens=24, stop=[stop]).choices[0]
    assert cut.message.content == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


def test_logprobs_and_bias(client: openai.OpenAI) -> None:
    entries = ask(client, temperature=0, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy: the likeliest
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    tokens = httpx.post(
        str(client.base_url).replace("/v1/", "/tokenize"),
        json={"model": "chat", "prompt": "a", "add_special_tokens": False},
    ).json()["tokens"]
    biased = ask(client, logit_bias={str(tokens[0]): 100}).choices[0].message.content
    assert biased == "a" * 8


def test_a_json_schema_holds_the_answer(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"trade": {"enum": ["baker", "miller"]}, "age": {"type": "integer"}},
        "required": ["trade", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for seed in range(4):
        choice = ask(client, max_tokens=80, seed=seed, response_format=form).choices[0]
        if choice.finish_reason == "stop":
            found = json.loads(choice.message.content)
            assert found["trade"] in ("baker", "miller")
            assert isinstance(found["age"], int)
            break
    else:
        pytest.fail("no answer ended")
    text = ask(client, response_format={"type": "json_object"}).choices[0].message.content
    assert text.startswith("{")


def test_completions_of_texts_tokens_and_lists(client: openai.OpenAI) -> None:
    def complete(prompt: Any, **more: Any) -> Any:
        asked = {"model": "base", "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
        return client.completions.create(**asked)

    text = complete("About the mill").choices[0].text
    url = str(client.base_url).replace("/v1/", "/tokenize")
    ids = httpx.post(url, json={"model": "base", "prompt": "About the mill"}).json()["tokens"]
    assert complete(ids).choices[0].text == text
    both = complete(["About the mill", "One morning"])
    assert both.choices[0].text == text
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [c.text for c in complete([ids, ids]).choices] == [text, text]
    echoed = complete("About the mill", echo=True, logprobs=2).choices[0]
    assert echoed.text == "About the mill" + text
    logprobs = echoed.logprobs
    assert len(logprobs.tokens) == len(ids) + 4
    assert logprobs.token_logprobs[0] is None
    assert all(chance <= 0 for chance in logprobs.token_logprobs[1:])
    assert echoed.text[logprobs.text_offset[len(ids)] :] == text
    scored = complete("About the mill", echo=True, logprobs=2, max_tokens=0).choices[0]
    assert scored.text == "About the mill"
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(
        logprobs.token_logprobs[1 : len(ids)], abs=1e-4
    )
    streamed = complete("About the mill", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == echoed.text


def test_offsets_stay_within_the_text_where_characters_are_split(client: openai.OpenAI) -> None:
    choice = client.completions.create(
        model="base", prompt="Où est 日本?", echo=True, logprobs=0, max_tokens=0
    ).choices[0]
    offsets, tokens = choice.logprobs.text_offset, choice.logprobs.tokens  # type: ignore[union-attr]
    assert any(token.startswith("bytes:") for token in tokens)
    assert offsets == sorted(offsets)
    assert tokens[-1] == choice.text[offsets[-1] :] == "?"


def test_tokens_go_and_come_back(server: Running) -> None:
    ids = httpx.post(
        f"{server.url}/tokenize", json={"model": "base", "prompt": "Où est-il?"}
    ).json()
    assert ids["count"] == len(ids["tokens"]) == len(ids["token_strs"])
    back = httpx.post(
        f"{server.url}/detokenize", json={"model": "base", "tokens": ids["tokens"][1:]}
    )
    assert back.json()["prompt"] == "Où est-il?"
    chat = httpx.post(f"{server.url}/tokenize", json={"model": "chat", "messages": HELLO}).json()
    assert chat["token_strs"][:2] == ["<|bos|>", "<|user|>"]


def test_what_has_no_effect_is_listed_and_what_is_not_supported_refused(server: Running) -> None:
    body = {"model": "chat", "messages": HELLO, "max_tokens": 1, "temperature": 0, "top_p": 0.9}
    body |= {"user": "me", "metadata": {}, "modalities": ["text"], "audio": None, "seed": 3}
    body |= {"stream": True, "stream_options": {"include_obfuscation": False}}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200
    listed = set(answer.headers["x-foundling-ignored"].split(","))
    unused = "stream_options.include_obfuscation"
    assert listed == {"user", "metadata", "modalities", "audio", "top_p", "seed", unused}
    for field, value in {"audio": {"voice": "x"}, "modalities": ["audio"], "grammer": 1}.items():
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages is empty"),
    ({"model": "base"}, "never taught to answer"),
    ({"model": "other"}, "there is no model 'other'"),
    ({"messages": [{"role": "user", "content": "word " * 500}]}, "context"),
    ({"messages": [{"role": "user", "content": "x" * 900_000}]}, "context"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "role 'tool'"),
    ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, "name is not known"),
    ({"max_tokens": 100_000}, "context"),
    ({"max_tokens": 0}, "above zero"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "differ"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"n": 0}, "n is not valid"),
    ({"n": 129}, "n is not valid"),
    ({"stop": ["x"] * 3000}, "3,000 stop strings"),
    ({"stop": [""]}, "a stop string is empty"),
    ({"logit_bias": {"99999": 1}}, "'99999'"),
    ({"logit_bias": {"a": 1}}, "'a'"),
    ({"top_logprobs": 3}, "logprobs true"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "template has no tools"),
    ({"tool_choice": "required"}, "no tools"),
    ({"response_format": {"type": "json_schema"}}, "has no schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {
        "name": "s", "schema": {"type": "string", "pattern": "(?=a)b"}}}}, "looks around"),
    *(
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": schema},
                }
            },
            "json_schema",
        )
        for schema in (
            {"type": "nonsense"},
            {"$ref": "#"},
            {"$ref": "file:///etc/passwd"},
            {"enum": ["x" * 70_000]},
            {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(30)]}
                       for i in range(30)]},
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("more", "told"), BAD, ids=[told for _, told in BAD])
def test_bad_input_is_one_sentence(client: openai.OpenAI, more: dict[str, Any], told: str) -> None:
    error = refusal(client, extra_body=more)
    assert error.status_code in (400, 404)
    message = error.body["message"]  # type: ignore[index]
    assert told in message
    assert "\n" not in message
    assert message.endswith(".")


RAW: dict[str, bytes] = {
    "no JSON": b"{",
    "no object": b"[]",
    "NaN": b'{"model":"base","prompt":"a","temperature":NaN}',
    "infinity": b'{"model":"base","prompt":"a","top_p":1e999}',
    "not UTF-8": b'{"model":"base","prompt":"\xff"}',
    "a surrogate": b'{"model":"base","prompt":"\\ud800"}',
    "deep": b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a huge number": b'{"model":"base","prompt":"a","seed":' + b"9" * 5000 + b"}",
    "an empty prompt": b'{"model":"base","prompt":[]}',
    "an empty list": b'{"model":"base","prompt":[[]]}',
    "unknown tokens": b'{"model":"base","prompt":[5,123456]}',
    "a token below": b'{"model":"base","prompt":[-1]}',
    "mixed": b'{"model":"base","prompt":[1,"a"]}',
}


@pytest.mark.parametrize("name", RAW)
def test_bodies_that_are_none(server: Running, name: str) -> None:
    json_type = {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=RAW[name], headers=json_type)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_client_that_leaves_frees_its_blocks(server: Running, client: openai.OpenAI) -> None:
    asked = {"model": "chat", "messages": HELLO, "ignore_eos": True, "n": 64}
    place = urlsplit(server.url)
    for stream in (True, False):
        body = json.dumps({**asked, "stream": stream})
        leaving = http.client.HTTPConnection(place.netloc, timeout=10)
        leaving.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        if stream:
            assert leaving.getresponse().read(10)
        leaving.close()
        assert server.is_idle("chat")
    assert server.gauge("cancelled_total", "chat") > 0


def test_twenty_clients_at_once_get_what_they_get_alone(
    server: Running, client: openai.OpenAI
) -> None:
    def streamed(seed: int) -> str:
        chunks = ask(client, seed=seed, stream=True, max_tokens=20)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    alone = [streamed(seed) for seed in range(5)]
    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(streamed, [seed % 5 for seed in range(60)]))
    assert together == [alone[seed % 5] for seed in range(60)]
    assert server.is_idle("chat")


def test_the_page_and_what_it_asks(server: Running) -> None:
    page = httpx.get(server.url)
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    info = httpx.get(f"{server.url}/page/info").json()
    assert [(m["id"], m["can_chat"], m["is_hamlet"]) for m in info["models"]] == [
        ("chat", True, True),
        ("base", False, True),
    ]
    [first, *_] = httpx.get(f"{server.url}/page/questions?model=chat").json()["questions"]

    def grade(answer: str) -> Any:
        asked = {"model": "chat", "question": first["question"], "answer": answer}
        return httpx.post(f"{server.url}/page/grade", json=asked).json()

    wrong = grade("I would rather not say it.")
    assert not wrong["correct"]
    assert grade(wrong["truth"])["correct"]
    for name in ("../server.py", "%2e%2e/server.py", "..%2fserver.py", "/etc/passwd", "page"):
        assert httpx.get(f"{server.url}/{name}").status_code == 404


def test_sigterm_lets_answers_end_and_prompts_are_not_logged(family: Family) -> None:
    with served(family.chat) as running:
        client = running.client()
        stream = ask(client, stream=True, max_tokens=100, extra_body={"ignore_eos": True})
        first = next(iter(stream))
        ended = threading.Thread(target=running.end)
        ended.start()
        rest = list(stream)
        ended.join()
        assert first.choices[0].delta.role == "assistant"
        assert rest[-1].choices[0].finish_reason == "length"
        assert running.process.returncode == 0
        log = running.log.read_text()
        assert "POST /v1/chat/completions 200" in log
        assert "baker" not in log


def test_two_models_of_one_name_and_what_is_none(family: Family, tmp_path: Path) -> None:
    from foundling.serve.served_model import _names

    assert _names(["runs/a/chat", "runs/b/chat"]) == ["a/chat", "b/chat"]
    assert _names(["runs/a", "runs/a"]) == ["runs/a-1", "runs/a-2"]
