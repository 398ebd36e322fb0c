"""Every named data set from a stand-in of its repository, blobs of an archive, other addresses."""

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hub_server import HubServer, parquet

from foundling.config.errors import DataError
from foundling.data.hub.opening import open_remote
from foundling.data.hub.recipes import MIXTURES, RECIPES, merged, mixture_text, parse_uri, recipe_of
from foundling.data.hub.stack import MISSING, in_order
from foundling.data.readers.source import ReadOptions

TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


def configs(**patterns: str) -> bytes:
    """A README whose configs have one split each; names with a dash are written with two _."""
    entries = "".join(
        f"- config_name: {name.replace('__', '-')}\n  data_files:\n"
        f"  - split: train\n    path: {path}\n"
        for name, path in patterns.items()
    )
    return f"---\nconfigs:\n{entries}---\n".encode()


TEXT = [{"text": f"a page, number {n}", "id": str(n)} for n in range(3)]
CHAT = [{"messages": TALK, "source": "made"}]
THOUGHT = {
    "system": "Think first.",
    "conversations": [
        {"from": "user", "value": "What is 2 + 2?"},
        {"from": "assistant", "value": "<|begin_of_thought|>...<|end_of_thought|>4"},
    ],
}
REPOS: dict[str, tuple[str, dict[str, bytes]]] = {
    "fineweb-edu": (
        "HuggingFaceFW/fineweb-edu",
        {
            "README.md": configs(default="data/*/*", sample__100BT="sample/100BT/*"),
            "data/CC-MAIN-2013-20/0.parquet": parquet([{"text": "of another config"}]),
            "sample/100BT/000_00000.parquet": parquet(TEXT),
        },
    ),
    "fineweb-edu-100b": (
        "karpathy/fineweb-edu-100b-shuffle",
        {"README.md": b"# Shuffled", "shard_00000.parquet": parquet(TEXT)},
    ),
    "zyda2-dclm": ("Zyphra/Zyda-2", {}),
    "zyda2-fwe": ("Zyphra/Zyda-2", {}),
    "zyda2-dolma": ("Zyphra/Zyda-2", {}),
    "zyda2-zyda": ("Zyphra/Zyda-2", {}),
    "finemath-3plus": (
        "HuggingFaceTB/finemath",
        {
            "README.md": configs(finemath__3plus="finemath-3plus/train-*", other="other/*"),
            "finemath-3plus/train-00000-of-00128.parquet": parquet(TEXT),
        },
    ),
    "smoltalk": (
        "HuggingFaceTB/smoltalk",
        {
            "README.md": configs(all="data/all/train-*", other="data/other/train-*"),
            "data/all/train-00000-of-00009.parquet": parquet(CHAT),
        },
    ),
    "ultrachat-sft": (
        "HuggingFaceH4/ultrachat_200k",
        {
            "data/train_sft-00000-of-00003-a3ecf92756993583.parquet": parquet(CHAT),
            "data/train_gen-00000-of-00003-a6c9fb894be3e50b.parquet": parquet(
                [{"prompt": "other"}]
            ),
        },
    ),
    "ultrachat-gen": (
        "HuggingFaceH4/ultrachat_200k",
        {
            "data/train_gen-00000-of-00003-a6c9fb894be3e50b.parquet": parquet(CHAT),
            "data/test_sft-00000-of-00001-f7dfac4afe5b93f4.parquet": parquet([{"prompt": "other"}]),
        },
    ),
    "openthoughts": (
        "open-thoughts/OpenThoughts-114k",
        {
            "README.md": configs(default="data/train-*", metadata="metadata/train-*"),
            "data/train-00000-of-00006.parquet": parquet([THOUGHT]),
        },
    ),
    "lima": (
        "GAIR/lima",
        {
            "lima.py": b"a script",
            "train.jsonl": b'{"conversations": ["Why?", "Because."], "source": "wikihow"}\n',
            "test.jsonl": b'{"conversations": ["A question without an answer"]}\n',
        },
    ),
}
ZYDA = ("dclm_crossdeduped", "fwe3", "dolma-cc_crossdeduped-filtered", "zyda_crossdeduped-filtered")


def zyda(part: str) -> dict[str, bytes]:
    names = {name.replace("-", "__"): f"data/{name}/*/*" for name in ZYDA}
    files = {f"data/{name}/a/0.parquet": parquet([{"text": f"of {name}"}]) for name in ZYDA}
    return {"README.md": configs(**names), **files, f"data/{part}/a/0.parquet": parquet(TEXT)}


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"stack-v2"}))
def test_a_recipe_reads_its_repository(server: HubServer, name: str) -> None:
    recipe = RECIPES[name]
    repo, files = REPOS[name]
    assert parse_uri(recipe.uri).repo == repo
    server.add(f"datasets/{repo}", files or zyda(parse_uri(recipe.uri).config))
    source = open_remote(name, ReadOptions())
    assert source.name == name
    assert source.kind == recipe.kind
    rows = list(source)
    assert all(row.problem is None for row in rows)
    if recipe.kind == "text":
        assert [row.text for row in rows] == [row["text"] for row in TEXT]
    elif name == "openthoughts":
        assert [turn["role"] for turn in rows[0].messages or ()] == ["system", "user", "assistant"]
        assert (rows[0].messages or ())[0]["content"] == "Think first."
        assert (rows[0].messages or ())[2]["content"].endswith("4")
    else:
        assert [list(row.messages or ()) for row in rows] == [TALK]


