"""Sources that others wrote: Meta's shards, DCP folders of three forms, torch.save files; and files
that would run code, which do not."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from convert_samples import BASE, FAMILIES, as_file, as_layout, random_model, same, weights_of

from foundling.checkpoint.convert.convert import convert
from foundling.checkpoint.convert.detect import kind_of, open_source
from foundling.config.errors import CheckpointError

ROWS = ("wq", "wk", "wv", "w1", "w3", "output")
COLUMNS = ("wo", "w2")


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    """A Llama 3.1 in Meta's layout, in one file."""
    return as_layout(tmp_path, FAMILIES["llama 3.1"], "llama")


def cut(meta: Path, folder: Path, parts: int, embedding: int) -> Path:
    """The same in shards, as model parallelism writes them; the table is cut along `embedding`."""
    folder.mkdir()
    whole = torch.load(meta / "consolidated.00.pth")
    (folder / "params.json").write_text((meta / "params.json").read_text())
    for part in range(parts):
        shard = {"rope.freqs": torch.ones(4)}
        for name, tensor in whole.items():
            stem = name.split(".")[-2]
            axis = 0 if stem in ROWS else 1 if stem in COLUMNS else None
            axis = embedding if stem == "tok_embeddings" else axis
            piece = tensor if axis is None else torch.tensor_split(tensor, parts, axis)[part]
            shard[name] = piece.clone()
        torch.save(shard, folder / f"consolidated.{part:02d}.pth")
    return folder


@pytest.mark.parametrize("embedding", [0, 1])
def test_metas_shards_are_merged(meta: Path, tmp_path: Path, embedding: int) -> None:
    shards = cut(meta, tmp_path / "shards", 2, embedding)
    assert same(meta, shards)
    (shards / "consolidated.00.pth").unlink()
    with pytest.raises(CheckpointError, match="lacks a shard"):
        open_source(shards)


def test_metas_scaling_without_a_factor_is_recorded(meta: Path, tmp_path: Path) -> None:
    params = json.loads((meta / "params.json").read_text())
    del params["rope_scaling_factor"]
    (meta / "params.json").write_text(json.dumps(params))
    source = open_source(meta)
    assert source.model.rope_scaling.factor == 8.0
    assert "names no factor" in source.notes[0]


def titan(state: dict[str, Any], folder: Path) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_folders_of_three_forms(meta: Path, tmp_path: Path) -> None:
    theirs = torch.load(meta / "consolidated.00.pth")
    moments = {name: {"exp_avg": torch.ones_like(t)} for name, t in theirs.items()}
    (tmp_path / "params.json").write_text((meta / "params.json").read_text())
    one = titan({"model": theirs, "optimizer": {"state": moments}, "step": 3}, tmp_path / "titan")
    two = titan({"app": {"model": theirs, "optim": moments, "clock": [1, "x"]}}, tmp_path / "app")
    bare = titan(dict(theirs), tmp_path / "bare")
    split = tmp_path / "split"
    titan(dict(theirs), split / "model")
    titan(moments, split / "optim")
    for folder in (one, two, bare, split):
        assert kind_of(folder) == "dcp"
        assert same(meta, folder), folder
    convert(two, tmp_path / "run", "native")
    assert same(meta, tmp_path / "run")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_folder_needs_a_shape(meta: Path, tmp_path: Path) -> None:
    theirs = torch.load(meta / "consolidated.00.pth")
    folder = titan({"model": theirs}, tmp_path / "deep" / "titan")
    with pytest.raises(CheckpointError, match="--shape"):
        open_source(folder)
    assert open_source(folder, str(meta)).model == open_source(meta).model
    with pytest.raises(CheckpointError, match="does not fit"):
        open_source(folder, "llama3.1-8b")


