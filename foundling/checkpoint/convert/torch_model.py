"""A torch.save file as a whole model, its config inferred where it brings none."""

import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foundling.checkpoint.convert.dcp import compact
from foundling.checkpoint.convert.hf_config import from_hf_config, read_json
from foundling.checkpoint.convert.meta import PARAMS, from_params
from foundling.checkpoint.convert.model_source import (
    OWN,
    TOKENIZER_FILES,
    ConvertPlan,
    Kind,
    ModelSource,
    SidecarShape,
    StoredTensors,
    find_places,
    parse_sidecar,
    sidecar_of,
    tokenizer_folder,
)
from foundling.checkpoint.convert.tensor_files import Tensors, flat, load_torch, save_torch
from foundling.checkpoint.name_map import Layout, layout_of
from foundling.config.errors import CheckpointError

SIDECAR_KEY = "foundling"
TEXTS = "tokenizer"


def open_torch(file: Path, shape: str | None = None) -> ModelSource:
    """The model of a torch.save file."""
    tree = load_torch(file)
    sidecar = tree.get(SIDECAR_KEY) if isinstance(tree, Mapping) else None
    source = open_tensors(
        "torch", file, Tensors(dict(flat(tree)), file), shape, [file.parent], sidecar
    )
    texts = tree.get(TEXTS) if isinstance(tree, Mapping) else None
    if isinstance(texts, Mapping):
        source.tokenizer_folder = _unpacked(texts, source)
    return source


def write_torch(file: Path, plan: ConvertPlan) -> None:
    """One file; torch.save needs all tensors at once, so memory holds the file once."""
    source = plan.source
    content: dict[str, Any] = {
        "model": {name: compact(plan.read(name)) for name in plan.specs},
        SIDECAR_KEY: sidecar_of(source),
    }
    if source.tokenizer_folder is not None:
        content[TEXTS] = {
            name: (source.tokenizer_folder / name).read_bytes().decode("latin-1")
            for name in TOKENIZER_FILES
            if (source.tokenizer_folder / name).is_file()
        }
    save_torch(file, content)


def _unpacked(texts: Mapping[str, Any], source: ModelSource) -> Path:
    """The tokenizer's files in a folder that goes with the source."""
    holder = tempfile.TemporaryDirectory(prefix="foundling-tokenizer-")
    weakref.finalize(source, holder.cleanup)
    for name in TOKENIZER_FILES:
        if isinstance(texts.get(name), str):
            Path(holder.name, name).write_bytes(texts[name].encode("latin-1"))
    return Path(holder.name)


# The config of tensors that come without one: DCP folders and torch.save files.
#
# The shape comes from the same folder (foundling.json, params.json, config.json) or from --shape.
# Sizes that tensors show are compared with it when places are looked up; how many heads there are,
# and how positions turn, tensors do not show, so it is never guessed.


def open_tensors(
    kind: Kind,
    path: Path,
    stored: StoredTensors,
    shape: str | None,
    beside: Sequence[Path],
    sidecar: Any = None,
) -> ModelSource:
    """The model of tensors that come without a config, by any layout's names."""
    found = layout_of(stored.specs, path)
    if found is None:
        few = ", ".join(list(stored.specs)[:3])
        raise CheckpointError(
            f"{path} holds no model by names that are known here (it has {few or 'no tensors'})."
        )
    layout, prefix = found
    if sidecar is not None and shape is None:
        described = parse_sidecar(sidecar, path)
    else:
        described = find_shape(path, stored, layout, prefix, shape, beside)
    return ModelSource(
        kind=kind,
        path=path,
        model=described.model,
        stored=stored,
        places=find_places(path, described.model, stored, layout, prefix),
        tokenizer_folder=tokenizer_folder(
            *(folder for place in beside for folder in (place, place / "tokenizer"))
        ),
        positions=described.positions,
        generation=described.generation,
        notes=described.notes,
    )


def find_shape(
    where: Path,
    stored: StoredTensors,
    layout: Layout,
    prefix: str,
    named: str | None,
    beside: Sequence[Path],
) -> SidecarShape:
    """The shape that --shape gives, or that a file in the tensors' folder gives."""
    if named is not None:
        return _named(named, stored, layout, prefix)
    for folder in beside:
        if (folder / OWN).is_file():
            return parse_sidecar(read_json(folder / OWN), folder / OWN)
        if (folder / PARAMS).is_file():
            model, notes = from_params(read_json(folder / PARAMS), stored, prefix, folder)
            return SidecarShape(model, notes=notes)
        if (folder / "config.json").is_file():
            return SidecarShape(from_hf_config(read_json(folder / "config.json"), folder))
    raise CheckpointError(
        f"{where} says nothing about heads and positions; put its params.json or config.json"
        " beside it, or give --shape with a preset or a config."
    )


def _named(named: str, stored: StoredTensors, layout: Layout, prefix: str) -> SidecarShape:
    """The model of a preset, a YAML file, a run, a params.json or a config.json."""
    place = Path(named)
    folder = place if place.is_dir() else place.parent
    if (place.is_file() and place.suffix == ".json") or (folder == place and place.is_dir()):
        for file in (place, place / OWN, place / PARAMS, place / "config.json"):
            if not file.is_file() or file.suffix != ".json":
                continue
            tree = read_json(file)
            if file.name == OWN or "schema" in tree:
                return parse_sidecar(tree, file)
            if "model_type" in tree:
                return SidecarShape(from_hf_config(tree, file))
            return SidecarShape(from_params(tree, stored, prefix, file)[0])
    from foundling.config.load import load_config

    model = load_config(named).model
    name = {"meta": "tok_embeddings", "hf": "model.embed_tokens", "ours": "embed"}.get(layout, "")
    spec = stored.specs.get(f"{prefix}{name}.weight")
    # A preset may leave the vocabulary to the tokenizer; the embedding shows it.
    return SidecarShape(model.replace(vocab_size=spec.shape[0]) if spec else model)
