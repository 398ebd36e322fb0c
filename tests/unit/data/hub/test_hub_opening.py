"""Fetching ahead and reading offline, as a user does it: commands, the environment, one cache."""

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hub_server import HubServer, parquet

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError, DataError
from foundling.data.hub.opening import (
    fetch_ahead,
    fetch_blobs,
    fetch_tokenizer,
    open_remote,
    plan_fetch,
)
from foundling.data.readers.source import ReadOptions

SHUFFLED = "karpathy/fineweb-edu-100b-shuffle"


@pytest.fixture
def shards(server: HubServer) -> dict[str, bytes]:
    files = {f"shard_{n:05d}.parquet": parquet([{"text": f"page {n}"}] * 50) for n in range(5)}
    server.add(f"datasets/{SHUFFLED}", {"README.md": b"# Shuffled", **files})
    return files


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def run(home: Path, endpoint: str, *words: str, **environment: str) -> tuple[int, str, str]:
    """A command in a process of its own, whose environment alone says where the hub is."""
    root = str(Path(__file__).parents[4])
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPATH": root, **environment}
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env={**clean, **settings},
        cwd=home,
    )
    return done.returncode, done.stdout, done.stderr


READ = """
import sys
from foundling.config.errors import UserError
from foundling.data.open_source import open_source
for spec in sys.argv[1:]:
    try:
        for row in open_source(spec):
            print(row.text)
    except UserError as error:
        print(error, file=sys.stderr)
"""


def test_fetched_by_a_command_and_read_without_network(
    server: HubServer, shards: dict[str, bytes], tmp_path: Path
) -> None:
    server.plant("/cdn/", "cut", at=0.5)
    fetch = ("-m", "foundling", "fetch", "fineweb-edu-100b")
    code, out, error = run(tmp_path, server.url, *fetch, "--tokens", "100M")
    assert code == 0, error
    assert "2 of 5 files" in out
    assert "about 112M tokens" in out
    assert "ODC-By" in out
    # A verb that takes long says so, by the machine.
    words = [line for line in error.splitlines() if not line.startswith("fetch: download")]
    assert words == [], "a cut that was mended needs no words"
    names = sorted(path.name for path in (tmp_path / "hub").rglob("*.parquet"))
    assert names == ["shard_00000.parquet", "shard_00001.parquet"]

    asked = len(server.requests)
    read = ("-c", READ, "fineweb-edu-100b")
    code, out, error = run(tmp_path, server.url, *read, HF_HUB_OFFLINE="1")
    assert out.splitlines() == ["page 0"] * 50 + ["page 1"] * 50
    assert error.strip() == (
        f"shard_00002.parquet of {SHUFFLED} is not here and HF_HUB_OFFLINE is set; run `foundling"
        " fetch fineweb-edu-100b --shards 3` where there is network, with this cache."
    )
    code, out, error = run(tmp_path, server.url, *fetch, "--shards", "2", HF_HUB_OFFLINE="1")
    assert code == 0, error
    assert len(server.requests) == asked, "offline asks nobody"


def test_nothing_fetched_and_no_network_is_one_sentence(tmp_path: Path) -> None:
    words = ("-m", "foundling", "fetch", "smoltalk")
    code, out, error = run(tmp_path, "http://127.0.0.1:9", *words, HF_HUB_OFFLINE="1")
    assert (code, out) == (2, "")
    assert len(error.strip().splitlines()) == 1
    assert "never fetched and HF_HUB_OFFLINE is set; run `foundling fetch hf://data" in error


