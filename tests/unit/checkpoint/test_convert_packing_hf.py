"""A checkpoint's tensors that are packed into safetensors while torch is imported."""

import io
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_samples import BASE, FAMILIES, as_layout, same, weights_of
from safetensors.torch import load_file

from foundling.checkpoint import names
from foundling.checkpoint.convert import hf_write, run
from foundling.checkpoint.convert.dcp_layout import plain_place, write_dcp
from foundling.checkpoint.convert.disk import Disk
from foundling.checkpoint.convert.run import convert
from foundling.checkpoint.convert.safetensors_io import header_of
from foundling.checkpoint.tensor_index import TensorSpec, read_index
from foundling.cli import run_verb
from foundling.config import CheckpointError, UserError
from foundling.runtime import packing, payloads, points
from foundling.runtime.kernel_copy import Span
from foundling.runtime.payloads import UnfitError, checkpoint_payloads


@pytest.fixture
def given(tmp_path: Path) -> Path:
    folder = as_layout(tmp_path, BASE, "native")
    (tmp_path / "given.pt").unlink()
    return folder


@pytest.fixture
def only_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else may write tensors."""
    monkeypatch.setattr(hf_write, "write_file", None)


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were written in the usual way."""
    written: list[Path] = []
    write = hf_write.write_file

    def counted(path: Path, *rest: Any) -> None:
        written.append(path)
        # The disk may have no room for a second copy.
        assert not list(path.parents[1].glob(".*.tmp-ahead-*"))
        write(path, *rest)

    monkeypatch.setattr(hf_write, "write_file", counted)
    return written


def to_hf(source: Path | str, target: Path, *words: str) -> Path:
    run_verb(["convert", str(source), str(target), "--to", "hf", "--json", *words])
    return target


def step_of(run: Path) -> Path:
    return next(run.glob("checkpoints/step-*"))


@pytest.mark.parametrize("family", ["llama 2", "llama 3.2", "qwen 2", "qwen 3", "depth"])
@pytest.mark.parametrize("shards", ["5", "0.0001"])
def test_packed_files_are_the_folder(
    family: str, shards: str, tmp_path: Path, only_packed: None
) -> None:
    source = as_layout(tmp_path, FAMILIES[family], "native")
    target = to_hf(source, tmp_path / "result", "--shard-gb", shards)
    assert same(source, target)
    files = sorted(target.glob("*.safetensors"))
    assert (len(files) > 1) is (shards != "5")
    found = {name: value for file in files for name, value in load_file(file).items()}
    wanted = weights_of(source)
    assert len(found) == len(wanted), "safetensors itself reads them"
    if len(files) > 1:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == found.keys()
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    assert not list(tmp_path.glob(".*"))


