"""A model wherever it lies: its shape, its tensors one by one in our layout, and its papers.

`Stored` is a container that knows names and bytes (safetensors, a torch.save file, a DCP folder);
`Source` puts our names on it. Nothing here holds more than one tensor at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from foundling.checkpoint.names import UNUSED, Layout, Place, places, take
from foundling.checkpoint.tensor_index import TensorSpec
from foundling.config import CheckpointError, ModelConfig, RunConfig
from foundling.plan.params import parameter_shapes
from foundling.tokenizer import ForeignTokenizer, Tokenizer

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


class Stored(Protocol):
    """Tensors by their stored names."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype of each."""

    def read(self, name: str) -> Tensor:
        """One of them, on the CPU."""


@dataclass
class Source:
    """A model that can be read tensor by tensor."""

    kind: Kind
    path: Path
    model: ModelConfig
    stored: Stored
    places: dict[str, Place]
    """Where each of our parameters is, in the order of the model."""
    tokenizer_folder: Path | None = None
    step: int = 0
    run: RunConfig | None = None
    """The config of the run that it comes from; None for a model from elsewhere."""
    positions: int = 0
    """Longest context that its papers state; 0: they state none."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Settings of generation that its papers state."""
    meta: dict[str, Any] = field(default_factory=dict)
    """The JSON of a checkpoint of ours."""
    notes: list[str] = field(default_factory=list)
    """What its owner should know about the reading."""

    def __post_init__(self) -> None:
        self._last: tuple[str, Tensor] | None = None

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
        if self.run is not None:
            return self.run.train.seq_len
        stated = self.positions or self.model.max_positions or 2048
        return min(stated, LONGEST_CONTEXT)

    @property
    def longest(self) -> int:
        """Longest context that is known of it; 0: none."""
        trained = self.run.train.seq_len if self.run else 0
        return self.positions or self.model.max_positions or trained

    def read(self, name: str) -> Tensor:
        """One of our parameters, in the stored dtype."""
        place = self.places[name]
        if place.parts == 1:
            return take(self.stored.read(place.name), place)
        # q, k and v are asked for one after the other and lie in one tensor.
        if self._last is None or self._last[0] != place.name:
            self._last = None
            self._last = (place.name, self.stored.read(place.name))
        found = take(self._last[1], place)
        if place.part == place.parts - 1:
            self._last = None
        return found

    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer, with its own way of writing chats; None if none lies beside it."""
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
    where: Path, model: ModelConfig, stored: Stored, layout: Layout, prefix: str = ""
) -> dict[str, Place]:
    """The place of every parameter, after each was seen to be there with its shape, and nothing
    else beside them."""
    shapes = parameter_shapes(model)
    found = places(model, shapes, layout)
    is_short = layout == "gpt2" and f"{prefix}transformer.wte.weight" not in stored.specs
    for name, place in found.items():
        stem = place.name.removeprefix("transformer.") if is_short else place.name
        found[name] = Place(**{**vars(place), "name": prefix + stem})
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
