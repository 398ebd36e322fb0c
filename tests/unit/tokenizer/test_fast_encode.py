"""The fast encoder gives what tokenizer.json gives, or says why it is not used."""

import json
import pickle
import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import tokenizers
from bpe_samples import FORMS, SHARP, TEXT, byte_level, cutter, edited, sample, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from foundling.config.errors import DataError
from foundling.tokenizer import fast_encode
from foundling.tokenizer.tokenizer import Tokenizer

TEXTS = st.lists(
    st.sampled_from(SHARP) | st.characters(exclude_categories=["Cs"]), max_size=30
).map("".join)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(TEXTS, max_size=4))
def test_fast_is_slow_on_random_text(form: str, texts: list[str]) -> None:
    tokenizer = sample(form)
    assert tokenizer.fast, tokenizer.why_slow
    found = tokenizer.encode_arrays(texts)
    assert [ids.tolist() for ids in found] == tokenizer._encode(texts)
    assert all(ids.dtype == np.uint32 for ids in found)


@pytest.mark.parametrize("form", ["own", "gpt2", "llama3", "digits"])
def test_every_code_point_is_cut_alike(form: str) -> None:
    """Each between letters, blanks and digits, a thousand of them in a text."""
    tokenizer = sample(form)
    codes = [*range(1, 0xD800, 7), *range(0xE000, 0x30000, 7), *range(0x30000, 0x110000, 997)]
    texts = [
        "".join(f"a{chr(code)}b {chr(code)}1 {chr(code)}{chr(code)}\n" for code in codes[i::23])
        for i in range(23)
    ]
    found = [ids.tolist() for ids in tokenizer.encode_arrays(texts)]
    assert found == tokenizer._encode(texts)
    assert [tokenizer.decode(ids) for ids in found] == texts  # tiktoken drops what nothing matches


def test_runs_without_a_break_neither_hang_nor_crash() -> None:
    tokenizer = sample("own")
    runs = [" " * 1_100_000 + "x", "ab" * 100_000, "=" * 100_000, "\n" * 70_000 + "a", "7" * 50_000]
    found = tokenizer.encode_arrays(runs)
    assert [ids.tolist() for ids in found] == tokenizer._encode(runs)
    # The first is more than the engine's stack holds, and must have been left to the other.
    assert tokenizer._quick[0] is not None
    taken = tokenizer._quick[0].encode(runs)
    assert [ids is not None for ids in taken] == [False, True, True, True, True]


def test_texts_that_only_the_slow_way_can_encode_are_left_to_it() -> None:
    tokenizer, text = sample("plain added"), "a goat!"
    assert tokenizer._quick[0] is not None
    assert tokenizer._quick[0].encode([text, "ab"])[0] is None
    assert tokenizer._quick[0].encode([text, "ab"])[1] is not None
    assert tokenizer.encode_arrays([text])[0].tolist() == tokenizer._encode([text])[0]


def test_a_lone_surrogate_and_nothing_at_all() -> None:
    tokenizer = sample("own")
    assert tokenizer.encode_arrays([]) == []
    assert tokenizer.encode_arrays([""])[0].tolist() == []
    with pytest.raises(DataError, match="surrogate"):
        tokenizer.encode_arrays(["fine", "\ud800"])
    with pytest.raises(DataError, match="not a string"):
        tokenizer.encode_arrays([3])  # type: ignore[list-item]


def test_special_token_text_stays_text_the_fast_way_too() -> None:
    tokenizer = sample("own")
    text = "<|end|> and <|bos|>"
    ids = tokenizer.encode_arrays([text])[0].tolist()
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.special_ids.values())


def _lower() -> tokenizers.Tokenizer:
    engine = trained(cutter("gpt2"))
    engine.normalizer = normalizers.Lowercase()
    return engine


def _word_piece() -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    engine.pre_tokenizer = byte_level(True)
    return engine


def _split(pattern: str, behaviour: str = "isolated") -> tokenizers.Tokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior=behaviour)
    return trained(pre_tokenizers.Sequence([split, byte_level(False)]), 260)


SLOW: dict[str, tuple[Any, str]] = {
    "normalizer": (_lower, "Lowercase"),
    "model": (_word_piece, "WordPiece"),
    "prefix space": (lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)), "prefix"),
    "two splits": (
        lambda: trained(pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), byte_level(True)])),
        "none of those that are known",
    ),
    "removed": (lambda: _split(fast_encode.GPT2_WORDS, "removed"), "none of those that are known"),
    "unknown": (lambda: _split(r"\w+|[^\w\s]+|\s+"), "none of those that are known"),
}


