"""How tensors are divided among files, and what Hugging Face calls such files."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def grouped(sized: Iterable[tuple[T, int]], limit: int) -> list[list[T]]:
    """Things in their order, by their sizes, as many in a group as fit; a larger one is alone."""
    groups: list[list[T]] = [[]]
    room = limit
    for thing, size in sized:
        if groups[-1] and size > room:
            groups.append([])
            room = limit
        groups[-1].append(thing)
        room -= size
    return groups


def shard_names(count: int) -> list[str]:
    """Of so many safetensors files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
