"""Folders of torch.distributed.checkpoint, anybody's: read with care, written tensor by tensor.

    {model: ...}                     torchtitan's; newer ones have the names without `model.`
    {app: {model: ..., optim: ...}}  a Stateful
    model/ and optim/                two folders

Which of them it is shows in the names. `.metadata` is read through the allow-list of
checkpoint/dcp_index.py and byte entries are never opened. DCP holds no config, so it has to lie
beside:
foundling.json, Meta's params.json or Hugging Face's config.json, there or one folder up; or the
owner names one.
"""

import contextlib
import json
import math
import re
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundling.checkpoint import folders
from foundling.checkpoint.convert.model_source import (
    ConvertPlan,
    ModelSource,
    copy_tokenizer,
    find_places,
    grouped,
    tokenizer_folder,
)
from foundling.checkpoint.convert.tensor_files import read_part
from foundling.checkpoint.dcp_index import (
    INDEX,
    Chunk,
    Index,
    IndexEntry,
    Sizes,
    Spot,
    TensorSpec,
    pickled,
    read_index,
    specs_of,
)
from foundling.checkpoint.manifest import (
    META,
    CheckpointManifest,
    FileDigest,
    load_meta,
    read_manifest,
    write_durably,
    write_manifest,
)
from foundling.checkpoint.name_map import layout_of
from foundling.checkpoint.paths import MODEL_PREFIX, find_checkpoint
from foundling.checkpoint.streams import FILE_BYTES, Window, hashing, save_tensor
from foundling.config.errors import CheckpointError
from foundling.config.run import RunConfig
from foundling.config.train import TrainConfig
from foundling.runtime.files import write_text_atomic
from foundling.runtime.run_dir import RunDir


class DcpTensors:
    """The tensors of one folder."""

    def __init__(self, folder: Path, *, foreign: bool = True) -> None:
        self._folder = folder
        self._index = read_index(folder, skip_bytes=foreign)
        self._specs = specs_of(self._index)
        self._places: dict[str, tuple[Path, int] | None] = {}

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype of each tensor."""
        return self._specs

    def read(self, name: str) -> Tensor:
        """One tensor."""
        spec = self._specs[name]
        if name not in self._places:
            self._places[name] = plain_place(self._folder, self._index, name)
        place = self._places[name]
        if place is not None:
            return read_part(*place, spec)
        from foundling.checkpoint.reader import read_tensors  # DCP, a second to import

        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        try:
            read_tensors(self._folder, self._index, {name: tensor})
        except Exception as error:
            raise CheckpointError(
                f"{self._folder} could not be read: {' '.join(str(error).split())}."
            ) from error
        return tensor


def dcp_folder(path: Path) -> Path | None:
    """The folder with the model's tensors, if this is a DCP folder of one of the known forms."""
    for folder in (path, path / "model"):
        if (folder / INDEX).is_file():
            return folder
    return None


def has_model(stored: DcpTensors, where: Path) -> None:
    """See that some known layout's names are among them."""
    if layout_of(stored.specs, where) is None:
        few = ", ".join(list(stored.specs)[:3])
        raise CheckpointError(
            f"{where} holds no model by names that are known here (it has {few or 'no tensors'})."
        )


def write_dcp(
    folder: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor]
) -> dict[str, FileDigest]:
    """Tensors into a new folder's files, each asked for when it is its turn; the digests of the
    files."""
    entries: dict[str, IndexEntry] = {}
    spots: dict[tuple[str, Sizes], Spot] = {}
    digests: dict[str, FileDigest] = {}
    with without_zip_checksums():
        for number, names in enumerate(_files(specs)):
            file = f"__0_{number}.distcp"
            with hashing(folder / file) as stream:
                for name in names:
                    tensor = compact(read(name))
                    size, origin = tuple(tensor.shape), (0,) * tensor.dim()
                    entries[name] = IndexEntry(size, tensor.dtype, (Chunk(origin, size),))
                    spots[name, origin] = Spot(file, *save_tensor(tensor, stream))
                    del tensor
            digests[file] = stream.digest
    digests[INDEX] = write_durably(folder / INDEX, pickled(Index(entries, spots)))
    return digests


@contextlib.contextmanager
def without_zip_checksums() -> Iterator[None]:
    """torch's archives carry a CRC that torch itself never looks at; files of ours are checked by
    sha256, and every result is read back."""
    kept = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(kept)


