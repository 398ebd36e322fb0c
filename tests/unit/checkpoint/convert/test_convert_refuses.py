"""Errors planted into a conversion: each is refused, and nothing is left behind."""

import os
import resource
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_samples import FAMILIES, as_file, same

from foundling.checkpoint.convert import compare_models, dcp, hf
from foundling.checkpoint.convert.convert import convert
from foundling.checkpoint.convert.model_source import ConvertPlan, Kind
from foundling.config.errors import CheckpointError
from foundling.config.load import dump_yaml, load_run_config

Twist = Callable[[str, torch.Tensor], torch.Tensor]


def transposed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T.contiguous() if name == "layers.1.attn.q.weight" else tensor


def swapped(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name != "layers.0.ffn.up.weight":
        return tensor
    return tensor[[1, 0, *range(2, len(tensor))]]


def rare_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Of tokens that the text does not have: only the bits show it."""
    return tensor[[*range(209), 210, 209]] if name == "embed.weight" else tensor


def dropped(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(tensor) if name == "layers.1.ffn_norm.weight" else tensor


TWISTS: dict[str, Twist] = {
    "a matrix transposed": transposed,
    "two rows swapped": swapped,
    "rows of rare tokens swapped": rare_rows,
    "a norm dropped": dropped,
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that shows it as well, and takes less time."""
    monkeypatch.setattr(compare_models, "LONGEST", 128)


def refused(file: Path, to: Kind) -> str:
    """The sentence; and there is nothing beside the source afterwards."""
    before = sorted(path.name for path in file.parent.iterdir())
    with pytest.raises(CheckpointError) as error:
        convert(file, file.parent / "result", to)
    assert sorted(path.name for path in file.parent.iterdir()) == before
    return str(error.value)


def plant(monkeypatch: pytest.MonkeyPatch, twist: Twist) -> None:
    """Let writers, and only they, read a twisted tensor."""
    plain = ConvertPlan.read
    is_writing = [True]

    def read(self: ConvertPlan, name: str) -> torch.Tensor:
        found = plain(self, name)
        return twist(name, found) if is_writing[0] else found

    def checked(*given: Any) -> Any:
        is_writing[0] = False
        return honest(*given)

    honest = compare_models.compare
    monkeypatch.setattr(ConvertPlan, "read", read)
    monkeypatch.setattr("foundling.checkpoint.convert.convert.compare", checked)


@pytest.mark.parametrize("twist", TWISTS)
@pytest.mark.parametrize("to", ["native", "hf", "llama", "torch", "dcp"])
def test_a_planted_error_is_refused(
    twist: str, to: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FAMILIES["llama 3.1"].replace(kv_heads=0)
    file = as_file(tmp_path / "a.pt", config)
    plant(monkeypatch, TWISTS[twist])
    assert "is not the source's" in refused(file, to)


@pytest.mark.parametrize("to", ["native", "hf"])
def test_the_comparison_does_not_read_through_the_writers_eyes(
    to: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of tokens that the text does not have, wrong for whoever asks the plan."""
    file = as_file(tmp_path / "a.pt", FAMILIES["llama 2"])
    plain = ConvertPlan.read
    monkeypatch.setattr(ConvertPlan, "read", lambda plan, name: rare_rows(name, plain(plan, name)))
    assert "embed.weight is not the source's" in refused(file, to)


@pytest.mark.parametrize("twist", ["a matrix transposed", "two rows swapped", "a norm dropped"])
@pytest.mark.parametrize("to", ["hf", "native"])
def test_the_logits_alone_refuse_it_and_say_by_how_much(
    twist: str, to: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = as_file(tmp_path / "a.pt", FAMILIES["llama 3.1"].replace(kv_heads=0))
    plant(monkeypatch, TWISTS[twist])
    monkeypatch.setattr(compare_models, "same_bits", lambda *_: True)
    said = refused(file, to)
    assert "logits differ from the source's by up to" in said


def test_scaling_of_positions_added_at_export_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one public account did to its models."""
    file = as_file(tmp_path / "a.pt", FAMILIES["llama 2"])
    honest = hf.to_hf_config

    def scaled(model: Any, **rest: Any) -> dict[str, Any]:
        return honest(model.replace(rope_scaling={"factor": 8.0, "original": 128}), **rest)

    monkeypatch.setattr(hf, "to_hf_config", scaled)
    assert "model.rope_scaling" in refused(file, "hf")
    monkeypatch.setattr(compare_models, "same_shape", lambda *_: [])
    assert "logits differ" in refused(file, "hf")


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama 3.2", "rope_scaling", {"factor": 8.0}),
        ("llama 2", "rope_theta", 20_000.0),
        ("llama 2", "norm_eps", 1e-3),
        ("depth", "logit_softcap", 14.0),
        ("depth", "windows", (39, 39, 39, 0)),
    ],
)
def test_a_config_that_says_something_else_is_refused(
    family: str, field: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = as_file(tmp_path / "a.pt", FAMILIES[family])
    honest = hf.to_hf_config

    def other(model: Any, **rest: Any) -> dict[str, Any]:
        return honest(model.replace(**{field: value}), **rest)

    monkeypatch.setattr(hf, "to_hf_config", other)
    assert f"model.{field}" in refused(file, "hf")
    monkeypatch.setattr(compare_models, "same_shape", lambda *_: [])
    assert "logits differ" in refused(file, "hf")


def test_a_tensor_left_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = as_file(tmp_path / "a.pt", FAMILIES["llama 2"])
    honest = hf.write_file

    def forgetful(path: Path, specs: Any, *rest: Any) -> None:
        honest(path, {n: s for n, s in specs.items() if "1.input_layernorm" not in n}, *rest)

    monkeypatch.setattr(hf, "write_file", forgetful)
    assert "lacks model.layers.1.input_layernorm.weight" in refused(file, "hf")


@pytest.mark.parametrize("to", ["native", "hf", "llama", "torch", "dcp"])
def test_a_full_disk_leaves_nothing(to: Kind, tmp_path: Path) -> None:
    """A limit on the size of files fails where a full disk fails: in the middle of a tensor."""
    file = as_file(tmp_path / "a.pt", FAMILIES["llama 2"])
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, kept[1]))
    try:
        said = refused(file, to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert "could not be written: File too large; nothing was left" in said


def test_folders_made_on_the_way_go_again_and_so_does_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    file = as_file(tmp_path / "mine" / "a.pt", FAMILIES["llama 2"])
    threads = threading.active_count()
    with monkeypatch.context() as patched:
        plant(patched, transposed)
        with pytest.raises(CheckpointError):
            convert(file, tmp_path / "some" / "where" / "there", "native")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert threading.active_count() == threads
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f".there.tmp-{dead.pid}").mkdir()
    (tmp_path / f".there.tmp-{os.getppid()}").mkdir()
    convert(file, tmp_path / "there", "native")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f".there.tmp-{os.getppid()}", "mine", "there"]


