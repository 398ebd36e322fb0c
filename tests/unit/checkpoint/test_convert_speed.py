"""What makes conversions fast must not make them wrong: hashes beside, pieces, kernel copies."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_samples import BASE, as_layout, same, weights_of

from foundling.checkpoint.convert import compare, mapping, products, safetensors_io
from foundling.checkpoint.convert.dcp_layout import DcpTensors, plain_place, write_dcp
from foundling.checkpoint.convert.disk import Disk
from foundling.checkpoint.convert.run import convert
from foundling.checkpoint.convert.writing import Plan
from foundling.checkpoint.tensor_index import TensorSpec, read_index
from foundling.cli import run_verb
from foundling.config import CheckpointError, ConfigError
from foundling.runtime import kernel_copy
from foundling.runtime.kernel_copy import Span, append


@pytest.fixture
def native(tmp_path: Path) -> Path:
    return as_layout(tmp_path, BASE, "native")


def test_a_source_that_is_damaged_is_noticed_though_it_is_hashed_beside(native: Path) -> None:
    """By a bit that makes no number strange, in the file itself: only its hash can tell."""
    file = next(native.rglob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    step = next(native.glob("checkpoints/step-*"))
    before = sorted(path.name for path in native.parent.iterdir())
    for path in (native, step):
        with pytest.raises(CheckpointError) as error:
            convert(path, native.parent / "result", "hf")
        assert "checksum" in str(error.value) or "no whole checkpoint" in str(error.value)
        assert sorted(path.name for path in native.parent.iterdir()) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_in_pieces_are_products(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "BLOCK", 40)
    monkeypatch.setattr(products, "_cores", lambda: 3)
    x, weight = torch.randn(2, 5, 8), torch.randn(33, 8).to(dtype)
    scratch = products.Scratch()
    torch.testing.assert_close(products.by_rows(x, weight, scratch), x @ weight.float().T)
    torch.testing.assert_close(
        products.by_columns(x[0], weight.T.contiguous(), scratch), x[0] @ weight.float().T
    )


def test_an_error_of_a_helper_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_cores", lambda: 2)

    def work(start: int, end: int) -> None:
        if start == 7:
            raise CheckpointError("seven")

    with pytest.raises(CheckpointError, match="seven"):
        products.Scratch().each(20, 1, work)


def test_a_tensor_that_was_written_into_lies_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(bytes(range(64)))
    spec = TensorSpec((4, 4), torch.int16)
    tensor = mapping.mapped(file, 16, spec)
    assert mapping.lies(tensor) == Span(file, 16, 32)
    assert mapping.lies(tensor[:2]) is None, "a part is not the whole"
    assert mapping.lies(tensor.T) is None
    tensor[0, 0] = 3
    assert mapping.lies(tensor) is None
    assert file.read_bytes() == bytes(range(64))
    address = tensor.data_ptr()
    assert address in mapping._spans
    del tensor
    assert address not in mapping._spans, "the address may be somebody else's now"


def test_the_kernel_copies_or_says_that_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    with open(tmp_path / "b", "xb") as file:
        file.write(b"<")
        assert append(Span(tmp_path / "a", 2, 5), file)
        file.write(b">")

        def refuse(*_: Any) -> int:
            raise OSError(errno.EXDEV, "another disk")

        monkeypatch.setattr(kernel_copy.os, "copy_file_range", refuse)
        assert not append(Span(tmp_path / "a", 2, 5), file)
    assert (tmp_path / "b").read_bytes() == b"<23456>"
    monkeypatch.undo()
    with open(tmp_path / "c", "xb") as file, pytest.raises(OSError, match="shorter"):
        append(Span(tmp_path / "a", 2, 50), file)


def test_a_conversion_without_the_kernels_copy_is_the_same(
    native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(native, native.parent / "copied", "hf")
    monkeypatch.delattr(os, "copy_file_range")
    convert(native, native.parent / "written", "hf")
    one, other = (native.parent / name / "model.safetensors" for name in ("copied", "written"))
    assert one.read_bytes() == other.read_bytes()
    convert(native.parent / "copied", native.parent / "again", "native")
    assert same(native, native.parent / "again")


def test_a_tensor_changed_in_place_by_a_writer_is_refused(
    native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped tensor is the writer's to change: then its file must not be copied in its stead,
    or the error would be hidden here and made by whoever writes by hand."""
    plain = Plan.read

    def read(plan: Plan, name: str) -> torch.Tensor:
        tensor = plain(plan, name)
        return tensor.neg_() if name == "layers.0.ffn.up.weight" else tensor

    monkeypatch.setattr(Plan, "read", read)
    with pytest.raises(CheckpointError, match=r"layers\.0\.ffn\.up\.weight is not the source's"):
        convert(native, native.parent / "result", "hf")


def test_every_tensor_is_compared_whoever_reads_it(
    native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    honest = compare.same_bits

    def counting(one: torch.Tensor, other: torch.Tensor) -> bool:
        counted.append(one.numel())
        return honest(one, other)

    monkeypatch.setattr(compare, "same_bits", counting)
    monkeypatch.setattr(products, "BLOCK", 48 * 7)
    convert(native, native.parent / "result", "hf")
    assert sum(counted) == sum(tensor.numel() for tensor in weights_of(native).values())


def test_an_evaluation_in_absurdly_many_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="--nproc 100000 is more than"):
        run_verb(["eval", "anything", "core", "--nproc", "100000", "--device", "cpu"])


def test_large_tensors_begin_with_a_page(tmp_path: Path) -> None:
    """In both layouts, so that the kernel copies whole pages from one to the other."""
    tensors = {"b": torch.randn(7), "a": torch.randn(3, 1 << 20), "c": torch.randn(1 << 19)}
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    disk = Disk()
    write_dcp(tmp_path, specs, tensors.__getitem__, disk)
    safetensors_io.write_file(tmp_path / "a.safetensors", specs, tensors.__getitem__, disk)
    disk.wait()
    disk.close()
    index = read_index(tmp_path, skip_bytes=False)
    places = {name: plain_place(tmp_path, index, name) for name in tensors}
    for name in ("a", "c"):
        place = places[name]
        assert place is not None
        assert place[1] % 4096 == 0
    header = int.from_bytes((tmp_path / "a.safetensors").read_bytes()[:8], "little")
    assert (8 + header) % 4096 == 0
    stored = DcpTensors(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(stored.read(name), tensor)
