"""ModelSource: what a model in any layout offers to a conversion, and what every writer is
given."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from foundling.checkpoint.dcp_index import TensorSpec
from foundling.checkpoint.name_map import UNUSED, Layout, TensorPlace, places, put, take
from foundling.checkpoint.remote import Folder
from foundling.config.errors import CheckpointError, ConfigError
from foundling.config.model import ModelConfig
from foundling.plan.params import parameter_shapes
from foundling.tokenizer.chat_template import ForeignTokenizer
from foundling.tokenizer.tokenizer import Tokenizer

# A model wherever it lies: its shape, its tensors one by one in our layout, and its config.
#
# `StoredTensors` is a container of names and bytes (safetensors, a torch.save file, a DCP folder);
# `ModelSource` gives it our names. Nothing here holds more than one tensor at a time.

Kind = Literal["native", "hf", "llama", "dcp", "torch"]
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
LONGEST_CONTEXT = 8192
"""Rows of a foreign model for evaluation: its stated limit may be far more than a machine holds."""


class StoredTensors(Protocol):
    """Tensors by their stored names."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype of each."""

    def read(self, name: str) -> Tensor:
        """One of them, on the CPU."""


@dataclass
class ModelSource:
    """A model that can be read tensor by tensor."""

    kind: Kind
    path: Path
    model: ModelConfig
    stored: StoredTensors
    places: dict[str, TensorPlace]
    """Where each of our parameters is, in the order of the model."""
    tokenizer_folder: Path | None = None
    checkpoint: Folder | None = None
    """The checkpoint of ours that it is."""
    step: int = 0
    trained_len: int = 0
    """Tokens of a row in the run that it comes from; 0 for a model from elsewhere."""
    is_chat: bool = False
    """Whether that run trained on conversations."""
    positions: int = 0
    """Longest context that its config states; 0: it states none."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Settings of generation that its config states."""
    meta: dict[str, Any] = field(default_factory=dict)
    """The JSON of a checkpoint of ours."""
    notes: list[str] = field(default_factory=list)
    """What its owner should know about the reading."""

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Our shape and the stored dtype of each of our parameters."""
        shapes = parameter_shapes(self.model)
        return {
            name: TensorSpec(shapes[name], self.stored.specs[place.name].dtype)
            for name, place in self.places.items()
        }

    @property
    def context(self) -> int:
        """Tokens of a row to evaluate it on."""
        if self.trained_len:
            return self.trained_len
        stated = self.positions or self.model.max_positions or 2048
        return min(stated, LONGEST_CONTEXT)

    @property
    def longest(self) -> int:
        """Longest context that is known of it; 0: none."""
        return self.positions or self.model.max_positions or self.trained_len

    def read(self, name: str) -> Tensor:
        """One of our parameters, in the stored dtype."""
        place = self.places[name]
        return take(self.stored.read(place.name), place)

    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer, with its own way of writing chats; None if its folder has none."""
        if self.tokenizer_folder is None:
            return None
        return open_tokenizer(self.tokenizer_folder, self.generation)


def check_finite(path: Path | str, name: str, tensor: Tensor) -> None:
    """Refuse weights with a NaN or an infinity: whatever such a model says is nothing."""
    if not tensor.numel():
        return
    # The extremes of a tensor with a NaN are NaN, and no mask of its size is made.
    extremes = (tensor if tensor.element_size() > 1 else tensor.float()).aminmax()
    if not all(bool(one.isfinite()) for one in extremes):
        raise CheckpointError(
            f"{path} cannot be used: its tensor {name} holds NaN or infinity; take another"
            " checkpoint of it."
        )


