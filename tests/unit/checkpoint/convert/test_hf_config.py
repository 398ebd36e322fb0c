"""What a config.json may say that the model here does not have: refused by name, never left out."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from convert_samples import BASE, FAMILIES, as_layout

from foundling.checkpoint.convert import compare_models
from foundling.checkpoint.convert.compare_models import text_tokens
from foundling.checkpoint.convert.convert import convert
from foundling.checkpoint.convert.detect import open_source
from foundling.checkpoint.convert.hf_config import unknown_key
from foundling.config.errors import CheckpointError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MISTRAL = {"model_type": "mistral", "sliding_window": 8}
MIXED = ["full_attention", "sliding_attention"]


def edited(folder: Path, change: dict[str, Any]) -> Path:
    """Keys of its config.json changed; ... takes one out."""
    file = folder / "config.json"
    tree = {**json.loads(file.read_text()), **change}
    file.write_text(json.dumps({key: value for key, value in tree.items() if value is not ...}))
    return folder


def test_what_transformers_would_heed_is_refused(tmp_path: Path) -> None:
    """Each of these is another function to transformers, and the tensors fit all the same."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    refused: dict[str, dict[str, Any]] = {
        "states its rotary positions twice": {
            "rope_parameters": {**LLAMA3, **plain},
            "rope_scaling": LLAMA3,
        },
        "original_max_position_embeddings 32": {
            "rope_parameters": {**LLAMA3, "rope_theta": 1e4},
            "original_max_position_embeddings": 32,
        },
        "'full_attention' in its layer_types": {**MISTRAL, "layer_types": MIXED},
        "sliding_window of 0": {**MISTRAL, "sliding_window": 0},
        "'sliding_attention' in its layer_types": {"layer_types": MIXED},
        "is_causal False": {"is_causal": False},
        "use_mrope True": {"use_mrope": True},
        "per_layer_config": {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}},
    }
    folder = as_layout(tmp_path, BASE, "hf")
    whole = (folder / "config.json").read_text()
    for words, change in refused.items():
        with pytest.raises(CheckpointError) as error:
            open_source(edited(folder, change))
        assert words in str(error.value)
        (folder / "config.json").write_text(whole)
    assert open_source(folder).model == BASE


def test_keys_that_say_the_same_twice_are_read(tmp_path: Path) -> None:
    folder = as_layout(tmp_path, BASE, "hf")
    edited(folder, {**MISTRAL, "layer_types": ["sliding_attention"] * 2})
    assert open_source(folder).model.windows == (8,)
    edited(folder, {"sliding_window": None, "layer_types": ["full_attention"] * 2})
    assert open_source(folder).model.windows == ()
    edited(folder, {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}, "rope_scaling": LLAMA3})
    edited(folder, {"original_max_position_embeddings": 64})
    assert open_source(folder).model.rope_scaling.factor == 8


def test_a_gpt2_may_use_the_general_names(tmp_path: Path) -> None:
    """Twelve heads, which is what their class takes by itself, would fit its tensors as well."""
    folder = as_layout(tmp_path, FAMILIES["gpt 2"], "hf")
    edited(folder, {"n_head": ..., "num_attention_heads": 6})
    assert open_source(folder).model.heads == 6
    with pytest.raises(CheckpointError, match="num_attention_heads 12"):
        open_source(edited(folder, {"n_head": 6, "num_attention_heads": 12}))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_here_has_no_unknown_key(family: str, tmp_path: Path) -> None:
    folder = as_layout(tmp_path, FAMILIES[family], "hf")
    tree = json.loads((folder / "config.json").read_text())
    assert unknown_key(tree) == ""
    if tree["model_type"] != "foundling":
        assert unknown_key({**tree, "invented_later": 1}) == "invented_later"


def test_an_unknown_key_is_for_transformers_and_refused_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = edited(as_layout(tmp_path, BASE, "hf"), {"invented_later": 1})
    _, found = convert(folder, tmp_path / "judged", "native")
    assert found.source_through.startswith("transformers")
    monkeypatch.setattr(compare_models, "has_transformers", lambda: False)
    with pytest.raises(CheckpointError, match=r"invented_later .*foundling\[hf\]"):
        convert(folder, tmp_path / "out", "native")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given-hf", "given.pt", "judged"]


@pytest.mark.parametrize("name", ["qwen 2", "qwen 3"])
def test_biases_that_a_class_does_not_have_are_not_asked_for(name: str, tmp_path: Path) -> None:
    """Whatever its config says: their class does not look at these keys, either."""
    folder = as_layout(tmp_path, FAMILIES[name], "hf")
    edited(folder, {"mlp_bias": True, "attention_bias": name == "qwen 2"})
    _, found = convert(folder, tmp_path / "out", "native")
    assert found.source_through.startswith("transformers")


def test_a_tokenizer_of_another_model_leaves_enough_to_compare(tmp_path: Path) -> None:
    """Its ids lie beyond the model's rows; no token at all would agree with everything."""
    source = open_source(as_layout(tmp_path, BASE, "hf"))
    tokenizer = SimpleNamespace(bos_id=4, encode=lambda text: [5] * 10 + [1000] * len(text))
    tokens = text_tokens(source, tokenizer)  # type: ignore[arg-type]
    assert tokens.shape[1] > 100
    assert len(tokens.unique()) > 20
