"""From text to text: several readers of one model, room for answers, samples and forms."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.generate import text as module
from foundling.generate.text import TextModel, open_engine
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.tokenizer.tokenizer import Tokenizer
from tests.village import Village


@pytest.fixture(scope="module")
def tokenizer(village: Village) -> Tokenizer:
    return Tokenizer.load(village.tokenizer)


def text_model(tokenizer: Tokenizer, context: int = 128) -> TextModel:
    size = tokenizer.vocab_size
    model = Transformer(ModelConfig(vocab_size=size, dim=32, layers=2, heads=2, ffn_dim=64))
    init_weights(model, 3)
    return TextModel(model, tokenizer, context)


HOW: dict[str, Any] = {"max_tokens": 12, "seed": 4, "ignore_eos": True}


def test_streams_scores_and_lists_of_one_model_do_not_disturb_each_other(
    tokenizer: Tokenizer,
) -> None:
    model = text_model(tokenizer)
    alone = "".join(model.stream("One", **HOW))
    assert model.generate("One", **HOW) == [alone]
    first, second = model.stream("One", **HOW), model.stream("Two", **HOW)
    begun = next(first), next(second)
    between = model.generate("One", **HOW), model.score("One two three " * 9)
    assert begun[0] + "".join(first) == alone
    assert begun[1] + "".join(second) == model.generate("Two", **HOW)[0]
    assert between[0] == [alone]
    scores = model._text.engine.score([[1] * 60, [2] * 50], [1, 1])
    next(scores)
    list(model.stream("One", **HOW))
    assert len(list(scores)) == 1


def test_samples_of_a_prompt_follow_each_other(tokenizer: Tokenizer) -> None:
    model = text_model(tokenizer)
    said = model.generate(["One", "Two"], n=3, **HOW)
    assert len(set(said)) == 6
    assert said[0] == model.generate("One", **HOW)[0]
    for wrong in ({"n": 0}, {"n": 2, "temperature": 0.0}):
        with pytest.raises(ConfigError):
            model.generate("One", **wrong)


def test_no_stop_ends_an_answer_before_its_least_length(tokenizer: Tokenizer) -> None:
    model = text_model(tokenizer)
    whole = model.generate("One", **HOW)[0]
    stop = [whole[2]]
    assert model.generate("One", stop=stop, **HOW) == [whole[: whole.index(stop[0])]]
    assert model.generate("One", stop=stop, min_tokens=12, **HOW) == [whole]


def test_an_answer_takes_a_form(tokenizer: Tokenizer) -> None:
    pytest.importorskip("llguidance")
    model = text_model(tokenizer)
    assert set(model.generate("One", choice=["yes", "no"], n=4)) <= {"yes", "no"}
    assert model.chat("One", regex="[ab]{3}").strip("ab") == ""
    found = model.generate("One", json_schema={"type": "boolean"}, temperature=0)
    assert found[0] in ("true", "false")
    with pytest.raises(ConfigError, match="one form"):
        model.generate("One", regex="a", choice=["b"])


def test_a_reply_is_as_long_as_the_cache_has_room_for(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module, "open_engine", lambda model, **more: open_engine(model, cache_bytes=1 << 20)
    )
    model = text_model(tokenizer, context=1_000_000)
    room = model._text.engine.longest
    assert room == 16 * (1 << 20) // (16 * 512)
    prompt = tokenizer.prompt([{"role": "user", "content": "hi"}])
    assert model._room(prompt) == room - len(prompt)
    with pytest.raises(ConfigError, match="does not fit the cache of 2,048 tokens"):
        model.generate("One", max_tokens=10**6)


@pytest.mark.parametrize(
    ("weights", "lacks", "compiled"), [(10, "", False), (10**9, "", True), (10**9, "cc", False)]
)
def test_blocks_are_compiled_on_cuda_where_they_can_be_and_it_pays(
    weights: int, lacks: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    parameter = SimpleNamespace(device=torch.device("cuda"), numel=lambda: weights)
    model: Any = SimpleNamespace(parameters=lambda: iter([parameter]))
    monkeypatch.setattr(module, "missing_for_compile", lambda kind: lacks)
    monkeypatch.setattr(module, "Engine", lambda model, **more: None)
    monkeypatch.setattr(module, "prepare", lambda model, weights, compiled: found.append(compiled))
    open_engine(model, weights="bf16")
    open_engine(model, weights="bf16", compiled=False)
    assert found == [compiled, False]
