"""What every writer is given, and what they share."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foundling.checkpoint.convert.source import TOKENIZER_FILES, Source
from foundling.checkpoint.names import Layout, Place, places, put
from foundling.checkpoint.tensor_index import TensorSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9
"""Hugging Face's usual size of a shard."""


@dataclass(frozen=True)
class Plan:
    """A conversion: from where, in which precision, in shards of what size."""

    source: Source
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


class Laid:
    """Our tensors in another layout, made when they are asked for."""

    def __init__(self, plan: Plan, layout: Layout) -> None:
        self._plan = plan
        self._parts: dict[str, list[tuple[str, Place]]] = {}
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


def copy_tokenizer(source: Source, folder: Path) -> None:
    """The tokenizer's files as they are."""
    if source.tokenizer_folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source.tokenizer_folder / name).is_file():
            shutil.copyfile(source.tokenizer_folder / name, folder / name)
