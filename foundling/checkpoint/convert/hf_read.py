"""A Hugging Face folder as a source: config.json, safetensors or .bin files, tokenizer."""

from pathlib import Path
from typing import Any

from foundling.checkpoint.convert.hf_config import (
    LAYOUTS,
    from_hf_config,
    read_json,
)
from foundling.checkpoint.convert.safetensors_io import INDEX, SINGLE, open_folder_of_tensors
from foundling.checkpoint.convert.source import Source, Stored, find_places, tokenizer_folder
from foundling.checkpoint.convert.torch_file import TorchFiles
from foundling.config import CheckpointError

CONFIG = "config.json"
GENERATION = "generation_config.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def open_hf(folder: Path) -> Source:
    """The model of a Hugging Face folder."""
    config = read_json(folder / CONFIG)
    model = from_hf_config(config, folder)
    stored = _stored(folder)
    generation = _generation(config, folder / GENERATION)
    layout = LAYOUTS.get(str(config["model_type"]), "hf")
    return Source(
        kind="hf",
        path=folder,
        model=model,
        stored=stored,
        places=find_places(folder, model, stored, layout),
        tokenizer_folder=tokenizer_folder(folder),
        positions=_positions(config),
        generation=generation,
        notes=_ends_beyond(generation, model.vocab_size),
    )


def _stored(folder: Path) -> Stored:
    single, is_sharded = folder / BIN, (folder / BIN_INDEX).is_file()
    is_named = any((folder / name).is_file() for name in (INDEX, SINGLE))
    # Other files may lie beside .bin ones: an adapter's, an optimizer's.
    if is_named or (any(folder.glob("*.safetensors")) and not (single.is_file() or is_sharded)):
        return open_folder_of_tensors(folder)
    if is_sharded:
        shards = read_json(folder / BIN_INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise CheckpointError(f"{folder / BIN_INDEX} is damaged: it names no shards.")
        files = [folder / Path(name).name for name in sorted(set(map(str, shards.values())))]
    else:
        files = [single]
    if single.is_file() and not any(file.is_file() for file in files):
        files = [single]  # the index is of an older save, whose shards went
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{folder} has a config.json and no weights: {file.name}.")
    return TorchFiles(files)


def _generation(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """generation_config.json, or what transformers makes of config.json where there is none."""
    if file.is_file():
        return read_json(file)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config[name] for name in names if config.get(name) is not None}


def _ends_beyond(generation: dict[str, Any], rows: int) -> list[str]:
    """Tokens that are said to end a text and that the model has no row for."""
    ends = generation.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return [
        f"eos_token_id {end!r} is none of the vocabulary's {rows:,} tokens: it ends no text."
        for end in listed
        if type(end) is not int or not 0 <= end < rows
    ]


def _positions(config: dict[str, Any]) -> int:
    for name in ("max_position_embeddings", "n_positions"):
        if isinstance(config.get(name), int):
            return int(config[name])
    return 0