def open_tokenizer(folder: Path, generation: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a folder; `generation` may name more tokens that end a reply."""
    ends = generation.get("eos_token_id")
    stops = ends if isinstance(ends, list) else [ends]
    return ForeignTokenizer.open(folder, [stop for stop in stops if isinstance(stop, int)])


def find_places(
    where: Folder, model: ModelConfig, stored: StoredTensors, layout: Layout, prefix: str = ""
) -> dict[str, TensorPlace]:
    """The place of every parameter, after each was seen to be there with its shape, and nothing
    else beside them."""
    shapes = parameter_shapes(model)
    found = places(model, shapes, layout)
    is_short = layout == "gpt2" and f"{prefix}transformer.wte.weight" not in stored.specs
    for name, place in found.items():
        stem = place.name.removeprefix("transformer.") if is_short else place.name
        found[name] = TensorPlace(**{**vars(place), "name": prefix + stem})
    for name, place in found.items():
        if place.name not in stored.specs:
            raise CheckpointError(f"{where} lacks {place.name}, which its config asks for.")
        have, want = stored.specs[place.name].shape, place.stored_shape(shapes[name])
        if tuple(have) != want:
            raise CheckpointError(
                f"{where} does not fit its config: {place.name} is {list(have)} and should be"
                f" {list(want)}."
            )
        if not stored.specs[place.name].dtype.is_floating_point:
            raise CheckpointError(
                f"{where} stores {place.name} as {stored.specs[place.name].dtype}, which is no"
                " weight: quantized models are not read here."
            )
    known = {place.name for place in found.values()}
    if model.tie_embeddings:
        heads = {prefix + name for name in ("lm_head.weight", "output.weight", "head.weight")}
        known |= heads
        for name in heads & stored.specs.keys():
            if not torch.equal(stored.read(name), stored.read(found["embed.weight"].name)):
                raise CheckpointError(
                    f"{where} ties its embeddings by its config and holds a {name} that is not the"
                    " embedding; one of the two is wrong."
                )
    for name in stored.specs:
        is_used = name.startswith(prefix) and not UNUSED.fullmatch(name.removeprefix(prefix))
        if is_used and name not in known:
            raise CheckpointError(
                f"{where} holds {name}, which has no place in the model of its config; it is"
                " another kind of model than the ones that can be read."
            )
    return found


def tokenizer_folder(*folders: Path) -> Path | None:
    """The first folder that has a tokenizer in it."""
    for folder in folders:
        has_pair = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
        if has_pair or any(
            (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")
        ):
            return folder
    return None


# foundling.json: the sidecar, with what another layout's own config does not say.

OWN = "foundling.json"
SCHEMA = 1


@dataclass(frozen=True)
class SidecarShape:
    """A model's config and what else the sidecar says."""

    model: ModelConfig
    positions: int = 0
    generation: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def sidecar_json(shape: SidecarShape) -> dict[str, Any]:
    """What foundling.json says."""
    return {
        "schema": SCHEMA,
        "model": shape.model.model_dump(),
        "positions": shape.positions,
        "generation": shape.generation,
    }


def parse_sidecar(tree: Any, where: Path) -> SidecarShape:
    """A shape of what foundling.json says; anything unknown is refused."""
    if not isinstance(tree, dict) or tree.get("schema") != SCHEMA:
        raise CheckpointError(f"{where} is a sidecar of another version of foundling.")
    stated = tree.get("model")
    if not isinstance(stated, dict) or not stated.keys() <= ModelConfig.model_fields.keys():
        raise CheckpointError(f"{where} is a sidecar with fields that this version does not know.")
    try:
        model = ModelConfig(**stated)
    except (TypeError, ConfigError) as error:
        raise CheckpointError(f"{where} is a sidecar that cannot be used: {error}") from None
    positions, generation = tree.get("positions", 0), tree.get("generation") or {}
    if not isinstance(positions, int) or not isinstance(generation, dict):
        raise CheckpointError(f"{where} is a sidecar that cannot be used.")
    return SidecarShape(model, positions, generation)


def sidecar_of(source: ModelSource) -> dict[str, Any]:
    """The sidecar that goes with a source's result: also how long its rows were."""
    return sidecar_json(SidecarShape(source.model, source.longest, source.generation))


# What every writer is given, and what they share.

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9
"""Hugging Face's usual size of a shard."""


@dataclass(frozen=True)
class ConvertPlan:
    """A conversion: from where, in which precision, in shards of what size."""

    source: ModelSource
    dtype: torch.dtype | None = None
    shard_bytes: int = SHARD_BYTES
    name: str = ""
    """What the result is called."""

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Each of our parameters as it is to be written."""
        return {
            name: TensorSpec(spec.shape, self.dtype or spec.dtype)
            for name, spec in self.source.specs.items()
        }

    def read(self, name: str) -> Tensor:
        """One of our parameters in the precision asked for."""
        tensor = self.source.read(name)
        return tensor if self.dtype is None else tensor.to(self.dtype)


class LayoutResult:
    """Our tensors in another layout, made when they are asked for."""

    def __init__(self, plan: ConvertPlan, layout: Layout) -> None:
        self._plan = plan
        self._parts: dict[str, list[tuple[str, TensorPlace]]] = {}
        for name, place in places(plan.source.model, plan.specs, layout).items():
            self._parts.setdefault(place.name, []).append((name, place))
        for parts in self._parts.values():
            parts.sort(key=lambda item: item[1].part)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype there."""
        ours = self._plan.specs
        return {
            theirs: TensorSpec(
                parts[0][1].stored_shape(ours[parts[0][0]].shape), ours[parts[0][0]].dtype
            )
            for theirs, parts in self._parts.items()
        }

    def read(self, name: str) -> Tensor:
        """One tensor of that layout."""
        parts = self._parts[name]
        return put([self._plan.read(ours) for ours, _ in parts], parts[0][1])


def copy_tokenizer(source: ModelSource, folder: Path) -> None:
    """The tokenizer's files as they are."""
    if source.tokenizer_folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source.tokenizer_folder / name).is_file():
            shutil.copyfile(source.tokenizer_folder / name, folder / name)
