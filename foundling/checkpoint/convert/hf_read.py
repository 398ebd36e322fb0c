"""A Hugging Face folder as a source: config.json, safetensors or .bin files, tokenizer."""

from pathlib import Path
from typing import Any

from foundling.checkpoint.convert.hf_config import (
    LAYOUTS,
    from_hf_config,
    read_json,
)
from foundling.checkpoint.convert.safetensors_io import open_folder_of_tensors
from foundling.checkpoint.convert.source import Source, Stored, find_places, tokenizer_folder
from foundling.checkpoint.convert.torch_file import TorchFiles
from foundling.config import CheckpointError

CONFIG = "config.json"
GENERATION = "generation_config.json"
BIN_INDEX = "pytorch_model.bin.index.json"


def open_hf(folder: Path) -> Source:
    """The model of a Hugging Face folder."""
    config = read_json(folder / CONFIG)
    model = from_hf_config(config, folder)
    stored = _stored(folder)
    layout = LAYOUTS.get(str(config["model_type"]), "hf")
    generation = folder / GENERATION
    return Source(
        kind="hf",
        path=folder,
        model=model,
        stored=stored,
        places=find_places(folder, model, stored, layout),
        tokenizer_folder=tokenizer_folder(folder),
        positions=_positions(config),
        generation=read_json(generation) if generation.is_file() else {},
    )


def _stored(folder: Path) -> Stored:
    if any(folder.glob("*.safetensors")):
        return open_folder_of_tensors(folder)
    if (folder / BIN_INDEX).is_file():
        shards = read_json(folder / BIN_INDEX).get("weight_map", {})
        files = [folder / Path(str(name)).name for name in sorted(set(shards.values()))]
    else:
        files = [folder / "pytorch_model.bin"]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{folder} has a config.json and no weights: {file.name}.")
    return TorchFiles(files)


def _positions(config: dict[str, Any]) -> int:
    for name in ("max_position_embeddings", "n_positions"):
        if isinstance(config.get(name), int):
            return int(config[name])
    return 0
