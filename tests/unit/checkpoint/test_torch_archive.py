"""torch.save files that are written by the kernel: what anybody's reader finds in them."""

import zipfile
from pathlib import Path

import pytest
import torch

from foundling.checkpoint.convert import torch_file
from foundling.checkpoint.convert.disk import Disk
from foundling.checkpoint.convert.mapping import mapped
from foundling.checkpoint.convert.torch_file import save_torch
from foundling.checkpoint.tensor_index import TensorSpec
from foundling.runtime.kernel_copy import append

SHAPE = (600, 1024)


@pytest.mark.parametrize("by_kernel", [True, False])
def test_mapped_tensors_are_copied_by_the_kernel(
    by_kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = torch.randn(2, *SHAPE)
    source = tmp_path / "numbers"
    source.write_bytes(wanted.numpy().tobytes())
    copied = []
    monkeypatch.setattr(
        torch_file, "append", lambda *a: by_kernel and append(*a) and not copied.append(a[0])
    )
    size = wanted[0].nbytes
    first, second = (mapped(source, at, TensorSpec(SHAPE, torch.float32)) for at in (0, size))
    made = torch.randn(SHAPE)
    disk = Disk()
    content = {"a": first, "b": second, "again": first, "made": made, "small": torch.ones(3)}
    save_torch(tmp_path / "out.pth", content, disk)
    disk.wait()
    disk.close()
    assert len(copied) == (2 if by_kernel else 0)
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    for name, tensor in {"a": wanted[0], "b": wanted[1], "again": wanted[0], "made": made}.items():
        assert torch.equal(found[name], tensor)
    assert found["again"].data_ptr() == found["a"].data_ptr(), "one storage is stored once"
    with zipfile.ZipFile(tmp_path / "out.pth") as archive:
        assert archive.testzip() is None, "checksums are right for readers that look at them"