def plain_place(folder: Path, index: Index, name: str) -> tuple[Path, int] | None:
    """The file and the place in it where a tensor lies whole and in order; None if it is cut into
    pieces or lies otherwise, and DCP has to put it together."""
    entry = index.tensors[name]
    info = index.spots.get((name, (0,) * len(entry.size)))
    if len(entry.chunks) != 1 or info is None or not all(entry.size):
        return None
    file = folder / info.file
    with open(file, "rb") as stream:
        window: Any = Window(stream, info.offset, info.length)
        try:
            with zipfile.ZipFile(window) as archive:
                records = [r for r in archive.infolist() if re.fullmatch(r".+/data/0", r.filename)]
            window.seek(0)
            # On the meta device no number is read: only how they lie.
            layout = torch.load(window, map_location="meta", weights_only=True)
        except Exception:  # whatever it is, DCP's own reader says it better
            return None
        size = math.prod(entry.size) * entry.dtype.itemsize
        is_plain = (
            isinstance(layout, Tensor)
            and layout.is_contiguous()
            and layout.storage_offset() == 0
            and tuple(layout.shape) == entry.size
            and layout.dtype == entry.dtype
            and len(records) == 1
            and records[0].compress_type == zipfile.ZIP_STORED
            and records[0].file_size == size
        )
        if not is_plain:
            return None
        window.seek(records[0].header_offset + 26)
        lengths = window.read(4)
    head = 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    start = records[0].header_offset + head
    return (file, info.offset + start) if start + size <= info.length else None


def compact(tensor: Tensor) -> Tensor:
    """The tensor with a storage of its own size: torch.save writes whole storages."""
    size = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == size else tensor.clone()


def _files(specs: Mapping[str, TensorSpec]) -> list[list[str]]:
    """Which tensors go into which file."""
    sized = ((n, spec.dtype.itemsize * math.prod(spec.shape)) for n, spec in specs.items())
    return grouped(sized, FILE_BYTES)


# Our own runs and checkpoints as a source, and a run directory with one checkpoint as a result.
#
# A result has the weights and the config and tokenizer that are needed to use them, and no
# optimizer's moments: it can be evaluated, talked to and started from (`train --start`), and is not
# a run to be continued.

CONVERTED = "converted"
"""The status of a run that was never trained here."""


def open_native(path: str | Path, *, hashed: bool = True) -> ModelSource:
    """The model of RUN, RUN@STEP or RUN/checkpoints/step-N, its files verified; with `hashed` off
    only their names and sizes."""
    from foundling.config.load import load_run_config

    run, checkpoint = find_checkpoint(path, hashed=hashed)
    if not isinstance(checkpoint, Path):
        raise CheckpointError(
            f"{checkpoint} is not on this machine; fetch the checkpoint first and convert that."
        )
    config = load_run_config(run.config_path)
    stored = DcpTensors(checkpoint, foreign=False)
    positions, generation = _origin(run)
    return ModelSource(
        kind="native",
        path=run.path,
        model=config.model,
        stored=stored,
        places=find_places(checkpoint, config.model, stored, "ours", MODEL_PREFIX),
        tokenizer_folder=tokenizer_folder(run.tokenizer),
        step=read_manifest(checkpoint).step,
        trained_len=config.train.seq_len,
        positions=positions,
        generation=generation,
        meta=load_meta(checkpoint),
    )


def _origin(run: RunDir) -> tuple[int, dict[str, Any]]:
    """Longest context and settings of generation of a model that came from elsewhere."""
    origin = run.read_info().get("origin", {})
    if isinstance(origin, dict):
        positions, generation = origin.get("positions", 0), origin.get("generation", {})
        if isinstance(positions, int) and isinstance(generation, dict):
            return positions, generation
    raise CheckpointError(
        f"{run.path} has a damaged run.json: its origin is not as it was written."
    )


def reread_native(folder: Path) -> ModelSource:
    """What was just written; every tensor is about to be compared, so none is hashed again."""
    return open_native(folder, hashed=False)


def write_native(folder: Path, plan: ConvertPlan) -> None:
    """A run directory; run.json last, it makes it a run."""
    from foundling.config.load import dump_yaml, load_run_config

    source, run = plan.source, RunDir(folder)
    step = folders.final_path(run.checkpoints, source.step)
    step.mkdir(parents=True)
    specs = {MODEL_PREFIX + name: spec for name, spec in plan.specs.items()}

    def read(name: str) -> Tensor:
        return plan.read(name.removeprefix(MODEL_PREFIX))

    written = write_dcp(step, specs, read)
    meta = {key: source.meta[key] for key in ("segments",) if key in source.meta}
    content = json.dumps({"step": source.step, **meta}, indent=2) + "\n"
    digests = {**written, META: write_durably(step / META, content.encode())}
    write_manifest(step, CheckpointManifest(source.step, digests))
    copy_tokenizer(source, run.tokenizer)
    is_chat = False
    if source.kind == "native":
        config = load_run_config(RunDir(source.path).config_path)
        is_chat = bool(RunDir(source.path).read_info().get("chat"))
    else:
        config = RunConfig(model=source.model, train=TrainConfig(seq_len=source.context))
    # Wherever the source keeps its checkpoints: the result's lies in the result.
    config = config.replace(checkpoint={"folder": ""})
    write_text_atomic(run.config_path, dump_yaml(config))
    run.write_info(_info(source, is_chat))


def _info(source: ModelSource, is_chat: bool) -> dict[str, Any]:
    is_ours = source.kind == "native"
    origin = {
        "kind": source.kind,
        "path": str(source.path),
        "positions": source.positions,
        "generation": source.generation,
    }
    return {
        "chat": is_chat,
        "status": CONVERTED,
        "parent": {"path": str(source.path), "step": source.step} if is_ours else None,
        "created": time.time(),
        "origin": origin,
        "plan": {},
    }
