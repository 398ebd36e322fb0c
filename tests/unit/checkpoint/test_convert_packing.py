"""Tensors that are packed while torch is imported: taken when they are the right ones, else not."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from convert_samples import BASE, FAMILIES, as_layout, same, weights_of
from safetensors.torch import load_file, save_file

from foundling.checkpoint.convert import native, run
from foundling.checkpoint.convert.run import convert
from foundling.checkpoint.seal import verify
from foundling.cli import run_verb
from foundling.config import CheckpointError, UserError
from foundling.runtime import kernel_copy, packing, points
from foundling.runtime.archives import BYTES, frame
from foundling.runtime.kernel_copy import Span

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@pytest.fixture
def given(tmp_path: Path) -> Path:
    folder = as_layout(tmp_path, BASE, "hf")
    (tmp_path / "given.pt").unlink()
    return folder


@pytest.fixture
def only_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else may write tensors."""
    monkeypatch.setattr(native, "write_dcp", None)


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were written in the usual way."""
    written: list[Path] = []
    write = native.write_dcp

    def counted(folder: Path, *rest: object) -> object:
        written.append(folder)
        # The disk may have no room for a second copy.
        assert not [left for home in folder.parents[:4] for left in home.glob(".*.tmp-ahead-*")]
        return write(folder, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(native, "write_dcp", counted)
    return written


def to_native(source: Path, *words: str) -> Path:
    target = source.parent / "result"
    run_verb(["convert", str(source), str(target), "--to", "native", "--json", *words])
    return target


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (7,), (2, 3, 4), (1, 300, 700)])
def test_an_archive_is_one_of_torchs(kind: str, shape: tuple[int, ...]) -> None:
    wanted = torch.randn(shape).to(DTYPES[kind])
    head, tail = frame(kind, shape)
    numbers = wanted.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert len(numbers) == wanted.numel() * BYTES[kind]
    found = torch.load(io.BytesIO(head + numbers + tail), weights_only=True)
    assert found.dtype == wanted.dtype
    assert found.is_contiguous()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("family", ["llama 2", "llama 3.2", "qwen 2", "qwen 3"])
@pytest.mark.parametrize("size", [1 << 30, 20_000])
def test_packed_files_are_the_checkpoint(
    family: str, size: int, tmp_path: Path, only_packed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "FILE_BYTES", size)
    monkeypatch.setattr(kernel_copy, "LARGE", 4000)
    monkeypatch.setattr(packing, "WINDOW", 1 << 14)
    source = as_layout(tmp_path, FAMILIES[family], "hf")
    target = to_native(source)
    assert same(source, target)
    step = next(target.glob("checkpoints/step-*"))
    verify(step)  # by the hashes in its seal
    assert (len(list(step.glob("*.distcp"))) > 1) is (size < 1 << 30)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_others_read_packed_files(given: Path, only_packed: None) -> None:
    target = to_native(given)
    wanted = weights_of(given)
    found = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(found, checkpoint_id=next(target.glob("checkpoints/step-*")), no_dist=True)
    for name, tensor in wanted.items():
        assert torch.equal(found[f"model.{name}"], tensor), name


def test_shards_are_packed(given: Path, only_packed: None) -> None:
    run_verb(["convert", str(given), str(given / "few"), "--to", "hf", "--shard-gb", "0.0001"])
    assert len(list((given / "few").glob("*.safetensors"))) > 1
    os.rename(given / "few", given.with_name("sharded"))
    assert same(given, to_native(given.with_name("sharded")))


def test_other_layouts_and_precisions_are_written_as_usual(
    tmp_path: Path, usual: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = as_layout(tmp_path, FAMILIES["gpt 2"], "hf")
    assert same(source, to_native(source))
    assert len(usual) == 1
    (tmp_path / "other").mkdir()
    source = as_layout(tmp_path / "other", BASE, "hf")
    found = weights_of(to_native(source, "--dtype", "bf16"))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert len(usual) == 2


def test_a_refusal_while_the_thread_works_leaves_nothing(
    given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((given / "config.json").read_text())
    (given / "config.json").write_text(json.dumps({**config, "hidden_act": "strange"}))
    begun, seen = threading.Event(), []

    def slow(name: str) -> None:
        seen.append(name)
        begun.set()
        time.sleep(0.1)

    def late(path: str) -> str:
        assert begun.wait(60)
        assert list(given.parent.glob(".result.tmp-ahead-*/*.distcp"))
        return "hf"

    monkeypatch.setattr(points, "at", slow)
    monkeypatch.setattr(run, "kind_of", late)  # the first thing that a conversion looks at
    with pytest.raises(UserError, match="strange"):
        to_native(given)
    assert len(seen) < 20, "the thread did not go on to the end"
    assert os.listdir(given.parent) == [given.name]


def test_packed_files_with_a_tensor_that_nobody_wants_are_not_taken(
    tmp_path: Path, usual: list[Path]
) -> None:
    source = as_layout(tmp_path, FAMILIES["llama 3.2"], "hf")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    target = to_native(source)
    assert len(usual) == 1
    assert same(source, target)
    step = next(target.glob("checkpoints/step-*"))
    assert sum(file.stat().st_size for file in step.glob("*.distcp")) < sum(
        tensor.nbytes for tensor in tensors.values()
    )


def test_a_target_that_is_taken_or_nowhere_is_not_begun(given: Path) -> None:
    (given.parent / "result").mkdir()
    with pytest.raises(UserError, match="exists already"):
        to_native(given)
    assert sorted(os.listdir(given.parent)) == [given.name, "result"]
    with packing.packing(str(given), given.parent / "no" / "where", "native", 0) as begun:
        assert begun is None
    assert not (given.parent / "no").exists()


def test_a_source_that_becomes_shorter_is_refused(
    given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, target, seen = given / "model.safetensors", given.parent / "result", []

    def cut(name: str) -> None:
        seen.append(name)
        if len(seen) == 3:
            os.truncate(file, file.stat().st_size // 2)

    monkeypatch.setattr(points, "at", cut)
    with packing.packing(str(given), target, "native", 0) as begun:
        assert begun is not None
        with pytest.raises(Exception, match="became shorter"):
            begun._copied.result()
        with pytest.raises(UserError, match=r"damaged: .* does not fit into the file"):
            convert(given, target, "native", packing=begun)
    assert os.listdir(given.parent) == [given.name]


def test_a_source_that_is_changed_meanwhile_is_read_anew(given: Path, usual: list[Path]) -> None:
    before, target = weights_of(given), given.parent / "result"
    with packing.packing(str(given), target, "native", 0) as begun:
        assert begun is not None
        begun.hashed()
        with open(given / "model.safetensors", "r+b") as stream:
            stream.seek(8 + int.from_bytes(stream.read(8), "little"))
            stream.write(torch.ones(4).numpy().tobytes())
        convert(given, target, "native", packing=begun)
    assert len(usual) == 1
    assert same(given, target)
    verify(next(target.glob("checkpoints/step-*")))
    after = weights_of(target)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["embed.weight"]
    assert not list(given.parent.glob(".*"))


def test_a_wrong_copy_is_refused(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the hash of what was written cannot tell: the bits do."""
    right = packing.copied

    def wrong(source: int, span: Span, target: int, place: int) -> bool:
        return right(source, span._replace(start=span.start - 4), target, place)

    monkeypatch.setattr(packing, "copied", wrong)
    with pytest.raises(CheckpointError, match=r"the result's .* is not the source's"):
        to_native(given)
    assert os.listdir(given.parent) == [given.name]


def test_where_the_kernel_copies_nothing_or_the_disk_is_full_it_is_written_as_usual(
    given: Path, usual: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "copied", lambda *_: False)
    assert same(given, to_native(given))

    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    os.rename(given.parent / "result", given.parent / "first")
    monkeypatch.setattr(packing, "copied", full)
    assert same(given, to_native(given))
    assert len(usual) == 2


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a.weight": 3}', b'{"a.weight": {}}'])
def test_a_header_that_is_none_is_refused_in_the_usual_words(given: Path, header: bytes) -> None:
    content = len(header).to_bytes(8, "little") + header + bytes(100)
    (given / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        to_native(given)
    assert os.listdir(given.parent) == [given.name]


def test_it_needs_no_torch() -> None:
    code = "import sys, foundling.runtime.packing; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