@pytest.mark.parametrize("case", SLOW)
def test_what_is_not_known_is_slow_and_says_why_once(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words = SLOW[case]
    tokenizer = Tokenizer(make())
    texts = ["A mill's  goat", "ss ß b"]
    for _ in range(2):
        assert [ids.tolist() for ids in tokenizer.encode_arrays(texts)] == tokenizer._encode(texts)
    assert not tokenizer.fast
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(tokenizer.why_slow)
    said = capsys.readouterr().err
    assert said.count("warning: texts are encoded by tokenizers") == 1
    assert tokenizer.why_slow in said


def _with_tokens(*more: str, merges: list[list[str]], **model: Any) -> Tokenizer:
    """A vocabulary of bytes and some tokens."""
    engine = trained(cutter("own"), 256)
    vocab = json.loads(engine.to_str())["model"]["vocab"]
    vocab |= {token: 300 + place for place, token in enumerate(more)}
    return edited(engine, vocab=vocab, merges=merges, **model)


def test_a_vocabulary_that_merges_otherwise_is_found_out() -> None:
    # The list first joins a and aa; tiktoken knows only that the token aaa comes first.
    merges = [["a", "aa"], ["a", "a"], ["aa", "a"], ["b", "aaa"], ["aa", "b"]]
    other = _with_tokens("aa", "aaa", "baaa", "aab", merges=merges)
    assert other.why_slow.startswith("the two encoders differ on ")
    texts = ["baaabaaaaab"]
    assert [ids.tolist() for ids in other.encode_arrays(texts)] == other._encode(texts)


def test_a_model_that_is_no_plain_byte_level_bpe_is_slow() -> None:
    assert "dropout" in _with_tokens(merges=[], dropout=0.1).why_slow
    content = json.loads(_with_tokens("zz", merges=[])._engine.to_str())
    del content["model"]["vocab"]["a"]
    less = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))
    assert "no token for the byte 0x61" in less.why_slow


def _random_model(draw: random.Random) -> Tokenizer:
    """A vocabulary over two letters with merges in some order, sensible or not."""
    tokens = ["a", "b"]
    merges: list[list[str]] = []
    for _ in range(draw.randint(2, 6)):
        pair = [draw.choice(tokens), draw.choice(tokens)]
        merges.append(pair)
        tokens += {"".join(pair)} - set(tokens)
    if draw.random() < 0.6:
        draw.shuffle(merges)
    return _with_tokens(*tokens[2:], merges=merges, ignore_merges=draw.random() < 0.5)


def test_the_vocabulary_s_own_tokens_tell_other_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they do not tell is equal on every text of up to nine letters."""
    monkeypatch.setattr(fast_encode, "OWN_TOKENS", 4000)
    draw = random.Random(1)
    texts = ["".join(letters) for n in range(1, 10) for letters in product("ab", repeat=n)]
    told = 0
    for _ in range(80):
        tokenizer = _random_model(draw)
        if tokenizer.fast:
            found = [ids.tolist() for ids in tokenizer.encode_arrays(texts)]
            assert found == tokenizer._encode(texts), tokenizer._content()["model"]["merges"]
        told += not tokenizer.fast
    assert 10 < told < 40


@pytest.mark.parametrize("looks_up_first", [False, True])
def test_a_token_that_no_merge_makes_is_taken_as_the_vocabulary_says(looks_up_first: bool) -> None:
    """tiktoken would make abc of a and bc, of which the list knows nothing."""
    merges = [["b", "c"], ["a", "b"], ["ab", "c"]]
    tokens = ["bc", "ab", "abc", "zz"]
    tokenizer = _with_tokens(*tokens, merges=merges, ignore_merges=looks_up_first)
    texts = ["abc", "zz", "an abc zz", "zzz"]
    found = [ids.tolist() for ids in tokenizer.encode_arrays(texts)]
    assert found == tokenizer._encode(texts)
    assert [len(ids) for ids in found[:2]] == ([1, 1] if looks_up_first else [2, 2])


def test_a_part_of_a_build_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(trained(cutter("own")))
    assert tokenizer.fast
    tokenizer.check_encoding([TEXT[0], "", "<|end|>"])
    monkeypatch.setattr(tokenizer._quick[0], "_ids", tokenizer._quick[0]._ids[::-1])
    with pytest.raises(DataError, match=r"tiktoken .* and tokenizers .* encode 'Ada lives"):
        tokenizer.check_encoding(["", TEXT[0]])
    slow = Tokenizer(_lower())
    slow.check_encoding([TEXT[0]])


def test_merges_in_another_order_are_followed() -> None:
    engine = trained(cutter("own"))
    merges = json.loads(engine.to_str())["model"]["merges"]
    swapped = edited(engine, merges=[*merges[:20], *reversed(merges[20:60]), *merges[60:]])
    draw = random.Random(0)
    texts = ["".join(draw.choices("aehilnost ", k=200)) for _ in range(20)]
    found = [ids.tolist() for ids in swapped.encode_arrays(texts)]
    assert swapped.fast
    assert found == swapped._encode(texts) != Tokenizer(engine).encode_batch(texts)


def test_a_pickled_tokenizer_is_the_same_and_makes_no_encoder_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = sample("own")
    assert tokenizer.fast
    copy = pickle.loads(pickle.dumps(tokenizer))
    made: list[Any] = []
    real = fast_encode._ranks
    monkeypatch.setattr(fast_encode, "_ranks", lambda *args: made.append("") or real(*args))
    assert copy.encode(TEXT[0] + "<|end|>") == tokenizer.encode(TEXT[0] + "<|end|>")
    assert "_quick" in copy.__dict__  # so conversations are fast where the first one was
    assert copy.fast
    assert not made
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.special_ids == tokenizer.special_ids
    # On a machine with other libraries it is made and compared anew.
    monkeypatch.setattr(fast_encode, "versions", lambda: {"tiktoken": "1.0"})
    again = pickle.loads(pickle.dumps(copy))
    assert again.fast
    assert made


def test_a_pickled_tokenizer_knows_why_it_is_slow(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer(_lower())
    assert not tokenizer.fast
    capsys.readouterr()
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.why_slow == tokenizer.why_slow
    assert copy.encode_arrays(["Mill"])[0].tolist() == tokenizer._encode(["Mill"])[0]
    assert capsys.readouterr().err == ""
