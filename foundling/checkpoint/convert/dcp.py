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
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.serialization import config as serialization

from foundling.checkpoint import folders
from foundling.checkpoint.convert.model_source import (
    ConvertPlan,
    ModelSource,
    copy_tokenizer,
    find_places,
    tokenizer_folder,
)
from foundling.checkpoint.dcp_index import INDEX, TensorSpec, read_index, specs_of
from foundling.checkpoint.manifest import (
    META,
    CheckpointManifest,
    FileDigest,
    check_sizes,
    load_meta,
    read_manifest,
    write_durably,
    write_manifest,
)
from foundling.checkpoint.paths import MODEL_PREFIX, find_checkpoint
from foundling.checkpoint.remote import Folder
from foundling.config.errors import CheckpointError
from foundling.config.run import RunConfig
from foundling.config.train import TrainConfig
from foundling.runtime.files import write_text_atomic
from foundling.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem


class DcpTensors:
    """The tensors of one folder."""

    def __init__(self, folder: Folder, *, foreign: bool = True) -> None:
        self._folder = folder
        self._index = read_index(folder, skip_bytes=foreign)
        self.specs = specs_of(self._index)

    def read(self, name: str) -> Tensor:
        """One tensor."""
        from foundling.checkpoint.reader import plain_archive, read_tensors  # DCP is slow to import

        spec, chunks = self.specs[name], self._index.tensors[name].chunks
        with self._told():
            if len(chunks) == 1:  # whole in one place: DCP would hold it twice
                spot = self._index.spots[name, chunks[0].offsets]
                with (self._folder / spot.file).open("rb") as file:
                    archive = plain_archive(file, spot)
                    found = torch.load(archive, map_location="cpu", weights_only=True)
                is_plain = isinstance(found, Tensor) and found.layout == torch.strided
                if is_plain and TensorSpec(tuple(found.shape), found.dtype) == spec:
                    plain: Tensor = found.detach()
                    return plain
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
            read_tensors(self._folder, self._index, {name: tensor})
            return tensor

    def fill(self, into: Mapping[str, Tensor]) -> None:
        """Tensors in place; those in pieces together, which opens each file once and not once for
        each tensor."""
        from foundling.checkpoint.reader import read_tensors

        split = {n: t for n, t in into.items() if len(self._index.tensors[n].chunks) > 1}
        if split:
            with self._told():
                read_tensors(self._folder, self._index, split)
        for name in into.keys() - split.keys():
            into[name].copy_(self.read(name))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"{self._folder} could not be read: {' '.join(str(error).split())}."
            ) from error


def dcp_folder(path: Path) -> Path | None:
    """The folder with the model's tensors, if this is a DCP folder of one of the known forms."""
    for folder in (path, path / "model"):
        if (folder / INDEX).is_file():
            return folder
    return None


def write_dcp(
    folder: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor]
) -> dict[str, FileDigest]:
    """Tensors into a new folder's files, each asked for when it is its turn; the digests of the
    files."""
    from foundling.checkpoint import writer  # DCP, a second to import

    planner = writer.Planner()
    empty = {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in specs.items()}
    planner.agree(planner.look(empty), None)
    share = planner.agreed
    assert share.index is not None

    def piece(item: "WriteItem") -> Tensor:
        return compact(read(item.index.fqn))

    # torch never looks at its archives' own checksums, and they take longer than sha256.
    with serialization.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
        written = [writer.write_tensors(folder, *file, piece) for file in share.files.items()]
    return writer.write_index(folder, share.index, written)


def compact(tensor: Tensor) -> Tensor:
    """The tensor with a storage of its own size: torch.save writes whole storages."""
    size = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == size else tensor.clone()


# Our own runs and checkpoints as a source, and a run directory with one checkpoint as a result.
#
# A result has the weights and the config and tokenizer that are needed to use them, and no
# optimizer's moments: it can be evaluated, talked to and started from (`train --start`), and is not
# a run to be continued.

CONVERTED = "converted"
"""The status of a run that was never trained here."""


def open_native(path: str | Path, *, together: bool = False) -> ModelSource:
    """The model of RUN, RUN@STEP or RUN/checkpoints/step-N, its files verified; `together` is for
    the ranks of a job, which all call it."""
    return _source(*find_checkpoint(path, together=together))


def reread_native(folder: Path) -> ModelSource:
    """What was just written; every tensor is about to be compared, so none is hashed again."""
    run = RunDir(folder)
    (checkpoint,) = folders.list_checkpoints(run.checkpoints)
    check_sizes(checkpoint, read_manifest(checkpoint))
    return _source(run, checkpoint)


def _source(run: RunDir, checkpoint: Folder) -> ModelSource:
    from foundling.config.load import load_run_config

    config = load_run_config(run.config_path)
    stored = DcpTensors(checkpoint, foreign=False)
    positions, generation = _origin(run)
    return ModelSource(
        kind="native",
        path=run.path,
        checkpoint=checkpoint,
        model=config.model,
        stored=stored,
        places=find_places(checkpoint, config.model, stored, "ours", MODEL_PREFIX),
        tokenizer_folder=tokenizer_folder(run.tokenizer),
        step=read_manifest(checkpoint).step,
        trained_len=config.train.seq_len,
        is_chat=bool(run.read_info().get("chat")),
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
    config = RunConfig(model=source.model, train=TrainConfig(seq_len=source.context))
    if source.kind == "native":
        config = load_run_config(RunDir(source.path).config_path)
    # Wherever the source keeps its checkpoints: the result's lies in the result.
    config = config.replace(checkpoint={"folder": ""})
    write_text_atomic(run.config_path, dump_yaml(config))
    run.write_info(_info(source))


def _info(source: ModelSource) -> dict[str, Any]:
    is_ours = source.kind == "native"
    origin = {
        "kind": source.kind,
        "path": str(source.path),
        "positions": source.positions,
        "generation": source.generation,
    }
    return {
        "chat": source.is_chat,
        "status": CONVERTED,
        "parent": {"path": str(source.path), "step": source.step} if is_ours else None,
        "created": time.time(),
        "origin": origin,
        "plan": {},
    }