def test_a_run_is_packed_by_whatever_name(
    given: Path, only_packed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(given.parent)
    step = step_of(given)
    number = step.name.removeprefix("step-")
    ways = (given.name, f"{given.name}/", f"{given.name}@{number}", step.relative_to(given.parent))
    for count, source in enumerate(ways):
        assert same(given, to_hf(str(source), Path(f"result-{count}")))


def test_there_and_back_is_the_same_file(given: Path, only_packed: None) -> None:
    first = to_hf(given, given.parent / "first")
    back = given.parent / "back"
    run_verb(["convert", str(first), str(back), "--to", "native", "--json"])
    again = to_hf(back, given.parent / "again")
    one, other = ((folder / "model.safetensors").read_bytes() for folder in (first, again))
    assert one == other


def test_where_tensors_do_not_lie_as_they_are_wanted_they_are_written_as_usual(
    given: Path, tmp_path: Path, usual: list[Path]
) -> None:
    (tmp_path / "other").mkdir()
    turned = as_layout(tmp_path / "other", FAMILIES["gpt 2"], "native")
    assert same(turned, to_hf(turned, tmp_path / "turned"))
    assert len(usual) == 1
    found = weights_of(to_hf(given, tmp_path / "narrow", "--dtype", "bf16"))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert len(usual) == 2


@pytest.mark.parametrize("trouble", ["refused", "full"])
def test_where_the_kernel_copies_nothing_it_is_written_as_usual(
    trouble: str, given: Path, usual: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(*_: object) -> bool:
        if trouble == "full":
            raise OSError(28, "No space left on device")
        return False

    monkeypatch.setattr(packing, "copied", copied)
    assert same(given, to_hf(given, given.parent / "result"))
    assert len(usual) == 1


def test_a_damaged_checkpoint_is_refused(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a bit that only its hash can tell: copied, compared and equal, and not what was saved."""
    file = next(given.rglob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for path in (given, step_of(given)):
        with pytest.raises(CheckpointError, match=r"checksum|no whole checkpoint"):
            to_hf(path, given.parent / "result")
        assert os.listdir(given.parent) == [given.name]


def test_a_checkpoint_that_is_touched_meanwhile_is_read_anew(
    given: Path, usual: list[Path]
) -> None:
    target = given.parent / "result"
    with packing.packing(str(given), target, "hf", 1 << 30) as begun:
        assert begun is not None
        begun.wait()
        os.utime(next(given.rglob("*.distcp")))
        convert(given, target, "hf", packing=begun)
    assert len(usual) == 1
    assert same(given, target)


def test_a_wrong_copy_is_refused(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = packing.copied

    def wrong(source: int, span: Span, target: int, place: int) -> bool:
        return right(source, span._replace(start=span.start - 4), target, place)

    monkeypatch.setattr(packing, "copied", wrong)
    with pytest.raises(CheckpointError, match=r"the result's .* is not the source's"):
        to_hf(given, given.parent / "result")
    assert os.listdir(given.parent) == [given.name]


def test_files_are_taken_once(given: Path, only_packed: None) -> None:
    target = given.parent / "result"
    with packing.packing(str(given), target, "hf", 1 << 30) as begun:
        assert begun is not None
        begun.wait()
        wanted = {span: (one.kind, one.shape) for span, one in begun._packed.items()}
        target.mkdir()
        assert begun.take(wanted, target)
        assert not begun.take(wanted, target), "they are somebody's already"
    assert os.listdir(target) == ["model.safetensors"]


def test_nothing_is_put_among_checkpoints(given: Path) -> None:
    before = sorted(given.rglob("*"))
    for home in (step_of(given), given / "checkpoints"):
        with pytest.raises(UserError, match="lies among the checkpoints"):
            to_hf(given, home / "result")
        assert sorted(given.rglob("*")) == before


def test_the_source_is_hashed_after_it_is_copied(
    given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third thread beside the import would take its time from it."""
    from foundling.runtime import ahead

    seen: list[str] = []
    right, ready = ahead._sha256, threading.Event()

    def late(name: str) -> None:
        seen.append(name)
        ready.wait(0.05)

    monkeypatch.setattr(points, "at", late)
    monkeypatch.setattr(ahead, "_sha256", lambda file: (seen.append("hash"), right(file))[1])
    with packing.packing(str(given), given.parent / "result", "hf", 1 << 30) as begun:
        assert begun is not None
        file = next(given.rglob("*.distcp"))
        ahead.hash_ahead([file], begun.wait)
        ahead._jobs[str(file.resolve())][1].result()
        assert len(seen) == 1 + len(begun._packed)
        assert seen.index("hash") == len(begun._packed)
    assert ahead.hash_of(file) == right(file)


def test_only_weights_are_found_and_where_they_lie(tmp_path: Path, given: Path) -> None:
    (tmp_path / "trained").mkdir()
    shapes = {"model.embed.weight": (7, 5), "model.norm.weight": (5,), "optim.norm.weight": (5,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    specs = {name: TensorSpec(shape, torch.float32) for name, shape in shapes.items()}
    write_dcp(tmp_path / "trained", specs, tensors.__getitem__, Disk())
    found = checkpoint_payloads(tmp_path / "trained")
    assert sorted(one.name for one in found) == ["model.embed.weight", "model.norm.weight"]
    for folder in (tmp_path / "trained", step_of(given)):
        index = read_index(folder)
        for span, kind, shape, name in checkpoint_payloads(folder):
            assert (span.path, span.start) == plain_place(folder, index, name)
            assert (kind, shape) == ("F32", index.tensors[name].size)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("how", ["pickle", "pipe", "link", "index is a pipe"])
def test_a_checkpoint_with_something_strange_is_left_alone(
    how: str, given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(given.parent)
    step = step_of(given)
    is_index = how in ("pickle", "index is a pipe")
    file = step / ".metadata" if is_index else next(step.glob("*.distcp"))
    content = file.read_bytes()
    file.unlink()
    if how == "pickle":
        file.write_bytes(pickle.dumps(Hostile(), 4))
    elif how == "link":
        (given.parent / "elsewhere").write_bytes(content)
        file.symlink_to(given.parent / "elsewhere")
    else:
        os.mkfifo(file)
    with pytest.raises((UnfitError, pickle.UnpicklingError)):
        checkpoint_payloads(step)
    with packing.packing(str(given), given.parent / "result", "hf", 1 << 30) as begun:
        assert begun is not None
        begun.wait()
        assert not begun.take({}, given)
    assert not (given.parent / "harm").exists()
    assert not list(given.parent.glob(".*"))


def test_the_room_for_a_header_is_enough_for_any_name() -> None:
    for ours, theirs in names._OURS_TO_HF.items():
        assert len(theirs) <= len(f"model.{ours}") + packing.LONGER_NAME
    specs = {"a.weight": TensorSpec((3,), torch.float32)}
    usual = header_of(specs)
    roomy = header_of(specs, 4096)
    assert len(roomy) == 4096 == 8 + int.from_bytes(roomy[:8], "little")
    assert json.load(io.BytesIO(roomy[8:])) == json.load(io.BytesIO(usual[8:]))
    with pytest.raises(ValueError, match="room for 40"):
        header_of(specs, 40)


def test_small_files_are_on_the_disk_before_large_ones_begin(
    given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, forced = hf_write.write_file, list[str]()

    def seen(path: Path, *rest: Any) -> None:
        assert {"config.json", "generation_config.json", "README.md"} <= set(
            os.listdir(path.parent)
        )
        write(path, *rest)

    monkeypatch.setattr(hf_write, "write_file", seen)
    monkeypatch.setattr(run, "fsync_dir", lambda folder: forced.append(folder.name))
    convert(given, given.parent / "result", "hf")
    assert forced == [f".result.tmp-{os.getpid()}", given.parent.name], "its names, and its own"


@pytest.mark.parametrize(
    ("start", "shape"),
    [(0, ((0,), 2 * 10**9)), (0, (2**2000,) * 9), (0, (1 << 33,)), (0, (True, 2)), (41, (2, 2))],
)
def test_what_an_index_says_is_not_multiplied_out(start: int, shape: Any) -> None:
    """A product of anything could take all memory; and numbers at odd places are never mapped."""
    with pytest.raises(UnfitError):
        payloads._payload(Path("file"), start, "F32", shape, "model.embed.weight")


def test_thousands_of_shards_are_not_open_at_once(given: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with packing.packing(str(given), given.parent / "result", "hf", 1) as begun:
        assert begun is not None
        begun.wait()
        assert len(os.listdir("/proc/self/fd")) <= before
        assert len(list(given.parent.glob(".*/*.safetensors"))) > 3


def test_what_a_namesake_left_behind_goes(given: Path, only_packed: None) -> None:
    left = given.parent / f".result.tmp-ahead-{os.getpid()}"
    left.mkdir()
    (left / "model.safetensors").touch()
    assert same(given, to_hf(given, given.parent / "result"))
    assert not left.exists()


def test_a_shard_without_an_end_is_refused(given: Path) -> None:
    with pytest.raises(UserError, match="inf is not a number above zero"):
        to_hf(given, given.parent / "result", "--shard-gb", "inf")
