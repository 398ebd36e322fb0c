"""The index of a DCP folder: read into plain tuples, and given to DCP in its own classes."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from convert_samples import FAMILIES, as_file, as_layout, weights_of
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import MetadataIndex

from foundling.checkpoint.dcp_index import INDEX, Chunk, Index, IndexEntry, Spot, read_index
from foundling.checkpoint.reader import for_dcp

WHOLE = Index(
    {
        "a.weight": IndexEntry(
            (4, 6), torch.bfloat16, (Chunk((0, 0), (2, 6)), Chunk((2, 0), (2, 6)))
        ),
        "b": IndexEntry((), torch.float32, (Chunk((), ()),)),
    },
    {
        ("a.weight", (0, 0)): Spot("__0_0.distcp", 0, 700),
        ("a.weight", (2, 0)): Spot("__0_1.distcp", 64, 700),
        ("b", ()): Spot("__0_1.distcp", 1 << 33, 3),
    },
)


def test_dcp_finds_pieces_by_their_place_and_type() -> None:
    found = for_dcp(WHOLE)
    assert found.storage_data == {
        MetadataIndex(*key): filesystem._StorageInfo(*spot) for key, spot in WHOLE.spots.items()
    }
    assert all(type(key.offset) is torch.Size for key in found.storage_data)
    assert all(type(entry.size) is torch.Size for entry in found.state_dict_metadata.values())


def test_we_read_it_too(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(pickle.dumps(for_dcp(WHOLE)))
    for name in ("__0_0.distcp", "__0_1.distcp"):
        with open(tmp_path / name, "wb") as file:
            file.truncate((1 << 33) + 3)
    assert read_index(tmp_path) == WHOLE


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_converted_folder_is_loaded_by_dcp_itself(tmp_path: Path) -> None:
    folder = as_layout(tmp_path, FAMILIES["gpt 2"], "dcp")
    expected = weights_of(folder)
    into = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
    dcp.load(into, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(into["model"][name], value) for name, value in expected.items())


def test_a_conversion_imports_neither_a_compiler_nor_transformers(tmp_path: Path) -> None:
    """Each takes a second or more. Where no Hugging Face folder takes part, nobody needs them."""
    file = as_file(tmp_path / "a.pt", FAMILIES["llama 3.2"])
    code = f"""
import sys
from pathlib import Path
from foundling.checkpoint.convert.convert import convert
convert({str(file)!r}, Path({str(tmp_path / "run")!r}), "native")
convert({str(tmp_path / "run")!r}, Path({str(tmp_path / "dcp")!r}), "dcp")
heavy = ("_dynamo", "_inductor")
print([name for name in heavy if f"torch.{{name}}" in sys.modules], "transformers" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[] False\n"
