"""The fast encoder gives what tokenizer.json gives, or says why it is not used."""

import json
import pickle
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import tokenizers
from bpe_samples import FORMS, SHARP, TEXT, byte_level, cutter, edited, sample, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from foundling.config.errors import DataError
from foundling.tokenizer import Tokenizer
from foundling.tokenizer.bytelevel import token_text
from foundling.tokenizer.merges import Merges
from foundling.tokenizer.unproved import UnprovedError

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
    for form, text in (("plain added", "a goat!"), ("gaps", "a, b")):
        tokenizer = sample(form)
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
        "one pattern",
    ),
    "removed": (lambda: _split(r"\s+", "removed"), "Split"),
    "nothing": (lambda: _split(r"a*|\s+"), "nothing at all"),
    "lookbehind": (lambda: _split(r"(?<=a)b|[\s\S]"), r"\(\?"),
    "count": (lambda: _split(r"a{2}+|[\s\S]"), r"\{2\}\+"),
    "anchor": (lambda: _split(r"^a|[\s\S]"), r"'\^'"),
    "folded pair": (lambda: _split(r"(?i:ss)|[\s\S]"), "case of ss"),
}


@pytest.mark.parametrize("case", SLOW)
def test_what_is_not_proved_is_slow_and_says_why_once(
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


def test_a_vocabulary_that_merges_otherwise_is_found_out() -> None:
    engine = trained(cutter("own"), 256)
    vocab = json.loads(engine.to_str())["model"]["vocab"]
    vocab |= {token: 300 + place for place, token in enumerate(("bc", "ab", "abc", "zz"))}
    # tiktoken makes abc of a and bc, of which the list knows nothing.
    other = edited(engine, vocab=vocab, merges=[["b", "c"], ["a", "b"], ["ab", "c"]])
    assert "do not make b'abc' of b'a' and b'bc'" in other.why_slow
    merges = [["ab", "c"], ["b", "c"], ["a", "b"], ["z", "z"], ["a", "bc"]]
    assert "order" in edited(engine, vocab=vocab, merges=merges).why_slow
    assert edited(engine, vocab=vocab, merges=merges[1:]).fast
    assert "dropout" in edited(engine, dropout=0.1).why_slow
    del vocab["a"]
    assert "no token for the byte 0x61" in edited(engine, vocab=vocab, merges=[]).why_slow


def test_merges_in_another_order_are_followed() -> None:
    engine = trained(cutter("own"))
    merges = json.loads(engine.to_str())["model"]["merges"]
    swapped = edited(engine, merges=[*merges[:20], *reversed(merges[20:60]), *merges[60:]])
    draw = random.Random(0)
    texts = ["".join(draw.choices("aehilnost ", k=200)) for _ in range(20)]
    found = [ids.tolist() for ids in swapped.encode_arrays(texts)]
    assert swapped.fast
    assert found == swapped._encode(texts) != Tokenizer(engine).encode_batch(texts)


def _random_model(draw: random.Random) -> tuple[dict[str, int], list[tuple[str, str]], bool]:
    """A vocabulary over two letters with merges in some order, sensible or not."""
    vocab = {token_text(bytes([byte])): byte for byte in range(256)}
    tokens = ["a", "b"]
    merges: list[tuple[str, str]] = []
    for _ in range(draw.randint(1, 6)):
        pair = draw.choice(tokens), draw.choice(tokens)
        merges.append(pair)
        if "".join(pair) not in vocab:
            vocab["".join(pair)] = len(vocab)
            tokens.append("".join(pair))
    if draw.random() < 0.3:
        draw.shuffle(merges)
    if draw.random() < 0.3:
        vocab["".join(draw.choices("ab", k=4))] = len(vocab) + 1
    return vocab, merges, draw.random() < 0.5


def test_the_proof_of_merges_holds_for_random_vocabularies() -> None:
    """Where it says yes, tiktoken and tokenizers agree on every text of up to nine letters; and it
    does not say no to everything."""
    draw = random.Random(1)
    texts = [
        "".join(letters) for length in range(1, 10) for letters in product("ab", repeat=length)
    ]
    yes = no = needless = 0
    for _ in range(300):
        vocab, merges, first = _random_model(draw)
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=first)
        expected = [[token.id for token in bpe.tokenize(text)] for text in texts]
        content = {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": first}
        listed = Merges.of(content)
        try:
            ranks = listed.ranked(listed.unreachable())
            yes += 1
        except UnprovedError:
            no += 1
            needless += _by_tiktoken(listed, texts) == expected
            continue
        assert _by_tiktoken(listed, texts, ranks) == expected, (vocab, merges, first)
    assert yes > 100
    assert no > 40
    assert needless < no


def _by_tiktoken(listed: Merges, texts: list[str], ranks: Any = None) -> list[list[int]]:
    ranks = ranks or listed.ranked()
    encoding = tiktoken.Encoding(
        "random", pat_str=r"[\s\S]+", mergeable_ranks=ranks.ranks, special_tokens={"<|x|>": 9999}
    )
    return [ranks.ids[encoding.encode_ordinary(text)].tolist() for text in texts]


def test_a_pickled_tokenizer_is_the_same_and_proves_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = sample("own")
    assert tokenizer.fast
    copy = pickle.loads(pickle.dumps(tokenizer))
    monkeypatch.setattr("foundling.tokenizer.fast.proved", lambda *_: pytest.fail("proved again"))
    assert copy.encode(TEXT[0] + "<|end|>") == tokenizer.encode(TEXT[0] + "<|end|>")
    assert "_quick" in copy.__dict__  # so conversations are fast where the first one was
    assert copy.fast
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.special_ids == tokenizer.special_ids
    for module in ("fast", "proofs"):
        other = {"tiktoken": "1.0"}
        monkeypatch.setattr(f"foundling.tokenizer.{module}.versions", lambda other=other: other)
    again = pickle.loads(pickle.dumps(copy))
    with pytest.raises(pytest.fail.Exception, match="proved again"):
        _ = again.fast


def test_a_thread_gets_an_engine_of_its_own_and_the_same_ids() -> None:
    tokenizer = sample("gpt2")
    other = tokenizer.for_another_thread()
    assert other.bare is not tokenizer.bare
    assert other.bare is not None
    assert other._quick[0] is not None
    assert other._quick[0].proof is tokenizer._quick[0].proof  # type: ignore[union-attr]
    texts = list(SHARP)
    assert other.encode_batch(texts) == tokenizer.encode_batch(texts)
    assert other.fingerprint == tokenizer.fingerprint
    slow = Tokenizer(_lower())
    assert slow.for_another_thread().why_slow == slow.why_slow != ""


def test_a_pickled_tokenizer_knows_why_it_is_slow(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer(_lower())
    assert not tokenizer.fast
    capsys.readouterr()
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.why_slow == tokenizer.why_slow
    assert copy.encode_arrays(["Mill"])[0].tolist() == tokenizer._encode(["Mill"])[0]
    assert capsys.readouterr().err == ""


def test_proofs_are_kept_and_never_believed_blindly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOUNDLING_HOME", str(tmp_path))
    calls: list[str] = []
    whole = Merges.unreachable
    monkeypatch.setattr(Merges, "unreachable", lambda self: calls.append("") or whole(self))
    engine = trained(cutter("own"), 300)
    for times in (1, 1):
        assert Tokenizer(engine).fast
        assert len(calls) == times
    kept = {path.name.split("-")[0]: path for path in (tmp_path / "proofs").iterdir()}
    assert kept.keys() == {"cuts", "merges"}
    note = json.loads(kept["merges"].read_text())
    for damage in (
        "{",
        "[]",
        json.dumps({**note, "answer": {"found": [5]}}),
        json.dumps({**note, "basis": {**note["basis"], "tiktoken": "0.1"}}),
    ):
        kept["merges"].write_text(damage)
        before = len(calls)
        assert Tokenizer(engine).fast
        assert len(calls) == before + 1
        assert json.loads(kept["merges"].read_text()) == note


def test_a_home_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOUNDLING_HOME", str(tmp_path / "file"))
    assert Tokenizer(trained(cutter("own"), 300)).fast


def test_an_old_tiktoken_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundling.tokenizer.fast.version", lambda _: "0.9.0")
    tokenizer = Tokenizer(trained(cutter("own"), 300))
    assert "older than 0.14" in tokenizer.why_slow
