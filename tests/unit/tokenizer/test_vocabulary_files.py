"""Tokenizers of others: GPT-2's two files, Llama 3's ranks, and files that are none."""

import base64
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from bpe_samples import SHARED, SHARP, TEXT

from foundling.config.errors import DataError
from foundling.tokenizer.bpe_trainer import train_tokenizer
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.tokenizer.vocabulary_files import llama3_specials

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no vocabularies beside the repo")


@pytest.fixture(scope="module", params=["gpt2", "llama3"])
def published(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.load(SHARED / "tokenizers" / request.param)


@needs_shared
def test_published_vocabularies_are_fast_and_exact_on_real_text(published: Tokenizer) -> None:
    assert published.fast, published.why_slow
    table = pq.ParquetFile(SHARED / "corpus" / "val-00000.parquet").read_row_group(0, ["text"])
    texts = [*table.column("text").to_pylist()[:50], *TEXT, "".join(SHARP), *SHARP]
    found = [ids.tolist() for ids in published.encode_arrays(texts)]
    assert found == published._encode(texts)
    assert [published.decode(ids) for ids in found] == texts


@needs_shared
def test_llama3_has_its_published_ids(published: Tokenizer) -> None:
    if published.bos_id != 128_000:
        return
    ids = [9906, 1917, 0, 1102, 596, 220, 2366, 19]
    assert published.encode("Hello world! It's 2024") == ids
    assert (published.bos_id, published.eos_id) == (128_000, 128_001)
    assert published.piece(128_009) == "<|eot_id|>"
    assert published.vocab_size == 128_256 + 5  # user, assistant, system, end, pad
    assert max(published.encode("<|begin_of_text|><|eot_id|>")) < 128_000


def test_the_special_tokens_of_llama3_stand_where_they_were_published() -> None:
    names = llama3_specials()
    assert len(names) == len(set(names)) == 256
    assert names[0] == "<|begin_of_text|>"
    assert names[5] == "<|reserved_special_token_3|>"
    assert names[6:10] == [
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|reserved_special_token_4|>",
        "<|eot_id|>",
    ]
    assert names[255] == "<|reserved_special_token_250|>"


def _line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + f" {rank}\n".encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00", "SentencePiece"),
        (_line(b"a", 0) + _line(b"b", 2), r"line 2"),
        (_line(b"a", 0) + b"!!!! 1\n", r"line 2"),
        (_line(b"a", 0) + _line(b"b", 1), "2 ranks"),
    ],
)
def test_ranks_that_are_none_or_unknown_are_refused(
    tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    for path in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(DataError, match=words):
            Tokenizer.load(path)


def test_tokenizer_json_comes_before_other_files(tmp_path: Path) -> None:
    from bpe_samples import sample

    sample("own").save(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"anything")
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0}))
    (tmp_path / "merges.txt").write_text("")
    assert Tokenizer.load(tmp_path).fingerprint == sample("own").fingerprint


def test_files_that_no_memory_and_no_time_would_do_for_are_refused(tmp_path: Path) -> None:
    trained = train_tokenizer(["mill goat bread"], 280)
    for size in (10**9, 10**20):
        with pytest.raises(DataError, match="is too large; give at most 4,194,304"):
            train_tokenizer(["mill"], size)
    trained.save(tmp_path)
    sound = json.loads((tmp_path / "tokenizer.json").read_text())

    def write(**changed: object) -> Path:
        (tmp_path / "tokenizer.json").write_text(json.dumps({**sound, **changed}))
        return tmp_path

    far = {**sound["model"]["vocab"], "far": 10**9}
    with pytest.raises(DataError, match=r"ids up to 1,000,000,000; ids must be below"):
        Tokenizer.load(write(model={**sound["model"], "vocab": far}))
    steps = [{"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated"}]
    steps[0]["invert"] = False
    backtracks = {"type": "Sequence", "pretokenizers": [*steps, sound["pre_tokenizer"]]}
    tokenizer = Tokenizer.load(write(pre_tokenizer=backtracks))
    with pytest.raises(DataError, match=r"cannot encode a text: .*retry-limit"):
        tokenizer.encode("a" * 1000 + "b")
