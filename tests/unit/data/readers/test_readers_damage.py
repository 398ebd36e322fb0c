"""Damaged files: what can be read is read, and the rest is one row in quarantine or a sentence."""

import bz2
import errno
import gzip
import json
import lzma
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundling.config.errors import DataError
from foundling.data.build import build as build_module
from foundling.data.open_source import open_source
from foundling.data.readers import file_formats
from foundling.data.readers import text as text_module
from foundling.data.readers.files import FilePiece
from foundling.data.readers.source import ReadOptions, Row, unusable
from foundling.tokenizer.bpe_trainer import train_tokenizer

TEXTS = [
    f"{n} " + " ".join(random.Random(n).choices(["mill", "goat", "bread"], k=60))
    for n in range(400)
]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "bz2": lambda data: bz2.compress(data[: len(data) // 2]) + bz2.compress(data[len(data) // 2 :]),
    "zst": zstd,
}


def read(path: Path) -> list[Row]:
    return [row for piece in open_source(str(path)).pieces() for row in piece.rows()]


def attempt(path: Path) -> tuple[list[Row], str]:
    """Rows and an empty sentence, or the sentence alone."""
    try:
        return read(path), ""
    except DataError as refusal:
        return [], str(refusal)


def lost(rows: list[Row]) -> list[int]:
    """What each place at which a file breaks off says of the rows after it."""
    return [row.lost for row in rows if row.lost is not None]


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("share", [0.3, 0.8, 0.999])
def test_a_cut_file_is_read_up_to_the_cut(suffix: str, share: float, tmp_path: Path) -> None:
    packed = PACK[suffix](JSONL)
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(packed[: int(len(packed) * share)])
    rows, sentence = attempt(path)
    if sentence:  # so short that not one row came out
        assert "has no row that can be read" in sentence
        return
    good = [row.text for row in rows if row.problem is None]
    assert good == TEXTS[: len(good)]
    assert len(good) < len(TEXTS)
    last = rows[-1]
    assert last.problem is not None
    assert last.problem.startswith("the file cannot be read from here on")
    assert last.where == f"{path.name}:{len(good) + 1}"
    assert lost(rows) == [0], "how much is missing, nobody can say"
    assert len(rows) == len(good) + 1


@pytest.mark.parametrize("suffix", ["gz", "xz", "bz2"])
def test_a_flipped_byte_never_passes_silently(suffix: str, tmp_path: Path) -> None:
    packed = PACK[suffix](JSONL)
    rand = random.Random(suffix)
    # The first bytes of gzip hold a time and a name, which nobody reads.
    for place in rand.sample(range(16, len(packed)), 25):
        damaged = bytearray(packed)
        damaged[place] ^= 1 << rand.randrange(8)
        path = tmp_path / f"a.jsonl.{suffix}"
        path.write_bytes(damaged)
        rows, sentence = attempt(path)
        assert "has no row" in sentence or any(row.problem for row in rows)


TABLES = ["parquet", "plain.parquet", "file.arrow", "stream.arrow"]


def write_table(path: Path) -> None:
    table = pa.table({"text": TEXTS, "n": range(len(TEXTS))})
    if path.name.endswith("plain.parquet"):
        pq.write_table(table, path, row_group_size=50, compression="none", use_dictionary=False)
    elif path.name.endswith("parquet"):
        pq.write_table(table, path, row_group_size=50, write_page_checksum=True)
    else:
        new = pa.ipc.new_file if path.name.endswith("file.arrow") else pa.ipc.new_stream
        with new(path, table.schema) as out:
            out.write_table(table, max_chunksize=50)


@pytest.mark.parametrize("name", TABLES)
def test_flipped_bytes_in_tables_end_in_rows_or_a_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{name}"
    write_table(path)
    sound = path.read_bytes()
    rand = random.Random(name)
    outcomes: Counter[str] = Counter()
    for _ in range(80):
        damaged = bytearray(sound)
        # Half of the damage goes to the ends, where tables say what they are.
        reach = rand.choice([len(damaged), 700])
        for _ in range(rand.choice([1, 1, 4, 64])):
            damaged[rand.randrange(-reach // 2, reach // 2)] = rand.randrange(256)
        path.write_bytes(damaged)
        rows, sentence = attempt(path)
        if sentence:
            assert path.name in sentence
            outcomes["refused"] += 1
            continue
        bad = [row for row in rows if unusable(row, chat=False)]
        outcomes["noted" if bad else "passed"] += 1
        assert all(row.where for row in rows)
    assert min(outcomes["noted"], outcomes["refused"]) > 0
    if name == "parquet":  # pages have checksums: only the footer's statistics can change unseen
        assert outcomes["passed"] < 40


@pytest.mark.parametrize("name", TABLES)
def test_cut_tables_end_in_rows_or_a_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{name}"
    write_table(path)
    sound = path.read_bytes()
    for size in (0, 3, 9, 500, len(sound) // 2, len(sound) - 1):
        path.write_bytes(sound[:size])
        rows, sentence = attempt(path)
        if sentence:
            assert "cannot be read as" in sentence
            continue
        # Only a stream has its beginning in front; it misses even its end mark.
        assert name == "stream.arrow"
        good = [row.text for row in rows if row.problem is None]
        assert good == TEXTS[: len(good)]
        assert len(lost(rows)) == 1


def test_lost_rows_of_a_table_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_table(path)
    meta = pq.ParquetFile(path).metadata
    column = meta.row_group(3).column(0)
    place = column.dictionary_page_offset + column.total_compressed_size // 2
    data = bytearray(path.read_bytes())
    data[place] ^= 255
    path.write_bytes(data)
    rows = read(path)
    assert len([row for row in rows if row.problem is None]) == 150
    assert rows[-1].problem is not None
    assert "250 rows are lost" in rows[-1].problem
    assert rows[-1].where == "a.parquet:150"
    assert lost(rows) == [250]


def test_undecodable_text_in_a_table_costs_its_row(tmp_path: Path) -> None:
    texts = pa.array([b"one", b"tw\xff", b"three", None], pa.binary())
    for name in ("a.parquet", "a.arrow"):
        for kind in (pa.string(), pa.binary()):
            column = texts.view(kind)
            table = pa.table({"text": column})
            if name == "a.parquet":
                pq.write_table(table, tmp_path / name)
            else:
                with pa.ipc.new_file(tmp_path / name, table.schema) as out:
                    out.write_table(table)
            rows = read(tmp_path / name)
            assert [row.problem or row.text for row in rows] == [
                "one",
                "not UTF-8",
                "three",
                "no text",
            ]
    chats = pa.array(
        [[{"role": b"user", "content": b"\xff"}], [{"role": b"user", "content": b"x"}]]
    )
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    raw = pa.Array.from_buffers(
        kind, 2, chats.buffers()[:2], children=[_as_text(chats.values, kind.value_type)]
    )
    pq.write_table(pa.table({"messages": raw}), tmp_path / "c.parquet")
    rows = read(tmp_path / "c.parquet")
    assert [row.problem for row in rows] == ["not UTF-8", None]


def _as_text(struct: pa.Array, kind: pa.DataType) -> pa.Array:
    fields = [struct.field(n).view(pa.string()) for n in range(struct.type.num_fields)]
    return pa.StructArray.from_arrays(fields, names=[field.name for field in kind])


@pytest.mark.parametrize(
    ("body", "rows", "end"),
    [
        ('[{"text": "a"}, {"text": "b"', ["a"], "breaks off inside a row"),
        ('[{"text": "a"}, ', ["a"], "the list is not closed"),
        ('[{"text": "a"} {"text": "b"}]', ["a"], "no comma between two rows"),
        ('[{"text": "a"}] tail', ["a"], "more follows the end of the list"),
        ('[{"text": "a"}, {"text": b}, {"text": "c"}]', ["a", "not JSON", "c"], None),
        ('[{"text": "a"}, nonsense, {"text": "c"}]', ["a", "not JSON", "c"], None),
        (
            '[{"text": "a\\"]}"}, 12, -1.5e3, {"text": "c"}]',
            ['a"]}', "neither", "neither", "c"],
            None,
        ),
        ('[{"text": "a"}, {"x": ' + "[" * 5000 + "]" * 5000 + "}]", ["a", "nested too"], None),
        ("[]", [], None),
        ('{\n"text":\n"a"}\n{"text": "b"}', ["a", "b"], None),
        ('{\n"text":\n"a"}\n}{"text": "b"}', ["a", "not JSON", "b"], None),
    ],
)
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_lists_of_json_are_read_as_far_as_they_make_sense(
    body: str,
    rows: list[str],
    end: str | None,
    block: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_module, "BLOCK", block)
    (tmp_path / "a.json").write_text(body)
    found = read(tmp_path / "a.json")
    last = found.pop() if end else None
    assert len(found) == len(rows)
    for row, wanted in zip(found, rows, strict=True):
        assert (row.problem or row.text or "").startswith(wanted)
    assert bool(lost([last] if last else found)) == bool(end)
    if last is not None:
        assert end in (last.problem or "")


def test_one_bad_byte_in_a_list_costs_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_bytes(
        '[{"text": "é"}, {"text": "?"}, {"text": "ü"}]'.encode().replace(b"?", b"\xff")
    )
    for block in (1, 3, 1 << 20):
        monkeypatch.setattr(text_module, "BLOCK", block)
        assert [row.problem or row.text for row in read(tmp_path / "a.json")] == [
            "é",
            "not UTF-8",
            "ü",
        ]


def test_no_record_is_too_long_to_be_stepped_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "RECORD_BYTES", 1000)
    monkeypatch.setattr(text_module, "BLOCK", 64)
    long = "x" * 5000
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{{"text": "{long}"}}\n{{"text": "c"}}\n')
    (tmp_path / "c.txt").write_text("a\n\n" + "long line\n" * 500 + "\n\nc\n")
    (tmp_path / "line.txt").write_text(f"a\n\n{long}\nsecond line\n\nc\n")
    places = {"a.jsonl": [1, 2, 3], "c.txt": [1, 3, 505], "line.txt": [1, 3, 6]}
    for name, where in places.items():
        rows = read(tmp_path / name)
        assert [row.where for row in rows] == [f"{name}:{place}" for place in where]
        assert [row.text for row in rows if not row.problem] == ["a", "c"]
        assert (rows[1].problem or "").startswith("over the limit of 1000")
        assert not lost(rows)
    (tmp_path / "b.json").write_text(
        f'[{{"text": "a"}},\n{{"text": "{long}\\""}},\n{{"text": "c"}}]'
    )
    (tmp_path / "d.csv").write_text(
        f'text,n\na,1\n"{long}\n',
    )
    for name, lost_too in (("b.json", "; about 2 rows are lost"), ("d.csv", "")):
        rows = read(tmp_path / name)  # where the next row begins is unknown
        assert [row.problem or row.text for row in rows] == [
            "a",
            "the file cannot be read from here on (a row does not end within 1000 bytes"
            f"{lost_too})",
        ]
        assert len(lost(rows)) == 1


def test_trouble_of_the_machine_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    (piece,) = open_source(str(tmp_path / "a.jsonl")).pieces()
    assert isinstance(piece, FilePiece)
    rows = piece.rows()
    next(rows)
    monkeypatch.setattr(text_module, "parsed", _broken_disk)
    with pytest.raises(DataError, match=r"a\.jsonl could not be read to its end \(Input/output"):
        list(rows)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match="cannot be opened"):
        list(piece.rows())
    assert file_formats.form_of("a.JSONL.GZ") == file_formats.Form("jsonl", "gzip")


def _broken_disk(line: bytes) -> object:
    raise OSError(errno.EIO, "Input/output error")


def damaged(home: Path) -> dict[str, tuple[Path, int, int]]:
    """Files that break off, with the least and the most rows that are said to be lost there."""
    found = {}
    rand = random.Random(7)
    letters = "".join(json.dumps({"text": rand.randbytes(200).hex()}) + "\n" for _ in range(3000))
    for suffix in ("gz", "zst", "xz"):
        packed = bytearray(PACK[suffix](letters.encode()))
        (home / f"cut.jsonl.{suffix}").write_bytes(packed[: len(packed) * 3 // 10])
        found[f"cut.jsonl.{suffix}"] = (0, 0)
    middle = len(packed) // 2
    packed[middle : middle + 2000] = b"\xff" * 2000
    (home / "damaged.jsonl.xz").write_bytes(packed)
    found["damaged.jsonl.xz"] = (600, 1600)
    write_table(home / "group.parquet")
    column = pq.ParquetFile(home / "group.parquet").metadata.row_group(3).column(0)
    bytes_ = bytearray((home / "group.parquet").read_bytes())
    bytes_[column.dictionary_page_offset + column.total_compressed_size // 2] ^= 255
    (home / "group.parquet").write_bytes(bytes_)
    found["group.parquet"] = (250, 250)
    rows = [json.dumps({"text": text}) for text in TEXTS]
    (home / "cut.json").write_text("[" + ", ".join(rows)[: len(JSONL) * 3 // 10])
    found["cut.json"] = (0, 2)
    (home / "comma.json").write_text("[" + ", ".join(rows[:99]) + " " + ", ".join(rows[99:]) + "]")
    found["comma.json"] = (295, 305)
    (home / "quote.csv").write_text(
        "text\n" + "\n".join([*TEXTS[:99], '"' + TEXTS[99], *TEXTS[100:]])
    )
    found["quote.csv"] = (295, 305)
    return {name: (home / name, *bounds) for name, bounds in found.items()}


def test_a_file_that_breaks_off_is_refused_and_what_is_lost_counts_as_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_formats, "BUFFER", 1 << 14)
    tokenizer = train_tokenizer(TEXTS, 300)
    for name, (path, least, most) in damaged(tmp_path).items():
        build = partial(
            build_module.build,
            open_source(str(path)),
            tokenizer,
            tmp_path / f"built-{name}",
            max_bad=0.2,
        )
        with pytest.raises(DataError, match=rf"{name}:\d+: .* --allow-broken-files"):
            build()
        with pytest.raises(DataError, match="--allow-broken-files"):  # to learn a tokenizer from
            list(open_source(str(path)))
        list(open_source(str(path), options=ReadOptions(allow_broken_files=True)))
        if most > 2:
            with pytest.raises(DataError, match=r"rows cannot be used .*--max-bad"):
                build(allow_broken_files=True)
        # The same folder goes on: neither flag changes a byte of what can be read.
        result = build(allow_broken_files=True, max_bad=1.0).recipe["result"]
        assert least <= result.get("lost", 0) <= most, name
        assert result["quarantined"] == 1
        assert result["rows"] > 90
    # A budget that ends before the damage has no need of what comes after it.
    path = tmp_path / "group.parquet"
    small = build_module.build(
        open_source(str(path)), tokenizer, tmp_path / "small", max_tokens=1000
    )
    assert small.train_tokens >= 1000