def test_a_recipe_takes_the_endings_of_an_address() -> None:
    assert recipe_of("fineweb-edu@sample-10BT") is not None
    _, uri = recipe_of("fineweb-edu@sample-10BT#v1") or (None, None)
    assert str(uri) == "hf://datasets/HuggingFaceFW/fineweb-edu@sample-10BT#v1"
    _, uri = recipe_of("ultrachat-sft:test_sft") or (None, None)
    assert str(uri) == "hf://datasets/HuggingFaceH4/ultrachat_200k:test_sft"
    assert recipe_of("fineweb-education") is None


def test_what_the_user_says_goes_before_the_recipe() -> None:
    recipe = RECIPES["fineweb-edu"]
    said = merged(recipe, ReadOptions(where=("score>=4",), max_chars=100, stream=True))
    assert (said.text, said.schema, said.where) == ("text", "text", ("score>=4",))
    assert (said.max_chars, said.stream) == (100, True)
    assert merged(recipe, ReadOptions(text="url")).text == "url"
    built = merged(recipe, ReadOptions(template="{url} {text}"))
    assert (built.text, built.template) == ("", "{url} {text}")


def test_a_gated_data_set_says_what_to_do(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add("datasets/GAIR/lima", REPOS["lima"][1], token="hf_right")
    page = f"{server.url}/datasets/GAIR/lima"
    for token in ("", "hf_wrong"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(DataError, match="gated") as caught:
            list(open_remote("lima", ReadOptions()))
        assert "HF_TOKEN" in str(caught.value)
        assert page in str(caught.value)
        assert "\n" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert len(list(open_remote("lima", ReadOptions()))) == 1


def test_mixtures_name_recipes_and_add_up() -> None:
    for mixture in MIXTURES.values():
        assert set(mixture.shares) <= set(RECIPES)
        assert sum(mixture.shares.values()) == pytest.approx(1)
    assert MIXTURES["web-code-math"].shares["zyda2-fwe"] == 0.44
    assert "    data/smoltalk: 0.4844\n" in mixture_text("midtrain")


CODE = {
    "print('hello')\n": "UTF-8",
    "# café\n": "ISO-8859-1",
    "x = 1\n" * 500: "UTF-8",
}


@pytest.fixture
def archive(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Blobs in the archive, and rows of ids: one blob is missing, one is not what it says."""
    files = []
    for number, (text, encoding) in enumerate(CODE.items()):
        data = text.encode(encoding)
        blob = hashlib.sha1(data).hexdigest()
        server.plain[f"softwareheritage/content/{blob}"] = gzip.compress(data)
        language = "C" if number == 2 else "Python"
        files.append({"blob_id": blob, "src_encoding": encoding, "language": language})
    wrong = hashlib.sha1(b"\xff\xfe\xff").hexdigest()
    server.plain[f"softwareheritage/content/{wrong}"] = gzip.compress(b"\xff\xfe\xff")
    files.insert(1, {"blob_id": "0" * 40, "src_encoding": "UTF-8", "language": "Python"})
    files.append({"blob_id": wrong, "src_encoding": "UTF-8", "language": "C"})
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    rows = [{"repo_name": f"r{n}", "files": files[n::2]} for n in range(2)]
    server.add(
        "datasets/bigcode/the-stack-v2-train-smol-ids",
        {"data/train-00000-of-00001.parquet": parquet(rows)},
    )
    return rows


@pytest.mark.parametrize("stream", [False, True])
def test_blobs_become_documents(
    server: HubServer, archive: list[dict[str, Any]], stream: bool
) -> None:
    source = open_remote("stack-v2", ReadOptions(stream=stream))
    tally: Counter[str] = Counter()
    (piece,) = source.pieces()
    rows = list(piece.rows(tally))
    good = [row.text for row in rows if row.problem is None]
    hello, cafe, long = CODE
    assert good == [hello, cafe, long]
    assert [row.problem for row in rows if row.problem] == ["not UTF-8"]
    assert rows[0].where == "data/train-00000-of-00001.parquet:0:0"
    assert tally[MISSING] == 1
    asked = len(server.asked("/content/"))
    assert asked == 5
    again: Counter[str] = Counter()
    assert list(piece.rows(again)) == rows
    assert again == tally
    assert len(server.asked("/content/")) == (10 if stream else 5), "kept unless streaming"


def test_filters_look_at_the_ids_before_a_blob_is_fetched(
    server: HubServer, archive: list[dict[str, Any]]
) -> None:
    source = open_remote("stack-v2", ReadOptions(where=("language=C",)))
    rows = list(source)
    assert [row.text for row in rows if row.problem is None] == [list(CODE)[2]]
    assert len(server.asked("/content/")) == 2


def test_a_blob_that_fails_is_tried_again_and_never_taken_for_missing(
    server: HubServer, archive: list[dict[str, Any]]
) -> None:
    server.plant("/content/", "status", status=503)
    server.plant("/content/", "cut")
    server.plant("/content/", "corrupt", at=0.9)
    rows = list(open_remote("stack-v2", ReadOptions(stream=True)))
    assert [row.text for row in rows if row.problem is None] == list(CODE)
    server.plant("/content/", "status", status=500, times=100)
    with pytest.raises(DataError, match="in 3 tries"):
        list(open_remote("stack-v2", ReadOptions(stream=True)))


def test_an_archive_that_refuses_everything_is_not_an_empty_one(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    files = [{"blob_id": f"{n:040d}", "src_encoding": "UTF-8"} for n in range(50)]
    server.add(
        "datasets/bigcode/the-stack-v2-train-smol-ids",
        {"data/train-00000-of-00001.parquet": parquet([{"files": files}])},
    )
    server.plant("/content/", "status", status=403, times=1000)
    with pytest.raises(DataError, match=r"refuses every blob \(403\)"):
        list(open_remote("stack-v2", ReadOptions()))


def test_many_blobs_are_under_way_but_not_too_many(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    monkeypatch.setattr("foundling.data.hub.stack.PARALLEL", 6)
    files = []
    for number in range(40):
        data = f"file {number}".encode()
        blob = hashlib.sha1(data).hexdigest()
        server.plain[f"softwareheritage/content/{blob}"] = gzip.compress(data)
        files.append({"blob_id": blob, "src_encoding": "UTF-8", "path": f"{number}.py"})
    server.add("datasets/bigcode/the-stack-v2-train-smol-ids", {"train.parquet": parquet(files)})
    server.slow = 0.02
    rows = list(open_remote("stack-v2", ReadOptions()))
    assert [row.text for row in rows] == [f"file {n}" for n in range(40)]
    assert 2 <= server.open_most <= 6


def test_work_in_order_does_not_run_ahead() -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1000):
            drawn.append(number)
            yield number

    results = in_order(lambda number: number * number, items(), workers=3)
    assert [next(results) for _ in range(5)] == [(n, n * n) for n in range(5)]
    assert len(drawn) <= 5 + 2 * 3
    results.close()
    with pytest.raises(ZeroDivisionError):
        list(in_order(lambda number: 1 // (number - 7), iter(range(50)), workers=3))


def test_an_address_of_the_web_is_read_with_the_same_care(server: HubServer) -> None:
    rows = "".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(1000)).encode()
    server.plain["files/a.jsonl"] = rows
    server.plant("/files/a.jsonl", "cut", at=0.5)
    source = open_remote(f"{server.url}/files/a.jsonl", ReadOptions())
    assert [row.text for row in source] == [f"line {n}" for n in range(1000)]
    assert source.name == "a.jsonl"
    with pytest.raises(DataError, match="does not end like a file"):
        open_remote(f"{server.url}/files/a.exe", ReadOptions())
    with pytest.raises(DataError, match=r"b\.jsonl is not at http"):
        open_remote(f"{server.url}/files/b.jsonl", ReadOptions())


def test_a_store_is_read_through_fsspec() -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    for number in range(3):
        lines = "".join(json.dumps({"text": f"{number}.{n}"}) + "\n" for n in range(5))
        store.pipe(f"/corpus/part-{number}.jsonl", lines.encode())
    store.pipe("/corpus/readme.md", b"no data")
    everything = [f"{number}.{n}" for number in range(3) for n in range(5)]
    for spec in ("memory://corpus", "memory://corpus/*.jsonl"):
        assert [row.text for row in open_remote(spec, ReadOptions())] == everything
    one = open_remote("memory://corpus/part-1.jsonl", ReadOptions())
    assert [row.text for row in one] == everything[5:10]
    assert next(iter(one)).where == "part-1.jsonl:1"
    with pytest.raises(DataError, match="holds no file"):
        open_remote("memory://corpus/*.csv", ReadOptions())
    with pytest.raises(DataError, match="scheme that is not known"):
        open_remote("nothing://corpus/a.csv", ReadOptions())
    with pytest.raises(DataError, match=r"pip install 'foundling\[remote\]'"):
        open_remote("abfs://corpus/a.csv", ReadOptions())
    store.rm("/corpus", recursive=True)