def test_our_dcp_folders_are_read_by_torch(tmp_path: Path) -> None:
    folder = as_layout(tmp_path, FAMILIES["llama 3.2"], "dcp")
    state = {"model": {"layers.0.attention.wq.weight": torch.zeros(48, 48)}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert state["model"]["layers.0.attention.wq.weight"].abs().sum() > 0


@pytest.mark.parametrize("wrapped", ["state_dict", "model", "module", ""])
def test_torch_files_by_anybodys_names(tmp_path: Path, wrapped: str) -> None:
    file = as_file(tmp_path / "a.pt", BASE)
    folder = as_layout(tmp_path, BASE, "hf")
    stored = open_source(folder).stored
    state = {f"_orig_mod.{name}": stored.read(name).clone() for name in stored.specs}
    home = tmp_path / "home"
    home.mkdir()
    torch.save({wrapped: state, "step": 3} if wrapped else state, home / "b.pt")
    (home / "config.json").write_text((folder / "config.json").read_text())
    assert same(file, home / "b.pt")


def test_weights_in_bin_files(tmp_path: Path) -> None:
    folder = as_layout(tmp_path, BASE, "hf")
    stored = open_source(folder).stored
    names = list(stored.specs)
    home = tmp_path / "bin"
    home.mkdir()
    (home / "config.json").write_text((folder / "config.json").read_text())
    torch.save({n: stored.read(n).clone() for n in names}, home / "pytorch_model.bin")
    assert same(folder, home)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trap),)


@pytest.mark.parametrize("form", ["torch", "meta", "bin", "dcp", "legacy"])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(form: str, tmp_path: Path) -> None:
    trap, home = tmp_path / "trap", tmp_path / "home"
    home.mkdir()
    good = random_model(BASE).state_dict()
    bad = {"model": good, "extra": Bomb(trap)}
    if form in ("torch", "legacy"):
        torch.save(bad, home / "a.pt", _use_new_zipfile_serialization=form == "torch")
        path = home / "a.pt"
    elif form == "meta":
        (home / "params.json").write_text('{"dim": 48, "n_layers": 2, "n_heads": 6}')
        torch.save(bad, home / "consolidated.00.pth")
        path = home
    elif form == "bin":
        (home / "config.json").write_text('{"model_type": "llama"}')
        config = as_layout(tmp_path, BASE, "hf") / "config.json"
        (home / "config.json").write_text(config.read_text())
        torch.save(bad, home / "pytorch_model.bin")
        path = home
    else:
        (home / ".metadata").write_bytes(pickle.dumps(bad["extra"]))
        path = home
    with pytest.raises(CheckpointError, match=r"refused|not to be trusted"):
        open_source(path)
    with pytest.raises(CheckpointError):
        convert(path, tmp_path / "there", "native")
    assert not trap.exists()
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'"),
        ({"model_type": "mamba"}, "is a mamba"),
        ({"num_hidden_layers": 3}, "lacks model.layers.2"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
        ({"intermediate_size": 100}, "should be [100, 48]"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "'linear'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "not alike"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, "not alike"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "no low_freq_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        ({"model_type": "llama4"}, "is a llama4"),
        ({"model_type": "qwen3"}, "lacks model.layers.0.self_attn.q_norm.weight"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias True"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window True"),
        ({"attention_bias": True}, "one half of a block"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_attention_heads": 7}, "cannot be used"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = as_layout(tmp_path, BASE, "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError) as error:
        open_source(folder)
    assert said in str(error.value)


@pytest.mark.parametrize("place", [0, 8, 20, 400, -1])
def test_damaged_safetensors_are_refused_or_differ(place: int, tmp_path: Path) -> None:
    folder = as_layout(tmp_path, BASE, "hf")
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    before = weights_of(folder)
    if place < 0:
        del content[-8:]
    else:
        content[place] ^= 0x15
    file.write_bytes(content)
    try:
        after = weights_of(folder)
    except CheckpointError:
        return
    assert any(not torch.equal(before[name], after[name]) for name in before)