def test_a_result_is_not_put_among_checkpoints(tmp_path: Path) -> None:
    file = as_file(tmp_path / "a.pt", FAMILIES["llama 2"])
    convert(file, tmp_path / "run", "native")
    (step,) = (tmp_path / "run" / "checkpoints").iterdir()
    with pytest.raises(CheckpointError, match="among the checkpoints"):
        convert(tmp_path / "run", step / "exported", "hf")


def test_a_run_with_checkpoints_elsewhere_becomes_one_that_holds_its_own(tmp_path: Path) -> None:
    file = as_file(tmp_path / "a.pt", FAMILIES["llama 2"])
    convert(file, tmp_path / "run", "native")
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "disk" / "run")
    config = load_run_config(tmp_path / "run" / "config.yaml")
    config = config.replace(checkpoint={"folder": str(tmp_path / "disk")})
    (tmp_path / "run" / "config.yaml").write_text(dump_yaml(config))
    convert(tmp_path / "run", tmp_path / "again", "native")
    assert same(tmp_path / "run", tmp_path / "again")


def test_an_interrupt_leaves_nothing_and_nobody_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = as_file(tmp_path / "a.pt", FAMILIES["llama 2"])
    threads = threading.active_count()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp, "write_dcp", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(file, tmp_path / "new" / "result", "native")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    assert threading.active_count() == threads
