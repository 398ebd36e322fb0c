"""A torch.save file as a source, and as a result: one file with weights, config and tokenizer."""

import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foundling.checkpoint.convert.dcp_layout import compact
from foundling.checkpoint.convert.papers import from_papers, papers_of
from foundling.checkpoint.convert.shapes import find_shape
from foundling.checkpoint.convert.source import (
    TOKENIZER_FILES,
    Source,
    find_places,
    tokenizer_folder,
)
from foundling.checkpoint.convert.torch_file import Tensors, flat, load_torch, save_torch
from foundling.checkpoint.convert.writing import Plan
from foundling.checkpoint.names import layout_of
from foundling.config import CheckpointError

PAPERS = "foundling"
TEXTS = "tokenizer"


def open_torch(file: Path, shape: str | None = None) -> Source:
    """The model of a torch.save file."""
    tree = load_torch(file)
    stored = Tensors(dict(flat(tree)), file)
    found = layout_of(stored.specs, file)
    if found is None:
        few = ", ".join(list(stored.specs)[:3])
        raise CheckpointError(
            f"{file} holds no model by names that are known here (it has {few or 'no tensors'})."
        )
    layout, prefix = found
    papers = tree.get(PAPERS) if isinstance(tree, Mapping) else None
    if papers is not None and shape is None:
        described = from_papers(papers, file)
    else:
        described = find_shape(file, stored, layout, prefix, shape, [file.parent])
    source = Source(
        kind="torch",
        path=file,
        model=described.model,
        stored=stored,
        places=find_places(file, described.model, stored, layout, prefix),
        tokenizer_folder=tokenizer_folder(file.parent, file.parent / "tokenizer"),
        positions=described.positions,
        generation=described.generation,
        notes=described.notes,
    )
    texts = tree.get(TEXTS) if isinstance(tree, Mapping) else None
    if isinstance(texts, Mapping):
        source.tokenizer_folder = _unpacked(texts, source)
    return source


def write_torch(file: Path, plan: Plan) -> None:
    """One file; torch.save needs all tensors at once, so memory holds the file once."""
    source = plan.source
    content: dict[str, Any] = {
        "model": {name: compact(plan.read(name)) for name in plan.specs},
        PAPERS: papers_of(source),
    }
    if source.tokenizer_folder is not None:
        content[TEXTS] = {
            name: (source.tokenizer_folder / name).read_bytes().decode("latin-1")
            for name in TOKENIZER_FILES
            if (source.tokenizer_folder / name).is_file()
        }
    save_torch(file, content)


def _unpacked(texts: Mapping[str, Any], source: Source) -> Path:
    """The tokenizer's files in a folder that goes with the source."""
    holder = tempfile.TemporaryDirectory(prefix="foundling-tokenizer-")
    weakref.finalize(source, holder.cleanup)
    for name in TOKENIZER_FILES:
        if isinstance(texts.get(name), str):
            Path(holder.name, name).write_bytes(texts[name].encode("latin-1"))
    return Path(holder.name)
