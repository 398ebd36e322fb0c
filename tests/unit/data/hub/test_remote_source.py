"""Which files an address means, and their rows: fetched when asked for, the same each time."""

import io
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hub_server import HubServer, parquet

from foundling.config.errors import DataError
from foundling.data.hub.download import pin
from foundling.data.hub.opening import open_remote, readable
from foundling.data.hub.recipes import parse_uri
from foundling.data.hub.remote_source import RemotePiece
from foundling.data.hub.splits import SplitFiles, choose
from foundling.data.readers.source import ReadOptions


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def texts(first: int, count: int) -> list[dict[str, Any]]:
    return [{"text": f"text {n} " + "x" * 200, "score": n % 5} for n in range(first, first + count)]


def paths(server: HubServer, files: list[str], readme: str, uri: str) -> list[str]:
    return [file.path for file in chosen(server, files, readme, uri).files]


def chosen(server: HubServer, files: list[str], readme: str, uri: str) -> SplitFiles:
    content = {name: name.encode() for name in files}
    if readme:
        content["README.md"] = f"---\n{readme}\n---\n# Title\n".encode()
    server.add("datasets/o/n", content)
    return choose(parse_uri(f"hf://datasets/o/n{uri}"), readable)


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("hf://datasets/o/n", None),
        ("hf://datasets/o/n@conf-1.0:train_sft#v1.2", None),
        ("hf://datasets/o/n/data/*.parquet#refs/convert/parquet", None),
        ("hf://o/n#abc", None),
        ("hf://models/o/n", "hf://o/n"),
        ("hf://datasets/o/n:test", None),
    ],
)
def test_an_address_is_read_and_written(text: str, again: str | None) -> None:
    assert str(parse_uri(text)) == (again or text)


@pytest.mark.parametrize(
    "text",
    [
        "hf://",
        "hf://datasets/o",
        "hf://datasets/o/",
        "hf://datasets/o/n@main/x.parquet",
        "hf://o/n:t",
        "hf://datasets/o/n.",
        "hf://datasets/o-/n",
        "hf://datasets/o--p/n",
        "hf://datasets/o/n..m",
        "hf://datasets/o/n.git",
        f"hf://datasets/o/{'n' * 97}",
    ],
)
def test_an_address_that_is_none_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(DataError, match=r"hf://datasets/OWNER/NAME\[@config\]"):
        parse_uri(text)


FINEWEB = """
license: odc-by
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
- config_name: both
  data_files:
  - split: train
    path:
    - sample/10BT/*
    - data/b/*.parquet
  - split: test
    path: test.jsonl
- config_name: plain
  data_files: "*.jsonl"
"""
FINEWEB_FILES = [
    *("data/a/0.parquet", "data/a/1.parquet", "data/b/0.parquet", "data/b/notes.md"),
    *("sample/10BT/000.parquet", "sample/10BT/001.parquet", "sample/100BT/000.parquet"),
    *("test.jsonl", "train.jsonl", "dataset_infos.json"),
]


@pytest.mark.parametrize(
    ("uri", "found"),
    [
        ("", ["data/a/0.parquet", "data/a/1.parquet", "data/b/0.parquet"]),
        ("@sample-10BT", ["sample/10BT/000.parquet", "sample/10BT/001.parquet"]),
        (
            "@both:train",
            ["sample/10BT/000.parquet", "sample/10BT/001.parquet", "data/b/0.parquet"],
        ),
        ("@both:test", ["test.jsonl"]),
        ("@plain", ["test.jsonl", "train.jsonl"]),
        ("/sample/*/000.parquet", ["sample/100BT/000.parquet", "sample/10BT/000.parquet"]),
        ("/data/a", ["data/a/0.parquet", "data/a/1.parquet"]),
        ("/**/0.parquet", ["data/a/0.parquet", "data/b/0.parquet"]),
        ("/sample/10?T/00[!0].parquet", ["sample/10BT/001.parquet"]),
    ],
)
def test_configs_of_the_readme(server: HubServer, uri: str, found: list[str]) -> None:
    assert paths(server, FINEWEB_FILES, FINEWEB, uri) == found


