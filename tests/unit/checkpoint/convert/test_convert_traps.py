"""Sources that say two things, or something else than they seem to: refused, or read as meant."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_samples import BASE, FAMILIES, as_file, as_layout, random_model, weights_of
from safetensors.torch import load_file, save_file

from foundling.checkpoint.convert.convert import convert
from foundling.checkpoint.convert.detect import open_source
from foundling.checkpoint.convert.model_source import SidecarShape, sidecar_json
from foundling.checkpoint.convert.tensor_files import load_torch
from foundling.config.errors import CheckpointError
from foundling.config.load import dump_yaml, load_run_config
from foundling.tokenizer.chat_template import find_template


def edit(file: Path, **change: Any) -> None:
    """Change keys of a JSON file; ... takes one out."""
    tree = {**json.loads(file.read_text()), **change}
    file.write_text(json.dumps({key: value for key, value in tree.items() if value is not ...}))


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        open_source(path)
    return str(error.value)


def test_of_weights_and_their_average_the_weights_are_read(tmp_path: Path) -> None:
    """The average's names are shorter."""
    model, average = (random_model(BASE, seed).state_dict() for seed in (1, 2))
    sidecar = sidecar_json(SidecarShape(BASE))
    torch.save({"ema": average, "model": model, "foundling": sidecar}, tmp_path / "a.pt")
    found = weights_of(tmp_path / "a.pt")
    assert all(torch.equal(found[name], model[name]) for name in model)
    torch.save({"student": model, "teacher": average, "foundling": sidecar}, tmp_path / "b.pt")
    assert "b.pt holds several models (student, teacher)" in refusal(tmp_path / "b.pt")


def test_a_name_that_two_wrappers_share_is_refused(tmp_path: Path) -> None:
    model = random_model(BASE).state_dict()
    twice = {**model, **{f"module.{name}": tensor for name, tensor in model.items()}}
    torch.save({"model": twice, "foundling": sidecar_json(SidecarShape(BASE))}, tmp_path / "a.pt")
    assert "twice" in refusal(tmp_path / "a.pt")


def test_a_mistral_that_does_not_state_its_window_has_its_class_s(tmp_path: Path) -> None:
    folder = as_layout(tmp_path, BASE, "hf")
    edit(folder / "config.json", model_type="mistral")
    assert open_source(folder).model.windows == (4096,)
    edit(folder / "config.json", sliding_window=None)
    assert open_source(folder).model.windows == ()


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    folder = as_layout(tmp_path, FAMILIES["llama 3.2"], "hf")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    assert open_source(folder).model.tie_embeddings
    tensors["lm_head.weight"][7] += 1
    save_file(tensors, file)
    assert "lm_head.weight that is not the embedding" in refusal(folder)


def test_the_file_that_is_named_is_the_one_that_is_read(tmp_path: Path) -> None:
    folder = as_layout(tmp_path, BASE, "hf")
    assert open_source(folder / "model.safetensors").model == BASE
    save_file(load_file(folder / "model.safetensors"), folder / "other.safetensors")
    assert "other.safetensors is not of the model in its folder" in refusal(
        folder / "other.safetensors"
    )
    (folder / "config.json").unlink()
    assert "has no config.json beside it" in refusal(folder / "model.safetensors")


def test_numbers_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    folder = as_layout(tmp_path, BASE, "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(
        torch.int8
    )
    save_file(tensors, folder / "model.safetensors")
    assert "quantized" in refusal(folder)


@pytest.mark.parametrize("content", ["[]", '{"weight_map": []}', "{", "[" * 100_000])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_index_without_shards_is_refused(content: str, kind: str, tmp_path: Path) -> None:
    folder = as_layout(tmp_path, BASE, "hf")
    name = "model.safetensors.index.json"
    if kind == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model-1.bin")
        (folder / "model.safetensors").unlink()
        name = "pytorch_model.bin.index.json"
    (folder / name).write_text(content)
    assert name in refusal(folder)


def test_a_header_that_is_a_list_is_refused(tmp_path: Path) -> None:
    folder = as_layout(tmp_path, BASE, "hf")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    assert "no safetensors file" in refusal(folder)


def test_a_compressed_archive_is_not_unpacked(tmp_path: Path) -> None:
    file = as_file(tmp_path / "a.pt", BASE)
    with (
        zipfile.ZipFile(file) as plain,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for record in plain.infolist():
            packed.writestr(record.filename, plain.read(record))
    with pytest.raises(CheckpointError, match="compressed archive"):
        load_torch(tmp_path / "b.pt")


def test_a_tensor_of_fewer_numbers_than_it_states_is_refused(tmp_path: Path) -> None:
    """One number under a large shape would be a large tensor as soon as it is copied."""
    model = dict(random_model(BASE).state_dict())
    model["embed.weight"] = torch.zeros(1).expand(211, 48)
    torch.save({"model": model, "foundling": sidecar_json(SidecarShape(BASE))}, tmp_path / "a.pt")
    assert "stores fewer numbers" in refusal(tmp_path / "a.pt")


def test_special_tokens_come_from_the_config_where_nothing_else_names_them(tmp_path: Path) -> None:
    folder = as_layout(tmp_path, BASE, "hf")
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", bos_token_id=1, eos_token_id=[2, 3], pad_token_id=None)
    convert(folder, tmp_path / "run", "native")
    convert(tmp_path / "run", tmp_path / "again", "hf")
    for name in ("config.json", "generation_config.json"):
        tree = json.loads((tmp_path / "again" / name).read_text())
        assert (tree["bos_token_id"], tree["eos_token_id"]) == (1, [2, 3])


def test_a_card_claims_no_training_that_it_did_not_see(tmp_path: Path) -> None:
    folder = as_layout(tmp_path, BASE, "hf")
    edit(folder / "config.json", max_position_embeddings=131072)
    convert(folder, tmp_path / "again", "hf")
    card = (tmp_path / "again" / "README.md").read_text()
    assert "Trained with rows" not in card
    assert "up to 131,072 tokens" in card


def test_a_broken_tokenizer_config_is_a_sentence(tmp_path: Path) -> None:
    from foundling.config.errors import DataError

    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as JSON"):
        find_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert find_template(tmp_path) is None


@pytest.mark.parametrize("to", ["hf", "llama", "torch", "dcp"])
def test_how_long_its_rows_were_travels(to: Any, tmp_path: Path) -> None:
    """Or a chat would run far beyond what the model was trained on."""
    config = FAMILIES["llama 2"].replace(dropout=0.1)
    convert(as_file(tmp_path / "a.pt", config), tmp_path / "run", "native")
    run = load_run_config(tmp_path / "run" / "config.yaml")
    run = run.replace(train={"seq_len": 96})
    (tmp_path / "run" / "config.yaml").write_text(dump_yaml(run))
    convert(tmp_path / "run", tmp_path / "there", to)
    source = open_source(tmp_path / "there")
    assert (source.context, source.model) == (96, config)


def test_metas_own_file_decides_the_function(tmp_path: Path) -> None:
    folder = as_layout(tmp_path, FAMILIES["llama 2"], "llama")
    edit(folder / "params.json", rope_theta=77.0)
    assert open_source(folder).model.rope_theta == 77.0
