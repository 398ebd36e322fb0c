"""Sources: files, folders and patterns of every format, in pieces that any process can read."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from foundling.config.errors import ConfigError, DataError
from foundling.data.open_source import open_source
from foundling.data.readers import files
from foundling.data.readers.hamlet import PIECE_DOCUMENTS
from foundling.data.readers.source import ReadOptions, Row, unusable

SHARED = Path(__file__).parents[5] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no real data beside the repository")

CHAT = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "Ada"}]
TEXTS = [
    "Ada lives by the mill.\nShe has a goat, “Pip”.",
    'He said "no", twice',
    "naïve\tcafé",
    "x",
]


def texts(spec: Path | str, **options: Any) -> list[str | None]:
    source = open_source(str(spec), options=ReadOptions(**options))
    rows = list(source)
    assert [row.problem for row in rows] == [None] * len(rows)
    return [row.text for row in rows]


def write(path: Path, table: pa.Table) -> None:
    """TEXTS in the format that the name says."""
    records = table.to_pylist()
    if path.name.endswith("parquet"):
        pq.write_table(table, path, row_group_size=2)
    elif path.name.endswith("feather"):
        pyarrow.feather.write_feather(table, path)
    elif path.name.endswith("file.arrow"):
        with pa.ipc.new_file(path, table.schema) as out:
            out.write_table(table, max_chunksize=3)
    elif path.name.endswith("stream.arrow"):
        with pa.ipc.new_stream(path, table.schema) as out:
            out.write_table(table, max_chunksize=3)
    elif path.name.endswith("csv"):
        pyarrow.csv.write_csv(table, path)
    elif path.name.endswith("tsv"):
        options = pyarrow.csv.WriteOptions(delimiter="\t")
        pyarrow.csv.write_csv(table, path, options)
    elif path.name.endswith("jsonl"):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif path.name.endswith("list.json"):
        path.write_text(json.dumps(records, indent=2, ensure_ascii=False))
    elif path.name.endswith("lines.json"):
        path.write_text("\n".join(json.dumps(record) for record in records))
    else:
        path.write_text("\n".join(json.dumps(record, indent=1) for record in records))


FORMATS = ["parquet", "feather", "file.arrow", "stream.arrow", "csv", "tsv", "jsonl"]
FORMATS += ["list.json", "lines.json", "objects.json"]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_gives_the_same_texts(format: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{format}"
    write(path, pa.table({"n": range(len(TEXTS)), "text": TEXTS}))
    assert texts(path) == TEXTS
    assert texts(path, where=("n>=1", "n<3")) == TEXTS[1:3]
    assert texts(path, template=r"{n}\n{text}") == [f"{n}\n{text}" for n, text in enumerate(TEXTS)]


@pytest.mark.parametrize("suffix", ["gz", "zst", "zstd", "xz", "bz2", "gz+gz", "zst+zst"])
def test_compressed_text_is_unpacked(suffix: str, tmp_path: Path) -> None:
    pack = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress, "zst": _zstd}
    body = "".join(json.dumps({"text": text * 1000}) + "\n" for text in TEXTS).encode()
    suffix, _, again = suffix.partition("+")
    name = "zst" if suffix == "zstd" else suffix
    packed = pack[name](body[:100]) + pack[name](body[100:]) if again else pack[name](body)
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(packed)
    assert texts(tmp_path / f"a.jsonl.{suffix}") == [text * 1000 for text in TEXTS]


def _zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


def test_a_table_inside_a_compression_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    with pytest.raises(DataError, match=r"a\.parquet\.gz is a table inside gzip"):
        open_source(str(tmp_path / "a.parquet.gz"))


def test_files_are_read_in_order_with_their_places(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n \t\n\n\nthree \xff\n\r\n\r\nfour\r\nfive")
    lines = ['{"text": "six"}', "{broken", "", "[1]", '{"text": 5}', '{"other": 1}', '"seven"']
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    (tmp_path / "sub").mkdir()
    pq.write_table(pa.table({"text": ["eight", None], "n": [1, 2]}), tmp_path / "sub/c.parquet")
    (tmp_path / "d.csv").write_text('n,text\n1,"nine\nlines"\n2\n3,"ten"x"\n4,eleven\n')
    (tmp_path / "ignored.md").write_text("no")
    (tmp_path / "dataset_info.json").write_text('{"features": {}}')
    (tmp_path / ".hidden.txt").write_text("no")
    source = open_source(str(tmp_path))
    assert [(row.where, row.problem or row.text) for row in source] == [
        ("a.txt:1", "one\ntwo"),
        ("a.txt:6", "not UTF-8"),
        ("a.txt:9", "four\nfive"),
        ("b.jsonl:1", "six"),
        ("b.jsonl:2", "not JSON"),
        ("b.jsonl:4", "neither text nor messages"),
        ("b.jsonl:5", "text is int"),
        ("b.jsonl:6", "no text"),
        ("b.jsonl:7", "seven"),
        ("d.csv:2", "nine\nlines"),
        ("d.csv:4", "1 fields under 2 names"),
        ("d.csv:5", "not CSV (',' expected after '\"')"),
        ("d.csv:6", "eleven"),
        ("sub/c.parquet:0", "eight"),
        ("sub/c.parquet:1", "no text"),
    ]
    assert source.kind == "text"
    assert source.draws is False


def test_patterns_name_files_and_refuse_what_they_cannot_read(tmp_path: Path) -> None:
    for name in ("x/a.txt", "x/b.txt", "y/a.txt", "y/c.txt.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data = name.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert texts(tmp_path / "*/a.txt") == ["x/a.txt", "y/a.txt"]
    assert texts(tmp_path / "**/*.txt*") == ["x/a.txt", "x/b.txt", "y/a.txt", "y/c.txt.gz"]
    assert [row.where for row in open_source(str(tmp_path / "x/[ab]*"))] == ["a.txt:1", "b.txt:1"]
    (tmp_path / "x/notes.md").write_text("no")
    with pytest.raises(DataError, match=r"matches .*notes\.md"):
        open_source(str(tmp_path / "x/*"))
    with pytest.raises(DataError, match="no file matches"):
        open_source(str(tmp_path / "*.parquet"))


@pytest.mark.parametrize("spec", ["nowhere", "hamlet:poems", "books/lost.jsonl"])
def test_a_source_that_is_not_there_does_not_exist(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"^{spec} does not exist; "):
        open_source(spec)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.parquet", "a.arrow"])
def test_pieces_together_are_the_file_and_survive_pickling(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [f"{n} é\n" + "lorem ipsum\n" * (n % 7) + "end" for n in range(3000)]
    if name == "a.txt":
        (tmp_path / name).write_text("\n \n\n".join(bodies) + "\n")
    elif name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_text("".join(json.dumps({"text": b}) + "\n" for b in bodies))
    elif name == "a.arrow":
        table = pa.table({"text": bodies})
        with pa.ipc.new_file(tmp_path / name, table.schema) as out:
            out.write_table(table, max_chunksize=100)
    else:
        pq.write_table(pa.table({"text": bodies}), tmp_path / name, row_group_size=100)
    whole = [(row.where, row.text) for row in open_source(str(tmp_path / name))]
    assert [text for _, text in whole] == bodies
    monkeypatch.setattr(files, "LEAST_BYTES", 10_000)
    monkeypatch.setattr(files, "_STEP", 3_000)
    source = open_source(str(tmp_path / name))
    pieces = list(source.pieces())
    assert 4 < len(pieces) <= 65
    assert len({piece.name for piece in pieces}) == len({p.identity() for p in pieces})
    assert len({piece.name for piece in pieces}) == len(pieces)
    read = [list(pickle.loads(pickle.dumps(piece)).rows()) for piece in reversed(pieces)]
    assert [(row.where, row.text) for rows in reversed(read) for row in rows] == whole
    assert min(map(len, read)) > 0
    for limit in (1, 500, 2999, 9999):
        cut = open_source(str(tmp_path / name), documents=limit)
        assert [(row.where, row.text) for row in cut] == whole[:limit]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("step", [2, 3, 64])
def test_cuts_know_their_lines_wherever_a_block_ends(
    end: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LEAST_BYTES", 1)
    monkeypatch.setattr(files, "MOST_PIECES", 40)
    monkeypatch.setattr(files, "_STEP", step)
    bodies = [end.join(["x" * (n % 5 + 1)] * (n % 4 + 1)) for n in range(60)]
    (tmp_path / "a.txt").write_bytes((end * 2).join(bodies).encode())
    places = [1]
    for body in bodies[:-1]:
        places.append(places[-1] + body.count("\n") + 2)
    source = open_source(str(tmp_path / "a.txt"))
    assert len(list(source.pieces())) > 8
    assert [row.where for row in source] == [f"a.txt:{place}" for place in places]
    assert [row.text for row in source] == [body.replace("\r", "") for body in bodies]


def test_a_recipe_changes_with_the_files_and_how_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "n": 1}')

    def facts(**options: Any) -> tuple[str, str]:
        source = open_source(str(tmp_path), options=ReadOptions(**options))
        assert json.loads(json.dumps(source.recipe))["source"] == tmp_path.name
        return json.dumps(source.recipe), next(iter(source.pieces())).identity()

    found = [facts(), facts(), facts(stream=True), facts(where=("n=1",)), facts(normalise="nfc")]
    (tmp_path / "a.jsonl").write_text('{"text": "two", "n": 1}')
    found += [facts()]
    assert found[0] == found[1] == found[2]
    for column in zip(*found, strict=True):
        assert len(set(column)) == 4


@pytest.mark.parametrize("spec", ["hamlet", "hamlet:chat"])
def test_the_pieces_of_hamlet_are_its_rows_in_order(spec: str) -> None:
    size = PIECE_DOCUMENTS
    source = open_source(spec, seed=3, documents=size + 200, val_share=0.0301)
    pieces = list(source.pieces())
    assert [piece.name for piece in pieces] == [
        f"documents 0..{size - 1}",
        f"documents {size}..{size + 199}",
    ]
    assert pieces[0].identity() != pieces[1].identity()
    second = list(pickle.loads(pickle.dumps(pieces[1])).rows())
    assert next(row.where for row in second if row.split == "train") == f"train:{size}"
    # What the rows of one long walk would be: val is written as soon as it is due.
    written, wanted = 0, []
    for index in range(size + 200):
        wanted.append(f"train:{index}")
        while written < (index + 1) * 0.0301:
            wanted.append(f"val:{written}")
            written += 1
    begin = wanted.index(f"train:{size}")
    assert [row.where for row in second] == wanted[begin:]
    assert source.draws
    endless = open_source(spec, seed=3).pieces()
    assert len(list(islice(endless, 5))) == 5


def test_hamlet_refuses_options_that_could_not_act() -> None:
    with pytest.raises(ConfigError, match="where would have no effect"):
        open_source("hamlet", options=ReadOptions(where=("a=b",)))


def test_an_empty_file_goes_along(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    assert open_source(str(tmp_path)).kind == "text"
    assert list(open_source(str(tmp_path))) == []
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": CHAT}))
    assert open_source(str(tmp_path)).kind == "chat"


def test_a_line_of_any_alphabets_spaces_is_blank(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n \xa0\ntwo\n\u3000 \nthree\n\t\u2003\n", "utf-8")
    assert texts(tmp_path / "a.txt") == ["one", "two", "three"]


def test_a_file_that_shrinks_while_it_is_cut_ends(tmp_path: Path) -> None:
    class Shrinking(io.BytesIO):
        def seek(self, at: int, whence: int = 0) -> int:
            return super().seek(at, whence) + (100 if whence == 2 else 0)

    class File:
        name, local, open = "a.txt", "a.txt", staticmethod(lambda: Shrinking(b"one\n\ntwo\n"))

    assert len(list(islice(files._spans(File(), True), 5))) <= 2  # type: ignore[arg-type]


def test_strings_of_many_escapes_take_no_memory_each(tmp_path: Path) -> None:
    row = json.dumps([{"text": '\\"' * 500_000}])
    (tmp_path / "a.json").write_text(row)
    tracemalloc.start()
    try:
        assert [len(text or "") for text in texts(tmp_path / "a.json")] == [1_000_000]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * len(row)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    bom = b"\xef\xbb\xbf"
    for name, body in (
        ("a.txt", b"one"),
        ("b.csv", b"text\none"),
        ("c.jsonl", b'{"text": "one"}'),
        ("d.json", b'[{"text": "one"}]'),
    ):
        (tmp_path / name).write_bytes(bom + body)
        assert texts(tmp_path / name) == ["one"]


@needs_shared
def test_real_text_is_read_whole() -> None:
    path = str(SHARED / "corpus" / "val-00000.parquet")
    table = pq.read_table(path)
    assert texts(path) == table["text"].to_pylist()
    tally: Counter[str] = Counter()
    some = open_source(path, options=ReadOptions(where=("source=wiki_hotpot",)))
    kept = [row.where for piece in some.pieces() for row in piece.rows(tally)]
    wanted = [n for n, name in enumerate(table["source"].to_pylist()) if name == "wiki_hotpot"]
    assert kept == [f"val-00000.parquet:{n}" for n in wanted]
    assert tally == {"filtered": len(table) - len(wanted)}


@needs_shared
@pytest.mark.parametrize(
    ("name", "rows", "turns", "rejected"),
    [
        ("chat/lima.json.gz", 1029, 2164, 0),
        ("chat/llamafactory_alpaca_en_demo.json.gz", 999, 1998, 0),
        ("chat/llamafactory_dpo_en_demo.json.gz", 300, 1206, 300),
        ("chat/llamafactory_glaive_toolcall_en_demo.json.gz", 300, 2105, 0),
        ("math/gsm8k_test.jsonl.gz", 1319, 2638, 0),
    ],
)
def test_real_conversations_are_all_usable(name: str, rows: int, turns: int, rejected: int) -> None:
    tally: Counter[str] = Counter()
    source = open_source(str(SHARED / name))
    found: list[Row] = [row for piece in source.pieces() for row in piece.rows(tally)]
    assert source.kind == "chat"
    assert [unusable(row, chat=True) for row in found] == [None] * rows
    assert sum(len(row.messages or ()) for row in found) == turns
    assert tally["rejected"] == rejected


def test_a_column_that_is_there_twice_is_refused_where_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,n,n,,\none,1,2,,\n")
    assert [row.text for row in open_source(str(tmp_path / "a.csv"))] == ["one"]
    (tmp_path / "b.csv").write_text("n,text,text\n1,one,two\n")
    table = pa.Table.from_arrays([pa.array(["one"]), pa.array(["two"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "b.parquet")
    for path in (tmp_path / "b.csv", tmp_path / "b.parquet"):
        with pytest.raises(DataError, match=rf"{path.name} has two columns named `text`"):
            open_source(str(path))
    for options in (ReadOptions(template="{text} {n}"), ReadOptions(where=("n>=1",))):
        with pytest.raises(DataError, match=r"a\.csv has two columns named `n`"):
            open_source(str(tmp_path / "a.csv"), options=options)
