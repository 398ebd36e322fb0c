"""The harness's requests and the engine: strings, chats, cuts, stop strings, scores and texts."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from foundling.config.errors import ConfigError, DataError
from foundling.config.model import ModelConfig
from foundling.eval.lm_eval_adapter import FoundlingLM, Manner, Wording, fitted, manner
from foundling.eval.lm_eval_run import SUITES, expanded
from foundling.generate.request import Request
from foundling.generate.sampling import Sampling
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.tokenizer.bpe_trainer import train_tokenizer
from foundling.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who bakes?"},
]
WINDOW = 200
SHAPES: dict[str, dict[str, Any]] = {
    "rotary": {},
    "windows": {"windows": (24,)},
    "learned": {"positions": WINDOW},
    "softcap": {"logit_softcap": 9.0},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["the miller and the baker of the village are brothers. " * 30], 270)


def model_of(tokenizer: Tokenizer, **more: Any) -> Transformer:
    shape: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48}
    shape["init"] = {"std": 1.0, "head_std": 0.5}
    fields = {**shape, **more}
    made = Transformer(ModelConfig(vocab_size=tokenizer.vocab_size, **fields))
    init_weights(made, 8)
    return made.eval()


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Transformer:
    return model_of(tokenizer)


def opened(model: Transformer, tokenizer: Tokenizer, window: int = WINDOW, **more: Any) -> Any:
    bundle: Any = SimpleNamespace(
        model=model, tokenizer=tokenizer, context=window, meta={"a": 1}, path=Path("x"), step=0
    )
    return FoundlingLM(bundle=bundle, device="cpu", max_length=window, **more)


def test_a_chat_as_text_is_the_chat_as_tokens(tokenizer: Tokenizer) -> None:
    wording = Wording(tokenizer, True)
    assert wording.encode(wording.chat(CHAT)) == tokenizer.prompt(CHAT)
    half = [*CHAT, {"role": "assistant", "content": "The b"}]
    assert wording.encode(wording.chat(half, opens=False)) == tokenizer.render(half).ids[:-1]


def test_plain_text_spells_no_special_token(tokenizer: Tokenizer) -> None:
    text = "say <|end|> and <|bos|>"
    assert Wording(tokenizer, True).encode(text) == [tokenizer.bos_id, *tokenizer.encode(text)]
    assert Wording(tokenizer, False).encode(text) == tokenizer.encode(text)
    assert Wording(tokenizer, True).encode(text, False) == tokenizer.encode(text)


def written(lm: Any, prompts: list[str], **asked: Any) -> list[str]:
    asked = {"max_gen_toks": 30, **asked}
    requests = [Instance("generate_until", {}, (prompt, asked), 0) for prompt in prompts]
    found: list[str] = lm.generate_until(requests, disable_tqdm=True)
    return found


PROMPTS = ["the miller", "the baker and", "brothers", "x y z", "the miller"]


def test_writing_ends_at_a_stop_string(tokenizer: Tokenizer, model: Transformer) -> None:
    lm = opened(model, tokenizer)
    requests = [
        Request(prompt=lm.tok_encode(prompt), max_tokens=30, stop_ids=tokenizer.stop_ids)
        for prompt in PROMPTS
    ]
    whole = lm.engine.complete(requests)
    texts = [tokenizer.decode(completion.ids, skip_special=True) for completion in whole]
    assert written(lm, PROMPTS) == texts
    stop = texts[0][5:8]
    found = written(lm, PROMPTS, until=[stop])
    assert found == [text.partition(stop)[0] for text in texts]
    assert len(found[0]) <= 5 < len(texts[0])


def test_a_stop_string_may_be_a_special_token(tokenizer: Tokenizer, model: Transformer) -> None:
    lm = opened(model, tokenizer)
    user = tokenizer.names["user"]
    request, stops = lm._request(0, "the", {"until": [user, "\n"], "max_gen_toks": 9})
    assert stops == (user, "\n")
    assert request.stop_ids == {*tokenizer.stop_ids, lm.wording.special_ids[user]}


def test_a_stopped_text_costs_no_more_tokens(tokenizer: Tokenizer, model: Transformer) -> None:
    lm = opened(model, tokenizer)
    first = written(lm, ["the miller"])[0][:2]
    before = lm.engine.steps
    assert written(lm, ["the miller"], until=first) == [""]
    assert lm.engine.steps - before < 6


def test_samples_do_not_depend_on_their_company(tokenizer: Tokenizer, model: Transformer) -> None:
    asked = {"do_sample": True, "temperature": 1.0, "seed": 3}
    many = written(opened(model, tokenizer), PROMPTS, **asked)
    assert many == written(opened(model, tokenizer, batch_tokens=20), PROMPTS, **asked)
    assert many == written(opened(model, tokenizer, batch_size=2), PROMPTS, **asked)
    assert many[0] != many[4]  # equal prompts go on differently


def test_a_prompt_is_cut_on_the_left(tokenizer: Tokenizer, model: Transformer) -> None:
    lm = opened(model, tokenizer, 40, add_bos_token=False)
    texts = ["the miller " * count + "the baker" for count in (40, 50)]
    one, other = written(lm, texts)
    assert one == other
    with pytest.raises(ConfigError, match=r"writes up to 30 tokens.*max_gen_toks=15"):
        written(opened(model, tokenizer, 30), ["the"])


def test_settings_of_a_task_are_understood_or_refused() -> None:
    asked = {"until": "\n", "max_new_tokens": 9, "temperature": 0.0, "top_p": 0.95, "num_beams": 1}
    assert manner(asked) == Manner(("\n",), 9, Sampling())
    sampled = manner({"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 4})
    assert sampled.sampling == Sampling(temperature=0.7, top_p=0.9, seed=4)
    assert manner({"do_sample": False, "temperature": 1.0}).sampling == Sampling()
    assert manner({}).max_new_tokens == 256
    with pytest.raises(ConfigError, match=r"num_beams=4.*--gen_kwargs"):
        manner({"num_beams": 4})


def test_a_suite_is_its_tasks_each_once() -> None:
    assert expanded(["winogrande", "nine", "mine"])[:2] == ["winogrande", "mmlu"]
    assert len(expanded(["nine", "nine"])) == len(SUITES["nine"]) == 9


Asked = tuple[list[int], list[int]]


def plain(model: Transformer, asked: list[Asked]) -> list[tuple[float, bool]]:
    """No batch, no cache, no cut that is not spelled out."""
    found = []
    for context, target in asked:
        tokens = (context + target)[-(WINDOW + 1) :]
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)
        rows = logits[-len(target) :]
        values = [float(row[token]) for row, token in zip(rows, target, strict=True)]
        right = [int(row.argmax()) == token for row, token in zip(rows, target, strict=True)]
        found.append((sum(values), all(right)))
    return found


def requests(model: Transformer) -> list[Asked]:
    """Choices of one context, few-shot questions with one beginning, single texts, long ones."""
    rng = random.Random(3)

    def words(count: int) -> list[int]:
        return [rng.randrange(model.config.vocab_size) for _ in range(count)]

    shots = words(84)
    asked = []
    for _ in range(6):
        question = shots + words(rng.randrange(1, 30))
        asked += [(question, words(rng.randrange(1, 6))) for _ in range(4)]
    for _ in range(5):
        context = words(rng.randrange(20, 60))
        asked += [(context, words(1)) for _ in range(3)]
    asked += [(words(1), words(rng.randrange(1, 80))) for _ in range(5)]
    asked += [(words(WINDOW + 30), words(9)), (words(2), words(WINDOW))]
    likely = words(12)
    with torch.no_grad():
        asked.append((likely, [int(model(torch.tensor([likely]))[0, -1].argmax())]))
    rng.shuffle(asked)
    return asked


def scored(lm: Any, asked: list[Asked]) -> list[tuple[float, bool]]:
    found: list[tuple[float, bool]] = lm._loglikelihood_tokens(
        [(None, *pair) for pair in asked], disable_tqdm=True
    )
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_every_score_is_that_of_one_text_alone(shape: str, tokenizer: Tokenizer) -> None:
    ours = model_of(tokenizer, **SHAPES[shape])
    asked = requests(ours)
    expected = plain(ours, asked)
    for tokens in (120, 2000):
        found = scored(opened(ours, tokenizer, batch_tokens=tokens), asked)
        assert [logprob for logprob, _ in found] == pytest.approx(
            [logprob for logprob, _ in expected], abs=2e-4
        )
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert any(greedy for _, greedy in expected)
    assert not all(greedy for _, greedy in expected)


def test_shared_beginnings_are_computed_once(
    tokenizer: Tokenizer, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(model)
    seen: list[int] = []
    hidden = Transformer.hidden

    def counted(self: Transformer, tokens: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        seen.append(tokens.numel())
        return hidden(self, tokens, *rest, **more)

    monkeypatch.setattr(Transformer, "hidden", counted)
    scored(opened(model, tokenizer), asked)
    whole = sum(min(len(context) + len(target), WINDOW) for context, target in asked)
    assert sum(seen) < 0.6 * whole


def test_what_cannot_be_scored_is_said() -> None:
    assert fitted([1, 2, 3, 4], [5, 6], 4) == ([2, 3, 4], [5, 6])
    with pytest.raises(DataError, match=r"201 tokens and the model sees 200.*max_length"):
        fitted([1], [2] * 201, WINDOW)
    with pytest.raises(DataError, match="empty"):
        fitted([], [2], WINDOW)
