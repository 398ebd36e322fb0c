"""The config of tensors that come without one: DCP folders and torch.save files.

What lies beside them is used (foundling.json, params.json, config.json), or what the owner names.
Sizes that tensors show are compared with it when places are looked up; how many heads there are,
and how positions turn, tensors do not show, so it is never guessed.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from foundling.checkpoint.convert.hf_config import from_hf_config, read_json
from foundling.checkpoint.convert.meta_layout import PARAMS, from_params
from foundling.checkpoint.convert.papers import OWN, Shape, from_papers
from foundling.checkpoint.convert.source import Stored
from foundling.checkpoint.names import Layout
from foundling.config import CheckpointError


def find_shape(
    where: Path,
    stored: Stored,
    layout: Layout,
    prefix: str,
    named: str | None,
    beside: Sequence[Path],
) -> Shape:
    """The shape that the owner names, or that lies beside the tensors."""
    if named is not None:
        return _named(named, stored, layout, prefix)
    for folder in beside:
        if (folder / OWN).is_file():
            return from_papers(read_json(folder / OWN), folder / OWN)
        if (folder / PARAMS).is_file():
            model, notes = from_params(read_json(folder / PARAMS), stored, prefix, folder)
            return Shape(model, notes=notes)
        if (folder / "config.json").is_file():
            return Shape(from_hf_config(read_json(folder / "config.json"), folder))
    raise CheckpointError(
        f"{where} says nothing about heads and positions; put its params.json or config.json"
        " beside it, or give --shape with a preset or a config."
    )


def _named(named: str, stored: Stored, layout: Layout, prefix: str) -> Shape:
    """The model of a preset, a YAML file, a run, a params.json or a config.json."""
    place = Path(named)
    folder = place if place.is_dir() else place.parent
    if (place.is_file() and place.suffix == ".json") or (folder == place and place.is_dir()):
        for file in (place, place / OWN, place / PARAMS, place / "config.json"):
            if not file.is_file() or file.suffix != ".json":
                continue
            tree = read_json(file)
            if file.name == OWN or "schema" in tree:
                return from_papers(tree, file)
            if "model_type" in tree:
                return Shape(from_hf_config(tree, file))
            return Shape(from_params(tree, stored, prefix, file)[0])
    from foundling.config.resolve import resolve

    model = resolve(named).model
    name = {"meta": "tok_embeddings", "hf": "model.embed_tokens", "ours": "embed"}.get(layout, "")
    spec = stored.specs.get(f"{prefix}{name}.weight")
    # A preset may leave the vocabulary to the tokenizer; the embedding shows it.
    return Shape(replace(model, vocab_size=spec.shape[0]) if spec else model)