@pytest.mark.parametrize(
    ("files", "uri", "found"),
    [
        (["shard_00001.parquet", "shard_00000.parquet"], "", ["shard_00000", "shard_00001"]),
        (["train.csv", "test.csv", "valid.csv"], "", ["train"]),
        (["train.csv", "test.csv", "valid.csv"], ":validation", ["valid"]),
        (["train/a.jsonl", "test/a.jsonl", "other.jsonl"], "", ["train/a"]),
        (["data/train_sft-00000-of-00002.parquet", "data/x.parquet"], ":train_sft", ["data/train"]),
        (
            ["data/train-00000-of-00001-ab12.parquet", "data/test-00000-of-00001.parquet"],
            "",
            ["dat"],
        ),
        (["en/train.jsonl", "de/train.jsonl"], "@de", ["de/train"]),
        (["c4-train.00000-of-00002.json.gz", "c4-validation.0.json.gz"], "", ["c4-train"]),
        (["training_data.jsonl", "restest.jsonl"], "", ["training_data"]),
    ],
)
def test_names_of_files_and_folders(
    server: HubServer, files: list[str], uri: str, found: list[str]
) -> None:
    got = paths(server, files, "", uri)
    assert len(got) == len(found)
    assert all(path.startswith(begin) for path, begin in zip(got, found, strict=True))


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        (
            "@nothing",
            "no config 'nothing'; .*@CONFIG with one of both, default, plain, sample-10BT",
        ),
        ("@both:nothing", "no split 'nothing'; .*@both:SPLIT with one of test, train"),
        ("/data/*.csv", "matches no file"),
    ],
)
def test_a_choice_that_is_none_lists_those_there_are(
    server: HubServer, uri: str, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        chosen(server, FINEWEB_FILES, FINEWEB, uri)


def test_several_configs_without_a_default_are_not_guessed(server: HubServer) -> None:
    readme = "configs:\n- {config_name: a, data_files: a/*}\n- {config_name: b, data_files: b/*}"
    with pytest.raises(DataError, match=r"several configs; .* one of a, b"):
        chosen(server, ["a/0.jsonl", "b/0.jsonl"], readme, "")
    told = readme.replace("config_name: b", "config_name: b, default: true")
    assert paths(server, ["a/0.jsonl", "b/0.jsonl"], told, "") == ["b/0.jsonl"]
    assert paths(server, ["a/0.jsonl", "b/0.jsonl"], told, "@a") == ["a/0.jsonl"]


def test_only_the_folders_that_are_named_are_listed(server: HubServer) -> None:
    paths(server, FINEWEB_FILES, FINEWEB, "@sample-10BT")
    listed = [request.path for request in server.asked("/tree/")]
    assert len(listed) == 2
    assert "recursive=false" in listed[0].lower()
    assert "sample%2F10BT" in listed[1]


def test_the_hubs_own_copy_is_read_where_nothing_else_can_be(server: HubServer) -> None:
    server.add("datasets/o/n", {"n.py": b"a script", "data.zip": b"zip"})
    copy = {"default/train/0000.parquet": b"a", "default/test/0000.parquet": b"b"}
    server.add("datasets/o/n", copy, revision="refs/convert/parquet")
    choice = choose(parse_uri("hf://datasets/o/n"), readable)
    assert [file.path for file in choice.files] == ["default/train/0000.parquet"]
    server.add("datasets/o/part", {"n.py": b"a script"})
    part = {"default/partial-train/0000.parquet": b"a"}
    server.add("datasets/o/part", part, revision="refs/convert/parquet")
    assert choose(parse_uri("hf://datasets/o/part"), readable).files == ()


def test_a_pattern_that_is_none_is_refused(server: HubServer) -> None:
    with pytest.raises(DataError, match=r"a/\*\*b is no pattern of files of o/n: .*component"):
        chosen(server, ["a/b.jsonl"], "", "/a/**b")


def test_rows_come_from_files_that_are_fetched_when_they_are_needed(
    server: HubServer, tmp_path: Path
) -> None:
    files = {f"shard_{n:05d}.parquet": parquet(texts(n * 1000, 1000)) for n in range(4)}
    server.add("datasets/o/n", files)
    source = open_remote("hf://datasets/o/n", ReadOptions())
    assert (source.name, source.kind, source.draws) == ("n", "text", False)
    assert source.recipe["files"] == 4
    whole = [request for request in server.asked("/cdn/") if request.range is None]
    assert whole == [], "looking is done by ranges"
    pieces = iter(source.pieces())
    piece = next(pieces)
    rows = list(pickle.loads(pickle.dumps(piece)).rows())
    assert rows[0].text == "text 0 " + "x" * 200
    assert rows[0].where == "shard_00000.parquet:0"
    assert rows == list(piece.rows())
    whole = [request for request in server.asked("/cdn/") if request.range is None]
    assert len(whole) == 1, "one file was needed, and once"
    checksum = next(iter(pin(parse_uri("hf://datasets/o/n")).tree())).checksum
    assert checksum in piece.identity()
    everything = [row.text for row in source]
    assert everything == [row["text"] for row in texts(0, 4000)]


def test_a_file_is_cut_where_its_footer_says(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foundling.data.readers.files.LEAST_BYTES", 30_000)
    server.add("datasets/o/n", {"a.parquet": parquet(texts(0, 2000))})
    source = open_remote("hf://datasets/o/n", ReadOptions())
    pieces = list(source.pieces())
    assert len(pieces) > 4
    assert len({piece.name for piece in pieces}) == len(pieces)
    forwards = [row.text for piece in pieces for row in piece.rows()]
    assert forwards == [row["text"] for row in texts(0, 2000)]
    assert list(source.pieces()) == pieces, "here or elsewhere, the pieces are the same"
    streamed = open_remote("hf://datasets/o/n", ReadOptions(stream=True))
    assert len(list(streamed.pieces())) == 1
    assert [row.text for row in streamed] == forwards
    assert streamed.recipe == source.recipe
    first = pieces[1]
    assert isinstance(first, RemotePiece)
    monkeypatch.setattr("foundling.data.readers.files.LEAST_BYTES", 70_000)
    with pytest.raises(DataError, match="not cut where it seemed"):
        list(first.rows())


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl", "a.jsonl.gz"])
def test_a_stream_leaves_no_raw_file_behind(
    server: HubServer, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gzip

    out = io.BytesIO()
    table = pa.Table.from_pylist(texts(0, 500))
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    made = {"a.parquet": parquet(texts(0, 500)), "a.arrow": out.getvalue()}
    content = made.get(name, jsonl(texts(0, 500)))
    server.add("datasets/o/n", {name: gzip.compress(content) if ".gz" in name else content})
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    source = open_remote("hf://datasets/o/n", ReadOptions(stream=True, where=("score>=3",)))
    got = [row.text for row in source]
    assert got == [row["text"] for row in texts(0, 500) if row["score"] >= 3]
    whole = [request for request in server.asked("/cdn/") if request.range is None]
    assert len(whole) == 1, "it is opened once"
    assert list(scratch.iterdir()) == []
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert all("foundling" in path.parts for path in kept), "notes of what the hub said, no data"


def test_a_server_without_ranges_is_read_whole(server: HubServer) -> None:
    server.plant("/cdn/", "ignore_range", times=100)
    server.add("datasets/o/n", {"a.parquet": parquet(texts(0, 300))})
    source = open_remote("hf://datasets/o/n", ReadOptions())
    assert [row.text for row in source] == [row["text"] for row in texts(0, 300)]


def test_a_readme_that_changes_is_no_other_source(server: HubServer) -> None:
    files = {"a.jsonl": jsonl(texts(0, 30))}
    server.add("datasets/o/n", {**files, "README.md": b"# One"})
    first = open_remote("hf://datasets/o/n", ReadOptions())
    server.add("datasets/o/n", {**files, "README.md": b"# Two"})
    assert open_remote("hf://datasets/o/n", ReadOptions()).recipe == first.recipe
    server.add("datasets/o/n", {"a.jsonl": jsonl(texts(0, 31))})
    assert open_remote("hf://datasets/o/n", ReadOptions()).recipe != first.recipe


def test_files_that_do_not_go_together_are_refused(server: HubServer) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    server.add("datasets/o/n", {"a.jsonl": jsonl(texts(0, 30)), "b.jsonl": jsonl([chat] * 30)})
    source = open_remote("hf://datasets/o/n", ReadOptions())
    with pytest.raises(DataError, match=r"b\.jsonl differs from a\.jsonl"):
        list(source)


def test_a_number_of_documents_is_kept_to(server: HubServer) -> None:
    server.add("datasets/o/n", {f"{n}.jsonl": jsonl(texts(n * 20, 20)) for n in range(3)})
    source = open_remote("hf://datasets/o/n", ReadOptions(), documents=33)
    assert [row.text for row in source] == [row["text"] for row in texts(0, 33)]


def test_a_model_is_no_data(server: HubServer) -> None:
    with pytest.raises(DataError, match="is a model; data is hf://datasets/o/n"):
        open_remote("hf://o/n", ReadOptions())


def test_a_build_is_the_same_kept_or_streamed(
    server: HubServer, tmp_path: Path, village: Any
) -> None:
    from foundling.data.build.build import build
    from foundling.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(village.tokenizer)
    server.add("datasets/o/n", {f"{n}.parquet": parquet(texts(n * 300, 300)) for n in range(6)})
    sums = []
    for stream in (False, True):
        source = open_remote("hf://datasets/o/n", ReadOptions(stream=stream))
        folder = tmp_path / f"built-{stream}"
        built = build(source, tokenizer, folder, name="n", kind="text", max_tokens=20_000)
        sums.append([shard.sha256 for shard in (*built.train, *built.val)])
        assert built.train_tokens >= 20_000
        if not stream:
            kept = sorted(path.name for path in (tmp_path / "cache").rglob("*.parquet"))
            assert kept[0] == "0.parquet"
            assert len(kept) < 6, "no more is fetched than the budget needs"
    assert sums[0] == sums[1]


def test_looking_into_a_file_asks_for_each_part_once(server: HubServer) -> None:
    """Of a table the block of its footer, of lines the first block."""
    rows = [{"text": random.Random(n).randbytes(5000).hex()} for n in range(400)]
    server.add("datasets/o/n", {"a.jsonl": jsonl(rows), "b.parquet": parquet(rows, group=50)})
    for name, parts in (("a.jsonl", 1), ("b.parquet", 1)):
        before = len(server.asked("/cdn/"))
        source = open_remote(f"hf://datasets/o/n/{name}", ReadOptions())
        assert source.kind == "text"
        next(iter(source.pieces()))
        asked = [request.range for request in server.asked("/cdn/")[before:]]
        assert len(asked) == len(set(asked)) == parts, asked


def test_a_file_without_a_byte_is_not_asked_for_a_range(server: HubServer) -> None:
    server.add("datasets/o/n", {"a.jsonl": b"", "b.jsonl": jsonl(texts(0, 3))})
    assert len(list(open_remote("hf://datasets/o/n", ReadOptions()))) == 3
    assert not [one for one in server.asked("a.jsonl") if one.range]
