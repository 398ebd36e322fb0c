"""Prompts as strings: what becomes of special tokens, stop strings and settings."""

from typing import Any

import pytest
import torch

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.eval.lm_eval_generation import Manner, Wording, Writer, manner
from foundling.eval.lm_eval_run import SUITES, expanded
from foundling.generate.engine import Engine
from foundling.generate.sampling import Sampling
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.tokenizer.bpe_trainer import train_tokenizer
from foundling.tokenizer.tokenizer import Tokenizer

CPU = torch.device("cpu")
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who bakes?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["the miller and the baker of the village are brothers. " * 30], 270)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Transformer:
    made = Transformer(
        ModelConfig(
            vocab_size=tokenizer.vocab_size,
            dim=32,
            layers=2,
            heads=4,
            ffn_dim=48,
            init_std=1.0,
            init_head_std=0.5,
        )
    )
    init_weights(made, 8)
    return made.eval()


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


def test_writing_ends_at_a_stop_string(tokenizer: Tokenizer, model: Transformer) -> None:
    wording = Wording(tokenizer, True)
    prompts = ["the miller", "the baker and", "brothers", "x y z"]
    whole = Engine(model, CPU).generate(
        [wording.encode(prompt) for prompt in prompts], 30, Sampling(), tokenizer.stop_ids
    )
    texts = [tokenizer.decode(completion.ids, skip_special=True) for completion in whole]
    stop = texts[0][5:8]
    found = written(Writer(model, wording, CPU, window=64), prompts, (stop,))
    assert found == [text.partition(stop)[0] for text in texts]
    assert len(found[0]) <= 5 < len(texts[0])


def written(writer: Writer, prompts: list[str], until: tuple[str, ...], **more: Any) -> list[str]:
    found = [""] * len(prompts)
    how = Manner(until, 30, Sampling(**more))
    writer.write(prompts, how, lambda place, text: found.__setitem__(place, text))
    return found


def test_a_stopped_row_costs_no_more_tokens(
    tokenizer: Tokenizer, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wording = Wording(tokenizer, True)
    first = written(Writer(model, wording, CPU, window=64), ["the miller"], ())[0][:2]
    steps = []
    decode = Transformer.decode
    monkeypatch.setattr(
        Transformer,
        "decode",
        lambda *args: steps.append(1) or decode(*args),  # type: ignore[func-returns-value]
    )
    assert written(Writer(model, wording, CPU, window=64), ["the miller"], (first,)) == [""]
    assert len(steps) < 6


def test_rows_are_halved_when_memory_runs_out(
    tokenizer: Tokenizer, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wording = Wording(tokenizer, True)
    prompts = [f"the {word}" for word in ["miller", "baker", "village", "brothers", "are", "of"]]
    expected = written(Writer(model, wording, CPU, window=64), prompts, ("t",))
    decode = Transformer.decode

    def narrow(self: Transformer, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        if len(tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(self, tokens, *rest)

    monkeypatch.setattr(Transformer, "decode", narrow)
    writer = Writer(model, wording, CPU, window=64)
    assert written(writer, prompts, ("t",)) == expected
    assert writer.engine.max_batch <= 2


def test_a_prompt_is_cut_on_the_left(tokenizer: Tokenizer, model: Transformer) -> None:
    writer = Writer(model, Wording(tokenizer, False), CPU, window=40)
    assert written(writer, ["the miller " * 40 + "the baker"], ()) == written(
        writer, ["the miller " * 50 + "the baker"], ()
    )
    with pytest.raises(ConfigError, match=r"writes up to 30 tokens.*max_gen_toks=15"):
        written(Writer(model, Wording(tokenizer, False), CPU, window=30), ["the"], ())


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
