"""A grammar holds an answer to its form, whatever the model would rather say."""

import json
import re

import pytest
import torch

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.generate.engine import Engine
from foundling.generate.grammar import LARGEST_GRAMMAR, Kind, compile_grammar
from foundling.generate.request import Request
from foundling.generate.sampling import Sampling
from foundling.generate.text import TextEngine
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.tokenizer.tokenizer import Tokenizer
from tests.village import Village

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def tokenizer(village: Village) -> Tokenizer:
    return Tokenizer.load(village.tokenizer)


@pytest.fixture(scope="module")
def text(tokenizer: Tokenizer) -> TextEngine:
    # With rows that no token of the tokenizer has.
    rows = tokenizer.vocab_size + 45
    model = Transformer(ModelConfig(vocab_size=rows, dim=32, layers=2, heads=2, ffn_dim=64))
    init_weights(model, 3)
    return TextEngine(Engine(model, "cpu", cache_bytes=4 << 20), tokenizer)


def answers(text: TextEngine, kind: Kind, form: str | list[str], seeds: int) -> list[str]:
    """Answers that came to their end."""
    tokenizer = text.tokenizer
    grammar = compile_grammar(tokenizer, kind, form)
    requests = [
        Request(
            prompt=[tokenizer.bos_id],
            max_tokens=60,
            sampling=Sampling(temperature=1.0, seed=seed),
            stop_ids=tokenizer.stop_ids,
            grammar=grammar,
        )
        for seed in range(seeds)
    ]
    found, ended = [""] * seeds, [False] * seeds
    for piece in text.stream([(request, ()) for request in requests]):
        assert not piece.error
        found[piece.number] += piece.text
        ended[piece.number] |= piece.finish == "stop"
    return [answer for answer, is_whole in zip(found, ended, strict=True) if is_whole]


def test_every_answer_that_ends_fits_its_form(text: TextEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}},
        "required": ["n", "b"],
        "additionalProperties": False,
    }
    found = answers(text, "json_schema", json.dumps(schema), 12)
    assert len(found) >= 4
    for answer in found:
        value = json.loads(answer)
        assert set(value) == {"n", "b"}
        assert isinstance(value["b"], bool)
    found = answers(text, "choice", ["the mill", "the church"], 12)
    assert set(found) == {"the mill", "the church"}
    found = answers(text, "regex", "[a-c]{3}[0-9]", 6)
    assert len(found) == 6
    assert all(re.fullmatch("[a-c]{3}[0-9]", answer) for answer in found)


def test_a_grammar_of_one_request_is_none_of_its_neighbours(text: TextEngine) -> None:
    tokenizer = text.tokenizer
    sampling = Sampling(temperature=1.0, seed=5)
    plain = Request(prompt=[tokenizer.bos_id], max_tokens=12, sampling=sampling)
    grammar = compile_grammar(tokenizer, "choice", ["yes", "no"])
    held = Request(prompt=[tokenizer.bos_id], max_tokens=12, sampling=sampling, grammar=grammar)
    [alone] = text.engine.complete([plain])
    beside, answer, again = text.engine.complete([plain, held, held])
    assert beside.ids == alone.ids
    assert tokenizer.decode(answer.ids) in ("yes", "no")
    assert answer.ids == again.ids


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", "3"),
        ("json_schema", f'{{"const": {-(2**63)}}}'),
        ("json_schema", '{"type": "nonsense"}'),
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", '{"$ref": "http://example.com/x"}'),
        ("json_schema", '{"properties":{"a":' * 2000 + "{}" + "}}" * 2000),
        ("json_schema", '{"enum": ["' + "x" * LARGEST_GRAMMAR + '"]}'),
        ("regex", "("),
        ("regex", "(?=a)b"),
        ("choice", []),
        ("choice", [""]),
        ("lark", "start: nothing"),
    ],
)
def test_what_is_no_grammar_is_refused_in_a_sentence(
    tokenizer: Tokenizer, kind: Kind, form: str | list[str]
) -> None:
    with pytest.raises(ConfigError, match=kind) as caught:
        compile_grammar(tokenizer, kind, form)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_mask_rules_out_rows_without_a_token(tokenizer: Tokenizer) -> None:
    logits = torch.zeros(tokenizer.vocab_size + 45)
    compile_grammar(tokenizer, "json").begin().mask(logits)
    allowed = logits.isfinite().nonzero()[:, 0].tolist()
    assert [tokenizer.decode([id]) for id in allowed if id < tokenizer.vocab_size] == ["{"]
    assert max(allowed) < tokenizer.vocab_size
