"""A truncated, misnamed or foreign file is called what it is, with what to do about it."""

import gzip
import io
import json
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundling.checkpoint.bundle import model_of
from foundling.cli.main import run_verb
from foundling.config.data_manifest import Manifest
from foundling.config.errors import DataError, UserError
from foundling.data.open_source import open_source
from foundling.runtime.run_dir import RunDir

ROWS = "".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(20)).encode()
sink = io.BytesIO()
pq.write_table(pa.table({"text": ["one", "two"]}), sink)
PARQUET = sink.getvalue()
WEIGHTS = struct.pack("<Q", 40) + b'{"w":{"dtype":"F32"}}' + bytes(30)
PDF, ZIP, PNG = b"%PDF-1.7\n%x", b"PK\x03\x04" + bytes(30), b"\x89PNG\r\n\x1a\n"
HTML = b"\n<!DOCTYPE html><html><body>404</body></html>"

FILES = {
    "a.parquet": (ROWS, "is JSON by its first bytes and its name ends in .parquet; rename it"),
    "b.parquet": (PARQUET[:-9], "cannot be read as Parquet (it is truncated: its end is missing)"),
    "c.jsonl.gz": (ROWS, "is JSON by its first bytes and its name ends in .gz; rename it"),
    "d.jsonl": (PARQUET, "its name ends in .jsonl; rename it to end in .parquet."),
    "e.jsonl": (gzip.compress(ROWS), "is gzip by its first bytes and its name ends in .jsonl;"
                " rename it to end in .jsonl.gz."),
    "f.md": (b"# notes", "is text by its first bytes and its name ends in .md; rename it"),
    "g.pdf": (PDF, "is a PDF document and holds no rows; give text in "),
    "h.txt": (PDF, "is a PDF document and holds no rows; give text in "),
    "i.zip": (ZIP, "is a zip archive; unpack it and give the files in it."),
    "j.jsonl": (HTML, "is HTML and holds no rows; give text in "),
    "k.safetensors": (WEIGHTS, "is safetensors (weights of a model) and holds no rows"),
    "l.parquet": (b"version https://git-lfs.github.com/spec/v1\n", "fetch it with `git lfs pull`"),
    "m.csv.gz": (b"text\nhello\n", "is text by its first bytes and its name ends in .gz"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_called_what_it_is(name: str, tmp_path: Path) -> None:
    path, (data, said) = tmp_path / name, FILES[name]
    path.write_bytes(data)
    with pytest.raises(DataError) as refused:
        open_source(str(path))
    assert str(refused.value).removeprefix(f"{tmp_path}/").startswith(f"{name} ")
    assert said in str(refused.value)
    assert "hamlet" not in str(refused.value)


def test_what_only_looks_foreign_is_read(tmp_path: Path) -> None:
    for name, data, rows in (
        ("page.txt", HTML, 1),
        ("list.json", b'[{"text": "a"}]', 1),
        ("lines.txt", ROWS, 1),
        ("bad.jsonl", b"\x00\xff\n" + ROWS, 21),
    ):
        (tmp_path / name).write_bytes(data)
        assert len(list(open_source(str(tmp_path / name)))) == rows


def test_a_folder_without_rows_says_what_lies_in_it(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats/a.png").write_bytes(PNG)
    with pytest.raises(DataError, match=r"file that can be read, and a\.png in it is an image; "):
        open_source(str(tmp_path))
    with pytest.raises(DataError, match=r"hamlte does not exist; did you mean hamlet\?"):
        open_source("hamlte")


def test_a_file_in_place_of_a_run_or_a_data_set_is_called_so(tmp_path: Path) -> None:
    path, lost = tmp_path / "a.pdf", tmp_path / "lost"
    path.write_bytes(PDF)
    with pytest.raises(UserError, match=r"a\.pdf is a file and no built data set; build one of it"):
        Manifest.load(path)
    with pytest.raises(UserError, match=r"the data set .*lost does not exist; build it with"):
        Manifest.load(lost)
    with pytest.raises(UserError, match=r"a\.pdf is not a run but a file \(a PDF document\)"):
        RunDir(path).require()
    with pytest.raises(UserError, match=r"a\.pdf is .*a PDF document"):
        model_of(str(path))
    with pytest.raises(UserError, match=r"lost does not exist"):
        model_of(str(lost))
    with pytest.raises(UserError, match=r"a\.pdf is a PDF document and holds no rows"):
        run_verb(["data", "inspect", str(path)])
    with pytest.raises(UserError, match=r"lost does not exist; give a file"):
        run_verb(["data", "inspect", str(lost)])
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(UserError, match=r"holds no manifest\.json; .* --tokenizer"):
        run_verb(["data", "inspect", str(tmp_path / "a.txt")])
