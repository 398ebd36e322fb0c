"""Hugging Face folders, read as a source and written as a result."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foundling.checkpoint.convert.hf_config import (
    LAYOUTS,
    family_of,
    from_hf_config,
    read_json,
    to_hf_config,
    write_json,
)
from foundling.checkpoint.convert.model_source import (
    ConvertPlan,
    LayoutResult,
    ModelSource,
    StoredTensors,
    copy_tokenizer,
    find_places,
    tokenizer_folder,
)
from foundling.checkpoint.convert.publish import write_card
from foundling.checkpoint.convert.tensor_files import (
    INDEX,
    SINGLE,
    TorchFiles,
    open_folder_of_tensors,
    write_file,
)
from foundling.checkpoint.dcp_index import TensorSpec
from foundling.checkpoint.streams import grouped
from foundling.config.errors import CheckpointError
from foundling.runtime.files import write_text_atomic
from foundling.tokenizer.chat import CHAT_TEMPLATE
from foundling.tokenizer.tokenizer import Tokenizer

CONFIG = "config.json"
GENERATION = "generation_config.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def open_hf(folder: Path) -> ModelSource:
    """The model of a Hugging Face folder."""
    config = read_json(folder / CONFIG)
    model = from_hf_config(config, folder)
    stored = _stored(folder)
    generation = _generation(config, folder / GENERATION)
    layout = LAYOUTS.get(str(config["model_type"]), "hf")
    return ModelSource(
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


def _stored(folder: Path) -> StoredTensors:
    single, is_sharded = folder / BIN, (folder / BIN_INDEX).is_file()
    is_named = any((folder / name).is_file() for name in (INDEX, SINGLE))
    # The folder may hold other .bin files: an adapter's, an optimizer's.
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


# A Hugging Face folder as a result: config, generation config, shards, tokenizer, model card.

REMOTE_CODE = "modeling_foundling.py"
_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}


def write_hf(folder: Path, plan: ConvertPlan) -> None:
    """Everything that `from_pretrained` looks for."""
    source = plan.source
    family = family_of(source.model)
    tokenizer = source.tokenizer()
    positions = source.positions or source.model.max_positions or source.context
    dtypes = {spec.dtype for spec in plan.specs.values()}
    dtype = _DTYPE_NAMES.get(next(iter(dtypes)), "float32") if len(dtypes) == 1 else "float32"
    ids = _ids(source, tokenizer)
    config = to_hf_config(source.model, positions=positions, dtype=dtype, ids=ids)
    write_json(folder / CONFIG, config)
    write_json(folder / GENERATION, source.generation or _generation_config(tokenizer, ids))
    _write_tokenizer(folder, source, tokenizer, positions)
    if family == "foundling":
        code = Path(__file__).with_name(REMOTE_CODE)
        shutil.copyfile(code, folder / REMOTE_CODE)
    write_card(folder, source, family, plan.name or source.path.resolve().name)
    laid = LayoutResult(plan, LAYOUTS.get(family, "hf"))
    shards = _divided(laid.specs, plan.shard_bytes)
    for file, specs in shards.items():
        write_file(folder / file, specs, laid.read)
    if len(shards) > 1:
        total = sum(spec.nbytes for spec in laid.specs.values())
        places = {name: file for file, specs in shards.items() for name in specs}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _divided(specs: Mapping[str, TensorSpec], limit: int) -> dict[str, dict[str, TensorSpec]]:
    """The tensors of each file."""
    shards = grouped(((name, spec.nbytes) for name, spec in specs.items()), limit)
    count = len(shards)
    files = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    return {
        SINGLE if count == 1 else file: {name: specs[name] for name in names}
        for file, names in zip(files, shards, strict=True)
    }


def _ids(source: ModelSource, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Special tokens by number, of those that the model has rows for: transformers cannot load a
    model whose padding has none, though it does not mind that in a generation config."""
    rows = source.model.vocab_size
    found: dict[str, Any] = {}
    if source.generation:
        kept = ("bos_token_id", "eos_token_id", "pad_token_id")
        found = {name: source.generation[name] for name in kept if name in source.generation}
    elif tokenizer is not None:
        own = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
        found = {f"{role}_token_id": id for role, id in own.items()}
    return {name: ids for name, ids in found.items() if _are_rows(name, ids, rows)}


def _are_rows(name: str, ids: Any, rows: int) -> bool:
    """Whether a model has rows for a token, or for each of several that end a text."""
    several = ids if isinstance(ids, list) and name == "eos_token_id" else [ids]
    return bool(several) and all(type(id) is int and 0 <= id < rows for id in several)


def _generation_config(tokenizer: Tokenizer | None, ids: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy by default, and it stops where a turn or a document ends."""
    stated = {"_from_model_config": False, "do_sample": False, **ids}
    if tokenizer is not None and tokenizer.names["end"] == "<|end|>":  # one of ours
        stated["eos_token_id"] = sorted(tokenizer.stop_ids)
    return stated


def _write_tokenizer(
    folder: Path, source: ModelSource, tokenizer: Tokenizer | None, positions: int
) -> None:
    """A foreign tokenizer goes as it came; ours says that a document begins with BOS."""
    copy_tokenizer(source, folder)
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    if tokenizer is None or config.get("chat_template") != CHAT_TEMPLATE:
        return
    tokenizer.save(folder)
    config = read_json(config_file)
    config["model_max_length"] = positions
    write_json(config_file, config)
    roles = ("bos", "eos", "pad")
    write_json(
        folder / "special_tokens_map.json",
        {f"{role}_token": tokenizer.names[role] for role in roles},
    )
    engine = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    engine["post_processor"] = _begins_with(tokenizer.names["bos"], tokenizer.bos_id)
    text = json.dumps(engine, indent=2, ensure_ascii=False) + "\n"
    write_text_atomic(folder / "tokenizer.json", text)


def _begins_with(token: str, id: int) -> dict[str, Any]:
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    text: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, second],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    }