def test_offline_reads_what_was_fetched(
    server: HubServer, shards: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_ahead(plan_fetch("fineweb-edu-100b", shards=1))
    online = open_remote("fineweb-edu-100b", ReadOptions())
    offline(monkeypatch)
    source = open_remote("fineweb-edu-100b", ReadOptions())
    assert source.recipe == online.recipe
    piece = next(iter(source.pieces()))
    assert [row.text for row in piece.rows()] == ["page 0"] * 50
    later = list(source.pieces())
    assert len(later) == 5, "what is not here stops nobody who does not ask for it"
    with pytest.raises(DataError, match="--shards 4"):
        list(later[3].rows())
    with pytest.raises(DataError, match="leave --stream out"):
        list(open_remote("fineweb-edu-100b", ReadOptions(stream=True)))
    plan = plan_fetch("fineweb-edu-100b")
    blob = plan.repo.home / "blobs" / plan.files[0].checksum
    blob.write_bytes(blob.read_bytes()[::-1])
    with pytest.raises(DataError, match=r"is damaged in .* run `foundling fetch"):
        list(piece.rows())


def test_a_plan_counts_files_bytes_and_tokens(server: HubServer, shards: dict[str, bytes]) -> None:
    plan = plan_fetch("fineweb-edu-100b")
    assert (len(plan.files), plan.of) == (5, 5)
    assert plan.size == sum(map(len, shards.values()))
    assert plan.tokens == 5 * 56e6
    assert len(plan_fetch("fineweb-edu-100b", tokens=1).files) == 1
    assert len(plan_fetch("fineweb-edu-100b", tokens=10**9).files) == 5
    other = plan_fetch(f"hf://datasets/{SHUFFLED}", shards=2)
    assert other.tokens == pytest.approx(other.size / 2.4)
    for words, said in (({"shards": 6}, "has 5 files"), ({"shards": 1, "tokens": 1}, "exclude")):
        with pytest.raises((DataError, ConfigError), match=said):
            plan_fetch("fineweb-edu-100b", **words)
    with pytest.raises(DataError, match="neither a recipe nor hf://"):
        plan_fetch("./files")


def test_blobs_are_fetched_ahead_until_there_are_enough(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gzip

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    monkeypatch.setattr("foundling.data.hub.stack.PIECE_ROWS", 2)
    files = [{"blob_id": f"{n:040d}", "src_encoding": "UTF-8", "path": f"{n}.c"} for n in range(9)]
    for file in files:
        blob = gzip.compress(f"int main{file['path']};".encode() * 100)
        server.plain[f"softwareheritage/content/{file['blob_id']}"] = blob
    repo = "datasets/bigcode/the-stack-v2-train-smol-ids"
    server.add(repo, {"data/train.parquet": parquet(files)})
    plan = plan_fetch("stack-v2", tokens=1200)
    fetch_ahead(plan)
    told: list[str] = []
    tokens = fetch_blobs(plan, lambda name, documents, so_far: told.append(name))
    assert 1200 * 1.1 <= tokens < 1500
    assert told == ["data/train.parquet rows 0..1", "data/train.parquet rows 2..3"]
    assert len(server.asked("/content/")) == 4
    fetch_blobs(plan, lambda name, documents, so_far: None, ("path=8.c",))
    assert len(server.asked("/content/")) == 5, "filtered before it is fetched"
    offline(monkeypatch)
    pieces = iter(open_remote("stack-v2", ReadOptions()).pieces())
    assert [len(list(next(pieces).rows())) for _ in range(2)] == [2, 2]
    with pytest.raises(DataError, match=r"rows 4..5 .* run `foundling fetch stack-v2`"):
        list(next(pieces).rows())
    filtered = open_remote("stack-v2", ReadOptions(where=("path=8.c",)))
    assert [row.text for row in filtered] == ["int main8.c;" * 100]
    other = open_remote("stack-v2", ReadOptions(where=("path~c$",)))
    with pytest.raises(DataError, match=r"fetch stack-v2 --where 'path~c\$'` where"):
        list(other)
    with pytest.raises(ConfigError, match="have no effect"):
        open_remote("stack-v2", ReadOptions(text="path"))


def test_a_tokenizer_is_fetched(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "tokenizer.json": b'{"a": 1}' * 500,
        "tokenizer_config.json": b"{}",
        "merges.txt": b"x",
    }
    weights = {"model.safetensors": b"0" * 5000, "original/tokenizer.model": b"sp" * 900}
    server.add("models/someone/small", {**files, **weights})
    folder, names = fetch_tokenizer("hf://someone/small", tmp_path / "out")
    assert sorted(names) == [
        "merges.txt",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        **files,
        "tokenizer.model": b"sp" * 900,
    }
    assert not [r for r in server.requests if "safetensors" in r.path]
    kept, _ = fetch_tokenizer("hf://someone/small", None)
    assert (kept / "tokenizer.json").read_bytes() == files["tokenizer.json"]
    fetch_tokenizer("hf://someone/small", tmp_path / "out")
    (tmp_path / "out" / "merges.txt").write_bytes(b"y")
    with pytest.raises(DataError, match=r"merges\.txt is there already and differs"):
        fetch_tokenizer("hf://someone/small", tmp_path / "out")
    run_verb(["fetch", "hf://someone/small", "-o", str(tmp_path / "by-name")])
    assert (tmp_path / "by-name" / "tokenizer.json").read_bytes() == files["tokenizer.json"]
    for words, told in (
        (("hf://someone/small", "--shards", "3"), "--shards has no effect on hf://someone/small"),
        (("fineweb-edu", "-o", "x"), "--output has no effect on fineweb-edu"),
    ):
        with pytest.raises(ConfigError, match=told):
            run_verb(["fetch", *words])
    server.add("models/someone/none", {"config.json": b"{}"})
    with pytest.raises(DataError, match="holds no tokenizer"):
        fetch_tokenizer("hf://someone/none", None)
    with pytest.raises(DataError, match="is a data set"):
        fetch_tokenizer("hf://datasets/someone/none", None)
    for wrong in ("someone/small", "hf://small"):
        with pytest.raises(DataError, match="no model of a hub; write hf://OWNER/NAME"):
            fetch_tokenizer(wrong, None)


def test_the_verbs_say_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    from foundling.data.hub.recipes import RECIPES

    run_verb(["data", "build", "--list"])
    listed = capsys.readouterr().out
    assert {line.split()[0] for line in listed.splitlines() if line[0] != " "} == set(RECIPES)
    run_verb(["data", "build", "--list", "mixtures"])
    assert "data/zyda2-fwe: 0.44" in capsys.readouterr().out
    for words, told in ((["--list", "recipes", "a.txt"], "a.txt has no effect"), ([], "--list")):
        with pytest.raises(ConfigError, match=told):
            run_verb(["data", "build", *words])


def zipped(name: str, text: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, text)
    return out.getvalue()


def test_what_only_the_library_reads_is_streamed_by_it(server: HubServer, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = {n: [json.dumps({"text": f"row-{n}-{m}", "n": m}) for m in range(3)] for n in range(3)}
    files = {f"data/{n}.zip": zipped(f"{n}.jsonl", "\n".join(part)) for n, part in rows.items()}
    server.add("datasets/someone/odd", files)
    server.add("datasets/someone/script", {"script.py": b"raise SystemExit"})
    specs = [f"hf://datasets/someone/{name}" for name in ("odd", "script")]
    code, out, error = run(tmp_path, server.url, "-c", READ, *specs)
    assert code == 0, error
    assert out.split() == [f"row-{n}-{m}" for n in range(3) for m in range(3)]
    assert "neither directly nor by the datasets library" in error
    assert len(error.strip().splitlines()) == 1


def test_without_the_library_the_extra_is_named(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    server.add("datasets/someone/odd", {"data.zip": b"zip"})
    with pytest.raises(DataError, match=r"pip install 'foundling\[datasets\]'"):
        open_remote("hf://datasets/someone/odd", ReadOptions())
