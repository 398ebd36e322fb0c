"""A vocabulary that grows: new tokens at the end, ids that never move, embeddings that follow."""

import json
from pathlib import Path

import jinja2
import pytest
import torch
from bpe_samples import TEXT, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError, DataError
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.data.build.build import build
from foundling.data.open_source import open_source
from foundling.model.initialization import grow_vocabulary, init_weights
from foundling.model.transformer import Transformer
from foundling.runtime.run_dir import RunDir
from foundling.tokenizer.chat import CHAT_TEMPLATE
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.train.loop import train

NEW = ["<|think|>", "<|/think|>"]


def test_new_tokens_follow_all_others_and_nothing_moves(tmp_path: Path) -> None:
    old = sample("own")
    grown = old.grown(NEW)
    assert grown.extra_ids == dict(zip(NEW, range(old.vocab_size, old.vocab_size + 2), strict=True))
    assert grown.vocab_size == old.vocab_size + 2
    assert grown.special_ids == old.special_ids
    assert grown.encode_batch(TEXT) == old.encode_batch(TEXT)
    assert grown.fingerprint != old.fingerprint
    assert [grown.piece(id) for id in grown.extra_ids.values()] == NEW
    grown.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.fingerprint == grown.fingerprint
    assert again.extras == tuple(NEW)
    assert again.grown(["<|more|>"]).extra_ids["<|more|>"] == grown.vocab_size


@pytest.mark.parametrize("token", ["<|end|>", "a", "<|think|>", "", " ", "a\nb"])
def test_a_token_that_exists_or_is_none_is_refused(token: str) -> None:
    with pytest.raises(DataError, match=r"exists already|no token"):
        sample("own").grown(NEW).grown([token])
    with pytest.raises(DataError, match="exists already"):
        sample("own").grown(["<|x|>", "<|x|>"])


def test_growth_is_recognised_and_other_changes_are_not() -> None:
    old = sample("own")
    grown = old.grown(NEW)
    more = grown.grown(["<|x|>"])
    assert old.grew_from(old)
    assert grown.grew_from(old)
    assert more.grew_from(grown)
    assert more.grew_from(old)
    assert not old.grew_from(grown)
    assert not old.grown(NEW[::-1]).grew_from(grown)
    assert not old.grown(["<|x|>"]).grew_from(grown)
    assert not sample("gpt2").grew_from(old)


def test_only_the_assistant_can_say_a_new_token() -> None:
    grown = sample("own").grown([*NEW, "<|think"])
    said = "<|think|>mill<|/think|>goats"
    chat = [
        {"role": role, "content": content}
        for role, content in (("system", said), ("user", said), ("assistant", said + "<|end|>"))
    ]
    rendered = grown.render(chat)
    for id in grown.extra_ids.values():
        assert rendered.ids.count(id) == (id != grown.extra_ids["<|think"])
    inside = [id for id, counted in zip(rendered.ids, rendered.mask, strict=True) if counted]
    assert grown.decode(inside) == said + "<|end|><|end|>"
    assert inside.count(grown.end_id) == 1
    # What was generated comes back as it went in, so that a conversation can go on.
    assert grown.decode(inside, skip_special=True) == said + "<|end|>"
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    assert template.render(messages=chat, bos_token="<|bos|>") == grown.decode(rendered.ids)
    assert not set(grown.encode(said)) & set(grown.extra_ids.values())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([*NEW, "a", " ", "<|", "\n"])).map("".join))
def test_an_answer_with_new_tokens_survives_the_round_trip(text: str) -> None:
    grown = sample("own").grown(NEW)
    ids = grown.render([{"role": "assistant", "content": text}]).ids
    assert grown.decode(ids) == f"<|bos|><|assistant|>{text}<|end|>"
    assert sum(ids.count(id) for id in grown.extra_ids.values()) == text.count("think|>")


@pytest.mark.parametrize("tied", [True, False])
def test_grown_weights_keep_every_old_logit_and_begin_at_the_mean(tied: bool) -> None:
    shape = ModelConfig(
        vocab_size=20,
        dim=16,
        layers=2,
        heads=2,
        ffn_dim=32,
        tie_embeddings=tied,
        value_embeds=True,
    )
    old = Transformer(shape)
    init_weights(old, 1)
    used, size = 18, 24  # two rows were never a token's
    new = Transformer(shape.replace(vocab_size=size))
    new.load_state_dict(grow_vocabulary(old.state_dict(), used=used, size=size))
    tokens = torch.arange(18).view(2, 9)
    assert torch.equal(new(tokens)[..., :used], old(tokens)[..., :used])
    for name, weight in new.named_parameters():
        before = old.get_parameter(name)
        if weight.shape == before.shape:
            assert torch.equal(weight, before)
        else:
            mean = before[:used].double().mean(dim=0).float()
            assert torch.equal(weight[:used], before[:used])
            assert torch.equal(weight[used:], mean.expand(size - used, -1))
    with pytest.raises(ValueError, match="cannot grow"):
        grow_vocabulary(old.state_dict(), used=18, size=19)


def _tagged(tokenizer: Path, folder: Path) -> Path:
    """Conversations whose answers begin with a thought, built with the grown tokenizer."""
    rows = folder / "rows.jsonl"
    with open(rows, "w") as file:
        for number in range(200):
            answer = f"<|think|>{number} + 1<|/think|>{number + 1}"
            turns = [("user", f"what follows {number}?"), ("assistant", answer)]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    source = open_source(str(rows))
    build(source, Tokenizer.load(tokenizer), folder / "data", name=source.name, kind=source.kind)
    return folder / "data"


def test_a_model_is_fine_tuned_with_tokens_its_parent_did_not_have(
    tiny: RunConfig, village: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    from foundling.checkpoint.bundle import load_bundle

    parent = tmp_path / "parent"
    train(tiny, RunDir(parent))
    run_verb(["tokenizer", "add", str(parent / "tokenizer"), *NEW, "-o", str(tmp_path / "grown")])
    data = _tagged(tmp_path / "grown", tmp_path)
    config = tiny.replace(
        data={"sources": {str(data): 1.0}, "packing": "bestfit"},
        train={"start": str(parent), "horizon": 4},
    )
    train(config, RunDir(tmp_path / "child"))
    before, after = load_bundle(parent), load_bundle(tmp_path / "child")
    size = before.tokenizer.vocab_size
    assert after.config.model.vocab_size == after.tokenizer.vocab_size == size + 2
    assert after.model.embed.weight.shape[0] == size + 2
    # The new rows have moved away from the mean that they began with.
    mean = before.model.embed.weight[:size].double().mean(dim=0).float()
    assert not torch.equal(after.model.embed.weight[size], mean)
    roomy = config.replace(model={"vocab_size": size + 30})
    train(roomy, RunDir(tmp_path / "roomy"))
    assert load_bundle(tmp_path / "roomy").model.embed.weight.shape[0] == size + 30
    shrunk = roomy.replace(
        data=config.data.replace(sources={str(village[2]): 1.0}),
        train=config.train.replace(start=str(tmp_path / "roomy")),
    )
    with pytest.raises(ConfigError, match="another tokenizer"):
        train(shrunk, RunDir(tmp_path / "shrunk"))
