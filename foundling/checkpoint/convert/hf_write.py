"""A Hugging Face folder as a result: config, generation config, shards, tokenizer, model card."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foundling.checkpoint.convert.card import write_card
from foundling.checkpoint.convert.hf_config import (
    LAYOUTS,
    family_of,
    read_json,
    to_hf_config,
)
from foundling.checkpoint.convert.hf_read import CONFIG, GENERATION
from foundling.checkpoint.convert.safetensors_io import INDEX, write_file
from foundling.checkpoint.convert.source import Source
from foundling.checkpoint.convert.writing import Laid, Plan, copy_tokenizer
from foundling.checkpoint.tensor_index import TensorSpec
from foundling.runtime.files import write_text_atomic
from foundling.runtime.shards import grouped, shard_names
from foundling.tokenizer import CHAT_TEMPLATE, Tokenizer

REMOTE_CODE = "modeling_foundling.py"
_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}


def write_hf(folder: Path, plan: Plan) -> None:
    """Everything that `from_pretrained` looks for."""
    source = plan.source
    family = family_of(source.model)
    tokenizer = source.tokenizer()
    positions = source.positions or source.model.max_positions or source.context
    dtypes = {spec.dtype for spec in plan.specs.values()}
    dtype = _DTYPE_NAMES.get(next(iter(dtypes)), "float32") if len(dtypes) == 1 else "float32"
    ids = _ids(source, tokenizer)
    config = to_hf_config(source.model, positions=positions, dtype=dtype, ids=ids)
    _write_json(folder / CONFIG, config)
    _write_json(folder / GENERATION, source.generation or _generation(tokenizer, ids))
    _write_tokenizer(folder, source, tokenizer, positions)
    if family == "foundling":
        code = Path(__file__).with_name("remote_code") / REMOTE_CODE
        shutil.copyfile(code, folder / REMOTE_CODE)
    write_card(folder, source, family, plan.name or source.path.resolve().name)
    _write_shards(folder, Laid(plan, LAYOUTS.get(family, "hf")), plan)


def _write_shards(folder: Path, laid: Laid, plan: Plan) -> None:
    shards = _divided(laid.specs, plan.shard_bytes)
    for file, specs in shards.items():
        write_file(folder / file, specs, laid.read)
    if len(shards) == 1:
        return
    total = sum(_size(spec) for spec in laid.specs.values())
    places = {name: file for file, specs in shards.items() for name in specs}
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _divided(specs: Mapping[str, TensorSpec], limit: int) -> dict[str, dict[str, TensorSpec]]:
    """The tensors of each file."""
    groups = grouped(((name, _size(spec)) for name, spec in specs.items()), limit)
    shards = [{name: specs[name] for name in names} for names in groups]
    return dict(zip(shard_names(len(shards)), shards, strict=True))


def _size(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _ids(source: Source, tokenizer: Tokenizer | None) -> dict[str, Any]:
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


def _generation(tokenizer: Tokenizer | None, ids: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy by default, and it stops where a turn or a document ends."""
    stated = {"_from_model_config": False, "do_sample": False, **ids}
    if tokenizer is not None and _is_ours(tokenizer):
        stated["eos_token_id"] = sorted(tokenizer.stop_ids)
    return stated


def _is_ours(tokenizer: Tokenizer) -> bool:
    return tokenizer.names["end"] in {"<|end|>"}


def _write_tokenizer(
    folder: Path, source: Source, tokenizer: Tokenizer | None, positions: int
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
    _write_json(config_file, config)
    roles = ("bos", "eos", "pad")
    _write_json(
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


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    # In ASCII: half a character, which JSON can spell, is no text.
    write_text_atomic(path, json.dumps(tree, indent=2) + "\n")
