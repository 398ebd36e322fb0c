"""An opened data set: what is damaged is refused in one sentence, what is held out stays so."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from unique_data import make_shard

from foundling.config.errors import DataError
from foundling.data.dataset import DataSet, held_out
from foundling.data.shard import read_shard, shard_to_batch, write_arrow, write_shard
from foundling.runtime.files import sha256_file

Make = Callable[..., DataSet]


def refusal(folder: Path, words: str, **options: str) -> None:
    """Opening must fail with one sentence that holds `words`."""
    with pytest.raises(DataError, match=words) as caught:
        DataSet(folder, **options)  # type: ignore[arg-type]
    assert str(caught.value).count("\n") == 0
    assert str(caught.value).endswith(".")


def test_a_missing_shard_is_refused(make_data: Make) -> None:
    folder = make_data([[4, 5], [6]]).folder
    (folder / "train/shard-00001.arrow").unlink()
    refusal(folder, r"shard-00001\.arrow is missing")


def test_a_truncated_shard_is_refused(make_data: Make) -> None:
    folder = make_data([[4, 5]], val=[[7]]).folder
    file = folder / "val/shard-00000.arrow"
    file.write_bytes(file.read_bytes()[:-8])
    refusal(folder, "bytes where the manifest says")


def test_a_flipped_byte_is_found_by_verify(make_data: Make) -> None:
    data = make_data([[4, 5], [6, 9]])
    data.verify()
    file = data.folder / "train/shard-00001.arrow"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"shard-00001\.arrow is damaged"):
        DataSet(data.folder).verify()


def test_another_tokenizer_is_refused(make_data: Make) -> None:
    folder = make_data([[4, 5]]).folder
    DataSet(folder, tokenizer="f" * 64)
    refusal(folder, "built with tokenizer ffffffffffff and eeeeeeeeeeee", tokenizer="e" * 64)


def test_an_edited_manifest_is_refused(make_data: Make) -> None:
    folder = make_data([[4, 5]]).folder
    content = json.loads((folder / "manifest.json").read_text())
    content["train"][0]["tokens"] += 1
    (folder / "manifest.json").write_text(json.dumps(content))
    refusal(folder, "was changed after it was written")


def test_a_shard_of_another_data_set_is_refused(make_data: Make) -> None:
    data = make_data([[4, 5]])
    file = data.folder / "train/shard-00000.arrow"
    # Arrow pads to eight bytes, so ten tokens of four bytes take as much room as nine.
    write_shard(file, make_shard([4, 6], 0, None))
    assert file.stat().st_size == data.manifest.train[0].file_bytes
    with pytest.raises(DataError, match="where the manifest says 2 of 9"):
        DataSet(data.folder).shard(0)


def test_the_checksum_of_a_shard_is_that_of_its_file(tmp_path: Path) -> None:
    """A large buffer is hashed aside, and what comes after it must wait its turn."""
    lengths = [300] * 9000
    for shard in (make_shard(lengths[:3], 1, None), make_shard(lengths, 1, 1)):
        digest = write_shard(tmp_path / "shard.arrow", shard)
        assert digest == sha256_file(tmp_path / "shard.arrow")
    assert (tmp_path / "shard.arrow").stat().st_size > 2 * (1 << 22), "nothing was large"


def test_no_flipped_bit_ends_the_process(tmp_path: Path) -> None:
    """Arrow trusts its metadata: without our checks several of these end in a bus error."""
    file = tmp_path / "shard.arrow"
    write_shard(file, make_shard([5, 9, 70, 3], 1, 1))
    whole = file.read_bytes()
    refused = 0
    for bit in range(0, len(whole) * 8, 11):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << (bit % 8)
        file = tmp_path / f"{bit}.arrow"  # never change a file that is mapped
        file.write_bytes(damaged)
        try:
            shard = read_shard(file)
        except DataError:
            refused += 1
            continue
        for column in (shard.offsets, shard.tokens, shard.text_bytes, shard.kind_codes):
            column.sum()
    assert refused > 100


@pytest.mark.parametrize("column", ["tokens", "mask", "kind", "text_bytes"])
def test_a_shard_without_a_column_or_with_a_wrong_one_is_refused(
    tmp_path: Path, column: str
) -> None:
    batch = shard_to_batch(make_shard([5, 9], 1, 1))
    columns = {name: batch.column(name) for name in batch.schema.names}
    if column == "mask":
        columns["mask"] = pa.array([[0], [1]], pa.large_list(pa.uint8()))
    else:
        del columns[column]
    write_arrow(tmp_path / "bad.arrow", pa.RecordBatch.from_pydict(columns))
    with pytest.raises(DataError, match=r"bad\.arrow (lacks|has columns)"):
        read_shard(tmp_path / "bad.arrow")


def test_shards_are_mapped_and_not_copied(make_data: Make) -> None:
    shard = make_data([[400] * 50]).shard(0)
    for column in (shard.tokens, shard.offsets, shard.text_bytes):
        assert not column.flags.owndata
        assert not column.flags.writeable


def test_held_out_documents_come_from_val_whatever_is_opened(make_data: Make) -> None:
    data = make_data([[4, 5]], val=[[7, 3], [6]], mask_seed=3)
    documents = list(held_out(data))
    assert [len(document.tokens) for document in documents] == [7, 3, 6]
    assert [document.tokens[0] for document in documents] == [9, 16, 19]
    assert [document.kind for document in documents] == ["letter", "story", "letter"]
    assert [document.floor_bits for document in documents] == [None, 1.5, None]
    assert [document.text_bytes for document in documents] == [21, 9, 18]
    assert all(d.mask is not None and len(d.mask) == len(d.tokens) for d in documents)
    assert [len(d.tokens) for d in held_out(DataSet(data.folder, split="val"), 8)] == [7, 3]
    assert len(list(held_out(data, 7))) == 1
    assert next(held_out(make_data([[3]], val=[[4]]))).mask is None


def test_units_are_counted_through_all_shards(make_data: Make) -> None:
    data = make_data([[10, 7], [5], [20]])
    assert data.units(8, "concat") == 3 + 1 + 3
    firsts = [data.row(unit, 8, "concat").inputs[0, 0] for unit in range(7)]
    assert firsts == [0, 8, 16, 17, 22, 30, 38]
    row = data.row(0, 8, "concat")
    assert row.targets[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert data.row(1, 8, "concat").targets[0].tolist() == [9, -100, 11, 12, 13, 14, 15, 16]
    assert data.row(1, 8, "concat").documents[0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert data.row(2, 8, "concat").documents[0].tolist() == [0] + [-1] * 7
    assert np.count_nonzero(data.row(2, 8, "concat").targets[0] >= 0) == 0
