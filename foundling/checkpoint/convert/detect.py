"""What a path is, and the source that reads it; the owner is not asked.

run.json, RUN@STEP, RUN/checkpoints/step-N   native
config.json with weights                     Hugging Face
params.json with consolidated.*.pth          Meta
.metadata, or model/.metadata                DCP
a file                                       torch.save, or one .safetensors of a folder
"""

from pathlib import Path

from foundling.checkpoint import folders
from foundling.checkpoint.convert.dcp import DcpTensors, dcp_folder, open_native
from foundling.checkpoint.convert.hf import CONFIG, open_hf
from foundling.checkpoint.convert.meta import PARAMS, open_meta
from foundling.checkpoint.convert.model_source import (
    Kind,
    ModelSource,
)
from foundling.checkpoint.convert.torch_model import open_tensors, open_torch
from foundling.config.errors import CheckpointError, RunError
from foundling.runtime.files import contents_at
from foundling.runtime.run_dir import split_step


def kind_of(path: str | Path) -> Kind:
    """Which kind of model a path is; what is none counts as native, whose errors say more."""
    place = Path(path)
    if split_step(path) is not None:
        return "native"
    if place.is_file() and place.suffix == ".safetensors":
        return "hf"
    if place.is_file():
        return "torch" if _is_torch(place) else "native"
    if (place / "run.json").is_file():
        return "native"
    home = place.resolve().parent
    is_step = folders.step_of(place) is not None and home.name == "checkpoints"
    if is_step and (home.parent / "run.json").is_file():
        return "native"
    if (place / CONFIG).is_file() and _has_weights(place):
        return "hf"
    if (place / PARAMS).is_file() and any(place.glob("consolidated.*.pth")):
        return "llama"
    if dcp_folder(place) is not None:
        return "dcp"
    return "native"


def open_source(path: str | Path, shape: str | None = None) -> ModelSource:
    """The model at a path; `shape` (a preset, a config file or another model) says what DCP folders
    and bare torch.save files do not."""
    place = Path(path)
    kind = kind_of(path)
    if kind == "native":
        if place.is_dir() and (place / CONFIG).is_file():
            raise CheckpointError(f"{place} has a {CONFIG} and no weights beside it.")
        if place.is_file():
            raise CheckpointError(
                f"{place} is {contents_at(place) or 'empty'} by its first bytes and no file with a"
                " model in it (torch.save or .safetensors); give the folder that it lies in."
            )
        if not place.exists() and "@" not in str(path):
            raise RunError(
                f"{path} does not exist; give a run, RUN@STEP, or a folder or file with a model."
            )
        return open_native(path)
    if kind == "hf":
        return open_hf_file(place) if place.is_file() else open_hf(place)
    if kind == "llama":
        return open_meta(place)
    if kind == "torch":
        return open_torch(place, shape)
    return open_dcp(place, shape)


def open_hf_file(file: Path) -> ModelSource:
    """The model that a .safetensors file is, or is a part of; never another one of its folder."""
    if not (file.parent / CONFIG).is_file():
        raise CheckpointError(f"{file} has no {CONFIG} beside it, which says what model it is.")
    source = open_hf(file.parent)
    used = getattr(source.stored, "files", ())
    if file.resolve() not in {one.resolve() for one in used}:
        raise CheckpointError(
            f"{file} is not of the model in its folder ({', '.join(one.name for one in used)}); put"
            f" it into a folder of its own with the {CONFIG}."
        )
    return source


def open_dcp(path: Path, shape: str | None = None) -> ModelSource:
    """The model of a DCP folder."""
    folder = dcp_folder(path)
    assert folder is not None
    return open_tensors("dcp", path, DcpTensors(folder), shape, (folder, path, path.parent))


def _is_torch(file: Path) -> bool:
    """By how it begins: a zip archive, or the pickle that torch wrote before 1.6."""
    with open(file, "rb") as stream:
        return stream.read(4).startswith((b"PK\x03\x04", b"\x80\x02"))


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
