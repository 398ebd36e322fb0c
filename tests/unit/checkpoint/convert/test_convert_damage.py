"""Sources that are damaged, hostile or changed on the way: refused, and nothing is left."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_samples import BASE, as_layout, same, weights_of

from foundling.checkpoint.convert import compare_models
from foundling.checkpoint.convert.convert import convert
from foundling.checkpoint.convert.model_source import ConvertPlan
from foundling.checkpoint.convert.tensor_files import read_part, write_file
from foundling.checkpoint.dcp_index import TensorSpec
from foundling.cli.main import run_verb
from foundling.config.errors import CheckpointError, ConfigError, UserError


@pytest.fixture
def native(tmp_path: Path) -> Path:
    folder = as_layout(tmp_path, BASE, "native")
    (tmp_path / "given.pt").unlink()
    return folder


@pytest.fixture
def given(tmp_path: Path) -> Path:
    folder = as_layout(tmp_path, BASE, "hf")
    (tmp_path / "given.pt").unlink()
    return folder


def step_of(run: Path) -> Path:
    return next(run.glob("checkpoints/step-*"))


def test_a_damaged_checkpoint_is_refused(native: Path) -> None:
    """By a bit that makes no number strange, in the file itself: only its hash can tell."""
    file = next(native.rglob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for path in (native, step_of(native)):
        with pytest.raises(CheckpointError, match=r"checksum|no whole checkpoint"):
            convert(path, native.parent / "result", "hf")
        assert os.listdir(native.parent) == [native.name]


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("how", ["pickle", "pipe", "link", "index is a pipe"])
def test_a_checkpoint_with_something_strange_is_refused(
    how: str, native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(native.parent)
    step = step_of(native)
    is_index = how in ("pickle", "index is a pipe")
    file = step / ".metadata" if is_index else next(step.glob("*.distcp"))
    content = file.read_bytes()
    file.unlink()
    if how == "pickle":
        file.write_bytes(pickle.dumps(Hostile(), 4))
    elif how == "link":
        (native.parent / "elsewhere").write_bytes(content)
        file.symlink_to(native.parent / "elsewhere")
    else:
        os.mkfifo(file)
    before = sorted(os.listdir(native.parent))
    for path in (native, step):
        with pytest.raises(UserError):
            convert(path, native.parent / "result", "hf")
    assert sorted(os.listdir(native.parent)) == before


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a.weight": 3}', b'{"a.weight": {}}'])
def test_a_header_that_is_none_is_refused(given: Path, header: bytes) -> None:
    content = len(header).to_bytes(8, "little") + header + bytes(100)
    (given / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        convert(given, given.parent / "result", "native")
    assert os.listdir(given.parent) == [given.name]


def test_a_source_that_becomes_shorter_is_refused(
    given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = given / "model.safetensors", ConvertPlan.read

    def cut(plan: ConvertPlan, name: str) -> torch.Tensor:
        os.truncate(file, file.stat().st_size // 2)
        return read(plan, name)

    monkeypatch.setattr(ConvertPlan, "read", cut)
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        convert(given, given.parent / "result", "native")
    assert os.listdir(given.parent) == [given.name]


def test_a_tensor_changed_in_place_by_a_writer_is_refused(
    native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ConvertPlan.read

    def read(plan: ConvertPlan, name: str) -> torch.Tensor:
        tensor = plain(plan, name)
        return tensor.neg_() if name == "layers.0.ffn.up.weight" else tensor

    monkeypatch.setattr(ConvertPlan, "read", read)
    with pytest.raises(CheckpointError, match=r"layers\.0\.ffn\.up\.weight is not the source's"):
        convert(native, native.parent / "result", "hf")


def test_every_tensor_is_compared(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    honest = compare_models.same_bits

    def counting(one: torch.Tensor, other: torch.Tensor) -> bool:
        counted.append(one.numel())
        return honest(one, other)

    monkeypatch.setattr(compare_models, "same_bits", counting)
    convert(native, native.parent / "result", "hf")
    assert sum(counted) == sum(tensor.numel() for tensor in weights_of(native).values())


def test_a_run_is_meant_by_any_of_its_names_and_comes_back_the_same_file(
    native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(native.parent)
    step = step_of(native)
    number = step.name.removeprefix("step-")
    ways = (native.name, f"{native.name}@{number}", str(step.relative_to(native.parent)))
    for count, source in enumerate(ways):
        run_verb(["convert", source, f"result-{count}", "--to", "hf", "--json"])
        assert same(native, Path(f"result-{count}"))
    convert("result-0", Path("back"), "native")
    convert("back", Path("again"), "hf")
    one, other = (Path(name, "model.safetensors").read_bytes() for name in ("result-0", "again"))
    assert one == other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_in_pieces_are_products(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_models, "BLOCK", 40)
    x, weight = torch.randn(2, 5, 8), torch.randn(33, 8).to(dtype)
    torch.testing.assert_close(compare_models._product(x, weight), x @ weight.float().T)


def test_numbers_begin_at_a_multiple_of_eight_and_are_read_as_written(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(7).half(), "none": torch.ones(0, 3), "a": torch.randn(3, 5)}
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    file = tmp_path / "a.safetensors"
    write_file(file, specs, tensors.__getitem__)
    length = int.from_bytes(file.read_bytes()[:8], "little")
    assert length % 8 == 0
    header = json.loads(file.read_bytes()[8 : 8 + length])
    for name, tensor in tensors.items():
        start = 8 + length + header[name]["data_offsets"][0]
        found = read_part(file, start, specs[name])
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_a_shard_without_an_end_is_refused(native: Path) -> None:
    target = str(native.parent / "result")
    with pytest.raises(UserError, match="inf is not a number above zero"):
        run_verb(["convert", str(native), target, "--to", "hf", "--shard-gb", "inf"])


def test_an_evaluation_in_absurdly_many_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="--nproc 100000 is more than"):
        run_verb(["eval", "anything", "core", "--nproc", "100000", "--device", "cpu"])
