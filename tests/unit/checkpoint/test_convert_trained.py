"""Checkpoints as training saves them, with an optimizer's moments, on their way to elsewhere."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_samples import BASE, random_model, same, weights_of

from foundling.checkpoint import save, tensor_archive, tensor_plan
from foundling.checkpoint.bundle_paths import MODEL_PREFIX
from foundling.checkpoint.convert import hf_write
from foundling.checkpoint.convert.dcp_layout import plain_place
from foundling.checkpoint.index_form import Chunk, Entry, Index, Spot, pickled
from foundling.checkpoint.tensor_index import read_index
from foundling.cli import run_verb
from foundling.config import CheckpointError, RunConfig
from foundling.config.resolve import dump_yaml
from foundling.runtime import RunDir, kernel_copy, packing
from foundling.runtime.payloads import weight_files

FILE = 40_000
"""Bytes of a file here: weights and moments get some of their own."""


def trained(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with one checkpoint."""
    monkeypatch.setattr(tensor_plan, "FILE_BYTES", FILE)
    run, tensors = RunDir(path), dict[str, torch.Tensor]()
    weights = random_model(BASE).state_dict()
    tensors |= {MODEL_PREFIX + name: tensor for name, tensor in weights.items()}
    for name, tensor in weights.items():
        tensors[f"optim.{name}.exp_avg_codes"] = torch.randint(256, tensor.shape).byte()
        tensors[f"optim.{name}.exp_avg_sq"] = torch.rand(tensor.shape)
    run.checkpoints.mkdir(parents=True)
    save(run.checkpoints, 7, tensors, {"step": 7})
    run.config_path.write_text(dump_yaml(RunConfig(model=BASE)))
    run.write_info({"stage": "pretrain", "status": "finished", "plan": {}})
    return path


def to_hf(run: Path) -> Path:
    target = run.with_name("result")
    run_verb(["convert", str(run), str(target), "--to", "hf", "--json"])
    return target


def files_of(run: Path) -> tuple[list[Path], list[Path]]:
    """Those with weights, and those with moments alone."""
    files = sorted(run.rglob("*.distcp"))
    with_weights = weight_files(files)
    return with_weights, [file for file in files if file not in with_weights]


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_what_training_saved_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path / "run", monkeypatch)
    monkeypatch.setattr(hf_write, "write_file", None)  # nothing else may write tensors
    assert same(run, to_hf(run))


def test_numbers_lie_where_they_can_be_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_archive, "LARGE", 20_000)
    monkeypatch.setattr(kernel_copy, "LARGE", 20_000)
    run = trained(tmp_path / "run", monkeypatch)
    step = next(run.glob("checkpoints/step-*"))
    index = read_index(step)
    large = 0
    for name, entry in index.tensors.items():
        place = plain_place(step, index, name)
        assert place is not None
        is_large = torch.Size(entry.size).numel() * entry.dtype.itemsize >= 20_000
        assert place[1] % (4096 if is_large else 64) == 0, name
        large += is_large
    assert large > 3


def test_older_checkpoints_have_their_numbers_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the last archive ended, which is no part of a file to torch: nothing is copied that
    nobody would take."""
    with monkeypatch.context() as before:
        before.setattr(kernel_copy, "ALIGNED", 1)
        run = trained(tmp_path / "run", before)
    with packing.packing(str(run), tmp_path / "result", "hf", 1 << 30) as begun:
        assert begun is not None
        begun.wait()
        assert not list(tmp_path.glob(".*/*.safetensors"))
    written: list[Path] = []
    write = hf_write.write_file

    def counted(path: Path, *rest: Any) -> None:
        written.append(path)
        write(path, *rest)

    monkeypatch.setattr(hf_write, "write_file", counted)
    assert same(run, to_hf(run))
    assert len(written) == 1


def test_only_what_is_read_has_to_be_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path / "run", monkeypatch)
    wanted = weights_of(run)
    with_weights, with_moments = files_of(run)
    assert with_weights
    assert with_moments
    flip_a_bit(with_moments[0])
    found = weights_of(to_hf(run))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    os.rename(tmp_path / "result", tmp_path / "first")
    flip_a_bit(with_weights[-1])
    with pytest.raises(CheckpointError, match=r"checksum|no whole checkpoint"):
        to_hf(run)
    assert sorted(os.listdir(tmp_path)) == ["first", "run"]


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
    entries["optim.x"] = Entry((1,), torch.float32, (Chunk((0,), (1,)),))
    spots["optim.x", (0,)] = Spot(".metadata", 0, 4)
    file = step / ".metadata"
    changed, size = pickled(Index(entries, spots)), file.stat().st_size
    assert len(changed) <= size, "sizes are compared before anything is hashed"
    file.write_bytes(changed + bytes(size - len(changed)))
    with pytest.raises(CheckpointError, match=r"metadata|no whole checkpoint"):
        to_hf(run)
    assert os.listdir(tmp_path) == ["run"]


def test_of_an_index_that_cannot_be_read_all_files_are_meant(tmp_path: Path) -> None:
    files = [tmp_path / ".metadata", tmp_path / "__0_0.distcp"]
    for file in files:
        file.write_bytes(b"none")
    assert weight_files(files) == files
    assert weight_files([]) == []
