"""Checkpoints as training saves them, with an optimizer's moments, on their way to elsewhere."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from convert_samples import BASE, random_model, same

from foundling.checkpoint import writer
from foundling.checkpoint.dcp_index import Chunk, Index, IndexEntry, Spot, read_index
from foundling.checkpoint.paths import MODEL_PREFIX
from foundling.checkpoint.reader import for_dcp
from foundling.checkpoint.remote import RemotePath, open_folder
from foundling.checkpoint.writer import save
from foundling.cli.main import run_verb
from foundling.config.errors import CheckpointError
from foundling.config.load import dump_yaml
from foundling.config.run import CheckpointConfig, RunConfig
from foundling.runtime.run_dir import RunDir

FILE = 40_000
"""Bytes of a file here: weights and moments get some of their own."""


def trained(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with one checkpoint."""
    monkeypatch.setattr(writer, "FILE_BYTES", FILE)
    run, tensors = RunDir(path), dict[str, torch.Tensor]()
    weights = random_model(BASE).state_dict()
    tensors |= {MODEL_PREFIX + name: tensor for name, tensor in weights.items()}
    for name, tensor in weights.items():
        tensors[f"optim.{name}.exp_avg_codes"] = torch.randint(256, tensor.shape).byte()
        tensors[f"optim.{name}.exp_avg_sq"] = torch.rand(tensor.shape)
    run.checkpoints.mkdir(parents=True)
    save(run.checkpoints, 7, tensors, {"step": 7})
    run.config_path.write_text(dump_yaml(RunConfig(model=BASE)))
    run.write_info({"chat": False, "status": "finished", "plan": {}})
    return path


def to_hf(run: Path) -> Path:
    target = run.with_name("result")
    run_verb(["convert", str(run), str(target), "--to", "hf", "--json"])
    return target


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_what_training_saved_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path / "run", monkeypatch)
    assert len(list(run.rglob("*.distcp"))) > 2
    assert same(run, to_hf(run))


def test_checkpoints_in_a_store_are_converted_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path / "run", monkeypatch)
    content = next(run.glob("checkpoints/step-*"))
    for file in content.iterdir():
        place = open_folder(f"memory://stored/run/{content.name}/{file.name}")
        assert isinstance(place, RemotePath)
        place.write_bytes(file.read_bytes())
    shutil.copytree(run, tmp_path / "far" / "run", ignore=shutil.ignore_patterns("checkpoints"))
    config = RunConfig(model=BASE, checkpoint=CheckpointConfig(folder="memory://stored"))
    (tmp_path / "far" / "run" / "config.yaml").write_text(dump_yaml(config))
    assert same(run, to_hf(tmp_path / "far" / "run"))


def test_a_checkpoint_has_to_be_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the files that hold an optimizer's moments alone: as everywhere, it is whole or not."""
    run = trained(tmp_path / "run", monkeypatch)
    for file in sorted(run.rglob("*.distcp")):
        flip_a_bit(file)
        with pytest.raises(CheckpointError, match=r"checksum|no whole checkpoint"):
            to_hf(run)
        flip_a_bit(file)
    assert os.listdir(tmp_path) == ["run"]


def test_an_index_cannot_keep_itself_from_being_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two weights of one shape exchanged in an index that says it held a moment: both sides of a
    comparison would read through it."""
    run = trained(tmp_path / "run", monkeypatch)
    step = next(run.glob("checkpoints/step-*"))
    index = read_index(step)
    spots, origin = {k: v for k, v in index.spots.items() if k[0].startswith(MODEL_PREFIX)}, (0, 0)
    embed, head = (MODEL_PREFIX + name for name in ("embed.weight", "head.weight"))
    spots[embed, origin], spots[head, origin] = spots[head, origin], spots[embed, origin]
    entries = {name: index.tensors[name] for name, _ in spots}
    entries["optim.x"] = IndexEntry((1,), torch.float32, (Chunk((0,), (1,)),))
    spots["optim.x", (0,)] = Spot(".metadata", 0, 4)
    file = step / ".metadata"
    changed, size = pickle.dumps(for_dcp(Index(entries, spots))), file.stat().st_size
    assert len(changed) <= size, "sizes are compared before anything is hashed"
    file.write_bytes(changed + bytes(size - len(changed)))
    with pytest.raises(CheckpointError, match=r"metadata|no whole checkpoint"):
        to_hf(run)
    assert os.listdir(tmp_path) == ["run"]
