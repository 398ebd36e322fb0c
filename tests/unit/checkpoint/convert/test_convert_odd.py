"""Legal models of unusual shapes come through; files that others would read otherwise do not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_samples import BASE, FAMILIES, as_file, as_layout, random_model, same, weights_of
from safetensors.torch import load_file, save_file

from foundling.checkpoint.convert.convert import convert
from foundling.checkpoint.convert.detect import open_source
from foundling.checkpoint.name_map import translated
from foundling.config.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return as_layout(tmp_path, BASE, "hf")


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        open_source(path)
    return str(error.value)


def change_header(file: Path, change: Any) -> None:
    """Of a safetensors file; the numbers stay as they are."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    changed = json.dumps(header).encode()
    changed += b" " * (-len(changed) % 8)
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])


@pytest.mark.parametrize(("dim", "heads"), [(66, 6), (33, 3), (30, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_tensor_may_begin_anywhere(
    dim: int, heads: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """GPT-2 keeps q, k and v in one: their biases begin wherever the width says."""
    config = FAMILIES["gpt 2"].replace(dim=dim, heads=heads)
    source = as_file(tmp_path / "given.pt", config, dtype)
    convert(source, tmp_path / "hf", "hf")
    convert(tmp_path / "hf", tmp_path / "native", "native")
    assert same(source, tmp_path / "native")


def test_heads_that_are_no_part_of_the_width(tmp_path: Path) -> None:
    """LlamaConfig of transformers 5 refuses them, so they go out with code of ours."""
    source = as_file(tmp_path / "given.pt", BASE.replace(dim=50, heads=6, kv_heads=3, head_dim=12))
    _, found = convert(source, tmp_path / "hf", "hf")
    assert found.result_through.startswith("transformers")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "foundling"
    convert(tmp_path / "hf", tmp_path / "native", "native")
    assert same(source, tmp_path / "native")


def test_two_models_in_a_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    """transformers takes the single file, and others the shards."""
    convert(folder, tmp_path / "sharded", "hf", shard_bytes=20_000)
    (folder / "model.safetensors").rename(tmp_path / "sharded" / "model.safetensors")
    assert "holds two models, model.safetensors and the shards" in refusal(tmp_path / "sharded")


def test_tensors_that_are_not_dense_are_refused(tmp_path: Path) -> None:
    weights = random_model(BASE).state_dict()
    state = {translated(name, "hf"): tensor for name, tensor in weights.items()}
    folder = as_layout(tmp_path, BASE, "hf")
    (folder / "model.safetensors").unlink()
    state["model.norm.weight"] = state["model.norm.weight"].to_sparse()
    torch.save(state, folder / "pytorch_model.bin")
    assert "stores model.norm.weight in another form" in refusal(folder)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("Infinity", "num_hidden_layers inf, which is no"),
        ("1e30", "model.layers is at most 100,000"),
        ("0", "model.layers must be positive"),
        ("2.7", "num_hidden_layers 2.7, which is no"),
    ],
)
def test_a_number_of_layers_is_a_whole_one(folder: Path, value: str, told: str) -> None:
    file = folder / "config.json"
    text = file.read_text()
    assert '"num_hidden_layers": 2' in text
    file.write_text(text.replace('"num_hidden_layers": 2', f'"num_hidden_layers": {value}'))
    assert told in refusal(folder)


@pytest.mark.parametrize("value", [None, True, "small"])
@pytest.mark.parametrize("name", ["rms_norm_eps", "layer_norm_epsilon", "rope_theta"])
def test_what_must_be_a_number_is_not_taken_for_missing(
    name: str, value: Any, tmp_path: Path
) -> None:
    family = "gpt 2" if name == "layer_norm_epsilon" else "llama 2"
    folder = as_layout(tmp_path, FAMILIES[family], "hf")
    file = folder / "config.json"
    tree = json.loads(file.read_text())
    tree["rope_parameters"] = None
    file.write_text(json.dumps({**tree, name: value}))
    assert f"{name} {value!r}, which is no number" in refusal(folder)


@pytest.mark.parametrize(("ends", "said"), [(2, 0), ([2, 210], 0), (211, 1), ([2, -1, 10**9], 2)])
def test_an_end_that_is_no_token_is_said(folder: Path, ends: Any, said: int) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    notes = open_source(folder).notes
    assert [note.endswith("none of the vocabulary's 211 tokens: it ends no text.") for note in notes
            ] == [True] * said  # fmt: skip


@pytest.mark.parametrize("value", [float("inf"), 2.5, "7", None])
def test_a_shape_is_made_of_whole_numbers(folder: Path, value: Any) -> None:
    def change(header: dict[str, Any]) -> None:
        header["model.norm.weight"]["shape"] = [value]

    change_header(folder / "model.safetensors", change)
    assert "its header says nothing of model.norm.weight" in refusal(folder)


@pytest.mark.parametrize("what", ["overlap", "gap", "rest"])
def test_tensors_follow_each_other(folder: Path, what: str) -> None:
    """As safetensors itself has it: numbers that two tensors share, or nobody has, are damage."""
    file = folder / "model.safetensors"
    norms = ("model.layers.0.input_layernorm.weight", "model.norm.weight")

    def change(header: dict[str, Any]) -> None:
        if what == "overlap":
            header[norms[1]]["data_offsets"] = header[norms[0]]["data_offsets"]
        if what == "gap":
            del header[norms[0]]

    change_header(file, change)
    if what == "rest":
        file.write_bytes(file.read_bytes() + bytes(8))
    with pytest.raises(Exception, match=r"(?i)offset|covered"):
        load_file(file)
    assert "overlap or leave gaps" in refusal(folder)


def test_numbers_that_fp16_cannot_hold_are_refused(folder: Path, tmp_path: Path) -> None:
    """In a row that no text reads, so that logits say nothing."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][209, 3] = 1e6
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"embed\.weight has numbers up to 1e\+06"):
        convert(folder, tmp_path / "narrow", "hf", dtype="fp16")
    assert not (tmp_path / "narrow").exists()
    convert(folder, tmp_path / "wide", "hf", dtype="bf16")
    assert bool(weights_of(tmp_path / "wide")["embed.weight"].isfinite().all())


@pytest.mark.parametrize(
    ("name", "value"),
    [("dim", float("inf")), ("dim", "48"), ("rope_scaling_factor", "x"), ("rope_original", 1e400)],
)
def test_metas_numbers_are_numbers(name: str, value: Any, tmp_path: Path) -> None:
    folder = as_layout(tmp_path, FAMILIES["llama 3.1"], "llama")
    file = folder / "params.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    assert "params.json" in refusal(folder)


@pytest.mark.parametrize("origin", [3, [], {"positions": "many"}, {"generation": 7}])
def test_a_run_whose_origin_is_damaged_is_refused(origin: Any, tmp_path: Path) -> None:
    folder = as_layout(tmp_path, BASE, "native")
    file = folder / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "origin": origin}))
    assert "damaged run.json" in refusal(folder)


def test_a_model_without_heads_is_refused(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_attention_heads": 0}))
    assert "config that cannot be used" in refusal(folder)


def test_an_index_whose_shards_went_is_no_model(folder: Path, tmp_path: Path) -> None:
    """transformers deletes old shards when it saves one file, and leaves their index."""
    wanted = weights_of(folder)
    convert(folder, tmp_path / "sharded", "hf", shard_bytes=20_000)
    index = "model.safetensors.index.json"
    (tmp_path / "sharded" / index).rename(folder / index)
    assert weights_of(folder).keys() == wanted.keys()
    state = {translated(name, "hf"): tensor for name, tensor in wanted.items()}
    (folder / index).rename(folder / "pytorch_model.bin.index.json")
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    save_file({"a": torch.ones(3)}, folder / "adapter_model.safetensors")
    assert all(torch.equal(weights_of(folder)[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("pad", "eos", "kept"),
    [(211, 2, {"eos_token_id": 2}), (5.0, [2, 500], {}), (3, [2, 7], {"pad_token_id": 3})],
)
def test_tokens_without_a_row_are_not_stated_in_a_config(
    pad: Any, eos: Any, kept: dict[str, int], folder: Path, tmp_path: Path
) -> None:
    """transformers would not load it; a generation config may say what it likes."""
    stated = {"pad_token_id": pad, "eos_token_id": eos}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    convert(folder, tmp_path / "result", "hf")
    config = json.loads((tmp_path / "result" / "config.json").read_text())
    wanted = {**kept, **({"eos_token_id": eos} if eos == [2, 7] else {})}
    assert {k: v for k, v in config.items() if k.endswith("_token_id")} == wanted
    generation = json.loads((tmp_path / "result" / "generation_config.json").read_text())
    assert {name: generation[name] for name in stated} == stated


def test_half_a_character_is_written_as_it_was_read(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text('{"stop_strings": ["\\ud800"]}')
    convert(folder, tmp_path / "result", "hf")
    text = (tmp_path / "result" / "generation_config.json").read_text()
    assert json.loads(text)["stop_strings"] == ["\ud800"]


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 0},
        {"rope_parameters": [["rope_type", "default"]]},
        {"model_type": "mistral", "sliding_window": "8"},
        {"num_hidden_layers": "2"},
        {"num_hidden_layers": True},
    ],
)
def test_values_of_another_kind_are_refused(change: dict[str, Any], folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert refusal(folder)
