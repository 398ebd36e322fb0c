"""What float8 changes in a step: the products' rate, the casts around them, and what is kept.

Every operand is scaled anew where it is used (torchao): its largest number is looked for, it is
cast, and for a weight's gradient it is laid out the other way. A compiled block then makes the
inputs of its products again from what is kept anyway, because a cast is cheap to repeat. Weights
and stream stay as they are. The gains stand in coefficients.py.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from foundling.config.errors import ConfigError
from foundling.config.sections import ModelConfig
from foundling.config.speed_checks import FLOAT8_SIDE
from foundling.plan.coefficients import COEFFICIENTS as K
from foundling.plan.hardware import TABLE, Gpu
from foundling.plan.params import parameter_shapes
from foundling.plan.work import Work, is_product

FOUND_BYTES, CAST_BYTES, TURNED_BYTES = 2, 3, 2
"""Of one number in bf16: read for the largest, read and written to cast, laid out anew."""


def check_float8(work: Work, gpu: Gpu) -> None:
    """Refuse a GPU that has no such products, as a run on it would be; of one that is not in the
    table, the run itself knows more."""
    if work.float8 != "none" and gpu.name in TABLE and "fp8" not in gpu.peaks:
        raise ConfigError(
            f"train.float8 {work.float8} needs a GPU with float8 products, and {gpu.name} has none;"
            f" set it to none, or leave {gpu.name} out."
        )


def is_skipped(name: str, skip: Iterable[str]) -> bool:
    """Whether a product (layers.1.attn.q) is left out by some part of its name."""
    return any(part in name for part in skip)


def check_skip(model: ModelConfig, skip: tuple[str, ...]) -> None:
    """Refuse what is in no product's name, where a slip would leave nothing out, and a number that
    others begin with. Asked where something begins: a run that began with it goes on with it."""
    names = [name for name, _ in _chosen(model, ())] if skip else []
    for part in skip:
        found = [name for name in names if part in name]
        if not found:
            raise ConfigError(
                f"train.float8_skip {part} has no effect: no product that float8 could take has it"
                f" in its name; name parts such as attn, ffn.down or layers.{model.layers - 1}."
            )
        longer = [name for name in found if re.search(rf"{re.escape(part)}\d", name)]
        if part[-1:].isdigit() and longer:
            raise ConfigError(
                f"train.float8_skip {part} leaves out {longer[0]} too; write {part}. with the dot."
            )


def narrowed(work: Work) -> dict[tuple[int, int], int]:
    """How many of the blocks' matrices [out, in] of each shape are multiplied in float8."""
    if work.float8 == "none":
        return {}
    found: dict[tuple[int, int], int] = {}
    for _, shape in _chosen(work.model, work.float8_skip):
        found[shape] = found.get(shape, 0) + 1
    return found


def gain(work: Work) -> float:
    """How many times as fast such a product is as in bf16."""
    return {"tensorwise": K.tensorwise_gain, "rowwise": K.rowwise_gain}.get(work.float8, 1.0)


def share(work: Work, name: str) -> float:
    """Of the layers, those whose product of this name (attn.q, ffn.down) is in float8."""
    if work.float8 == "none":
        return 0.0
    chosen = _chosen(work.model, work.float8_skip)
    return sum(found.endswith(f".{name}") for found, _ in chosen) / work.model.layers


def narrow_params(work: Work) -> int:
    """Numbers in matrices that are multiplied in float8."""
    return sum(out * width * count for (out, width), count in narrowed(work).items())


def cast_traffic(work: Work) -> tuple[float, float]:
    """Bytes a position that casts move in one block, forward and backward."""
    if work.float8 == "none":
        return 0.0, 0.0
    model = work.model
    # q, k and v have one input, and so have gate and up: it is cast once.
    inputs = share(work, "attn.q") * model.dim + share(work, "ffn.up") * model.dim
    inputs += share(work, "attn.o") * model.heads * model.head_width
    inputs += share(work, "ffn.down") * model.ffn_dim
    outputs = sum(out * count for (out, _), count in narrowed(work).items()) / model.layers
    forward = (FOUND_BYTES + CAST_BYTES) * inputs
    backward = (FOUND_BYTES + CAST_BYTES + TURNED_BYTES) * outputs + CAST_BYTES * inputs
    return forward, backward


@lru_cache(maxsize=64)
def _chosen(model: ModelConfig, skip: tuple[str, ...]) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Names and shapes of the products that torchao takes over (foundling/parallel/float8.py)."""
    found = []
    for full, shape in parameter_shapes(model).items():
        name = full.removesuffix(".weight")
        is_one = full.startswith("layers.") and is_product(full, shape, model)
        if not is_one or any(side % FLOAT8_SIDE for side in shape) or is_skipped(name, skip):
            continue
        found.append((name, (shape[0], shape[1])))
    return tuple(found)
