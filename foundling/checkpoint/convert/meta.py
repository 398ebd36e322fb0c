"""Meta's folders: params.json and consolidated.NN.pth, the shards of model parallelism merged.

Their rotary pairs lie side by side where ours lie half a head apart (checkpoint/name_map.py turns
the rows), the
feed-forward's width follows from a formula, and 3.1's scaling of positions is a switch. 3.2 has the
same switch and another factor, which its params.json does not name; its models are the tied ones.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundling.checkpoint.convert.dcp import compact
from foundling.checkpoint.convert.hf_config import family_of, read_json, same_shape, write_json
from foundling.checkpoint.convert.model_source import (
    OWN,
    ConvertPlan,
    LayoutResult,
    ModelSource,
    SidecarShape,
    StoredTensors,
    copy_tokenizer,
    find_places,
    parse_sidecar,
    sidecar_of,
    tokenizer_folder,
)
from foundling.checkpoint.convert.tensor_files import Tensors, flat, load_torch, save_torch
from foundling.checkpoint.dcp_index import TensorSpec
from foundling.checkpoint.name_map import UNUSED
from foundling.config.errors import CheckpointError, ConfigError
from foundling.config.model import ModelConfig, RopeScaling

PARAMS = "params.json"
BY_COLUMN = re.compile(r"layers\.\d+\.(attention\.wo|feed_forward\.w2)\.weight")
BY_ROW = re.compile(r"layers\.\d+\.(attention\.w[qkv]|feed_forward\.w[13])\.weight|output\.weight")
EMBEDDING = "tok_embeddings.weight"
FACTOR, FACTOR_TIED = 8.0, 32.0
"""Of 3.1, and of 3.2."""


class MetaShards:
    """The tensors of all shards, merged when they are asked for."""

    def __init__(self, files: Sequence[Path], dim: int) -> None:
        self._shards = [Tensors(dict(flat(load_torch(file))), file) for file in files]
        self._dim = dim
        names = {name: None for shard in self._shards for name in shard.specs}
        for file, shard in zip(files, self._shards, strict=True):
            for name in names:
                if name not in shard.specs:
                    raise CheckpointError(f"{file} lacks {name}, which another shard has.")
        self.specs = {name: self._spec(name) for name in names if not UNUSED.fullmatch(name)}

    def read(self, name: str) -> Tensor:
        """One merged tensor."""
        parts = [shard.read(name) for shard in self._shards]
        axis = self._axis(name)
        if axis is None or len(parts) == 1:
            return parts[0]
        return torch.cat(parts, axis)

    def _spec(self, name: str) -> TensorSpec:
        shapes = [shard.specs[name].shape for shard in self._shards]
        axis = self._axis(name)
        if axis is None:
            return self._shards[0].specs[name]
        whole = list(shapes[0])
        whole[axis] = sum(shape[axis] for shape in shapes)
        return TensorSpec(tuple(whole), self._shards[0].specs[name].dtype)

    def _axis(self, name: str) -> int | None:
        """Along which axis a tensor is cut; None: each shard has all of it."""
        if BY_COLUMN.fullmatch(name):
            return 1
        if BY_ROW.fullmatch(name):
            return 0
        if name == EMBEDDING:  # Llama 2 cut the width, Llama 3 the vocabulary
            return 1 if self._shards[0].specs[name].shape[1] != self._dim else 0
        return None


def open_meta(folder: Path) -> ModelSource:
    """The model of a Meta folder."""
    params = read_json(folder / PARAMS)
    files = sorted(folder.glob("consolidated.*.pth"))
    numbers = [file.name for file in files]
    if numbers != [f"consolidated.{n:02d}.pth" for n in range(len(files))]:
        raise CheckpointError(f"{folder} lacks a shard: it has {', '.join(numbers)}.")
    dim = params.get("dim")
    stored = MetaShards(files, dim if isinstance(dim, int) else 0)  # 0 is refused just below
    model, notes = from_params(params, stored, "", folder)
    sidecar = SidecarShape(model)
    if (folder / OWN).is_file():
        found = parse_sidecar(read_json(folder / OWN), folder / OWN)
        # Meta's own file decides the function; ours may only add to it.
        sidecar = sidecar if same_shape(model, found.model) else found
    return ModelSource(
        kind="llama",
        path=folder,
        model=sidecar.model,
        stored=stored,
        places=find_places(folder, model, stored, "meta"),
        tokenizer_folder=tokenizer_folder(folder),
        positions=sidecar.positions,
        generation=sidecar.generation,
        notes=notes,
    )


def from_params(
    params: Mapping[str, Any], stored: StoredTensors, prefix: str, where: Path
) -> tuple[ModelConfig, list[str]]:
    """Our fields of a params.json; the vocabulary, the feed-forward's width and whether the head is
    the embedding are read off the tensors."""
    notes: list[str] = []
    for name in ("dim", "n_layers", "n_heads"):
        if not isinstance(params.get(name), int):
            raise CheckpointError(f"{where} has a {PARAMS} without {name}.")
    for name in ("moe_args", "moe", "vision_chunk_size"):
        if params.get(name):
            raise CheckpointError(f"{where} has {name} in its {PARAMS}, which is not read here.")
    for name in (EMBEDDING, "layers.0.feed_forward.w1.weight"):
        if prefix + name not in stored.specs:
            raise CheckpointError(f"{where} lacks {name}.")
    heads = params["n_heads"]
    tied = _is_tied(stored, prefix)
    kv = params.get("n_kv_heads") or heads
    try:
        model = ModelConfig(
            vocab_size=stored.specs[prefix + EMBEDDING].shape[0],
            dim=params["dim"],
            layers=params["n_layers"],
            heads=heads,
            kv_heads=0 if kv == heads else kv,
            ffn_dim=stored.specs[prefix + "layers.0.feed_forward.w1.weight"].shape[0],
            norm_eps=float(params.get("norm_eps", 1e-5)),
            rope_theta=float(params.get("rope_theta", 10000.0)),
            tie_embeddings=tied,
            **_scaling(params, tied, notes),
        )
    except (ConfigError, ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{where} has a {PARAMS} that cannot be used: {error}") from None
    return model, notes


def _scaling(params: Mapping[str, Any], tied: bool, notes: list[str]) -> dict[str, Any]:
    """Our fields of scaled positions."""
    if not params.get("use_scaled_rope"):
        return {}
    factor = params.get("rope_scaling_factor")
    if factor is None:
        factor = FACTOR_TIED if tied else FACTOR
        notes.append(
            f"{PARAMS} scales positions and names no factor; {factor:g} was taken, as Llama"
            f" {'3.2' if tied else '3.1'} has it."
        )
    high = float(params.get("rope_high_freq_factor") or 4.0)
    low, original = params.get("rope_low_freq_factor"), params.get("rope_original")
    scaling: dict[str, Any] = {"factor": float(factor), "high": high}
    scaling |= {"low": float(low)} if low else {}
    scaling |= {"original": int(original)} if original else {}
    return {"rope_scaling": RopeScaling(**scaling)}


def _is_tied(stored: StoredTensors, prefix: str) -> bool:
    """Meta always stores both; a tied model has the same numbers in both."""
    one, other = prefix + EMBEDDING, prefix + "output.weight"
    if other not in stored.specs:
        return True
    if stored.specs[one].shape != stored.specs[other].shape:
        return False
    return torch.equal(stored.read(one), stored.read(other))


def to_params(model: ModelConfig) -> dict[str, Any]:
    """The params.json of a model that Meta's code can express."""
    if (
        family_of(model) != "llama"
        or model.bias != "none"
        or model.head_width * model.heads != (model.dim)
    ):
        raise CheckpointError(
            "Meta's format holds Llama models only (no biases, norms of queries, windows or heads"
            f" of another width), and this one is a {family_of(model)} with"
            f" {model.heads} heads of {model.head_width} in {model.dim}; use --to hf."
        )
    multiplier, multiple = ffn_formula(model.dim, model.ffn_dim)
    params: dict[str, Any] = {
        "dim": model.dim,
        "n_layers": model.layers,
        "n_heads": model.heads,
        "n_kv_heads": model.num_kv_heads,
        "vocab_size": model.vocab_size,
        "multiple_of": multiple,
        "ffn_dim_multiplier": multiplier,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "use_scaled_rope": model.rope_scaling.factor != 1,
    }
    if (rope := model.rope_scaling).factor != 1:
        params |= {
            "rope_scaling_factor": rope.factor,
            "rope_high_freq_factor": rope.high,
            "rope_low_freq_factor": rope.low,
            "rope_original": rope.original,
        }
    return params


def ffn_formula(dim: int, width: int) -> tuple[float | None, int]:
    """(ffn_dim_multiplier, multiple_of) from which Meta's code computes this width."""
    base = int(8 * dim / 3)
    for multiple in (4096, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
        if width % multiple:
            continue
        for multiplier in (
            None,
            *(n / 10 for n in range(1, 41)),
            width / base,
            (width + 0.5) / base,
        ):
            found = base if multiplier is None else int(multiplier * base)
            if math.ceil(found / multiple) * multiple == width:
                return multiplier, multiple
    raise CheckpointError(f"no ffn_dim_multiplier gives a feed-forward width of {width}.")


def write_meta(folder: Path, plan: ConvertPlan) -> None:
    """params.json and one consolidated file; torch.save needs all tensors at once."""
    source = plan.source
    params = to_params(source.model)
    laid = LayoutResult(plan, "meta")
    tensors = {name: compact(laid.read(name)) for name in laid.specs}
    if source.model.tie_embeddings:
        tensors["output.weight"] = tensors[EMBEDDING]
    save_torch(folder / "consolidated.00.pth", tensors)
    write_json(folder / PARAMS, params)
    write_json(folder / OWN, sidecar_of(source))
    copy_tokenizer(source, folder)
