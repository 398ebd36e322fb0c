"""Memory of serving a model: weights, cache blocks, and how many requests of which length fit.

Keys and values of a token take 2 x layers x kv heads x head width numbers. They are given out in
blocks; layers with the same window form a group with blocks of its own, of which a windowed group
needs no more than its requests can see. foundling/generate/kv_cache.py lays the cache out by these
counts, so what is planned is what is allocated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.plan.params import count_params

Precision = Literal["fp32", "bf16", "int8"]

BLOCK = 16
"""Tokens of a block: the grain in which memory is given out and prefixes are shared."""
LONGEST = 1 << 13
"""Tokens of a request that the cache is laid out for where the model has no last position."""
CONTEXTS = (512, 2048, 8192, 32768)
"""Lengths of requests that a plan counts."""


STEP_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Default of the tokens that go through the model in one step."""
MAX_RUNNING = {"cpu": 64, "cuda": 256}
"""Default of the requests that generate at a time."""
CACHE_OF_FREE = 0.5
"""Default share of the free memory that keys and values may take."""
HELD_OUT_TOKENS = 8192
"""Tokens of held-out text that are scored at once while a model is trained."""
PROMPT_TOKENS = 2048
"""Tokens of prompts that are computed at once for samples of a run."""
LONGEST_TASK = 16384
"""Tokens of the longest question of a task that an evaluation's cache has room for."""


def cache_groups(model: ModelConfig) -> tuple[list[int], list[int]]:
    """The windows of the groups, and each layer's group; one that sees everything comes first."""
    windows = [model.window_of(layer) for layer in range(model.layers)]
    groups = sorted(set(windows))
    return groups, [groups.index(window) for window in windows]


def cached_token_bytes(model: ModelConfig, bytes_per_number: int) -> int:
    """Keys and values of one token in all layers and heads."""
    return 2 * model.layers * model.num_kv_heads * model.head_width * bytes_per_number


def block_counts(
    model: ModelConfig,
    windows: Sequence[int],
    cache_bytes: int,
    *,
    kv_heads: int,
    bytes_per_number: int,
    max_running: int,
    max_length: int,
    step_tokens: int,
) -> list[int]:
    """Blocks of each group (`windows`) that fit into `cache_bytes`, and no more than so many
    requests of the greatest length can use. One request always fits its window and a step."""
    longest = max_length or LONGEST
    most = max_running * -(-(longest + BLOCK) // BLOCK)
    block_bytes = 2 * BLOCK * kv_heads * model.head_width * bytes_per_number
    layers = [
        sum(model.window_of(layer) == window for layer in range(model.layers)) for window in windows
    ]

    def counts(blocks: int) -> list[int]:
        least = [-(-(window + step_tokens) // BLOCK) + 2 for window in windows]
        seen = [max_running * (-(-window // BLOCK) + 1) for window in windows]
        return [
            blocks if not window else min(blocks, max(few, many))
            for window, few, many in zip(windows, least, seen, strict=True)
        ]

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        needed = sum(n * c * block_bytes for n, c in zip(layers, counts(middle), strict=True))
        low, high = (middle, high) if needed <= cache_bytes else (low, middle - 1)
    if low < 1:
        raise ConfigError(
            f"a cache of {cache_bytes:,} bytes does not hold one block of {BLOCK} tokens; give it"
            f" {sum(layers) * block_bytes:,} or more."
        )
    return counts(low)


def weight_bytes(model: ModelConfig, precision: Precision) -> int:
    """Bytes of the weights as they are served: in int8 those of the blocks' products are, the rest
    is in bf16."""
    counts = count_params(model)
    if precision == "int8":
        head = model.vocab_size * model.dim
        return 2 * counts.all - (counts.matrices_and_head - head)
    return counts.all * (4 if precision == "fp32" else 2)


@dataclass(frozen=True)
class ServingPlan:
    """What a device holds while it serves a model."""

    weights: int
    """Bytes of the weights."""
    cache: int
    """Bytes that are left for keys and values."""
    token: int
    """Bytes of one token's keys and values in all layers."""
    requests: dict[int, int]
    """How many requests of a length, prompt and answer, fit at a time."""


def plan_serving(
    model: ModelConfig,
    params: int,
    memory: int,
    *,
    bytes_per_weight: float,
    bytes_per_number: int,
    contexts: Sequence[int] = CONTEXTS,
) -> ServingPlan:
    """Weights, cache and requests on a device with so many bytes; refused where nothing fits."""
    weights = round(params * bytes_per_weight)
    cache = round((memory - weights) * CACHE_SHARE)
    token = cached_token_bytes(model, bytes_per_number)
    if cache < token * BLOCK:
        raise ConfigError(
            f"the weights take {weights:,} of {memory:,} bytes, and nothing is left for keys and"
            " values; use a larger device, or --weights int8."
        )
    last = model.max_positions or max(contexts)
    fits = {}
    for length in contexts:
        if length <= last:
            each = sum(
                2 * model.num_kv_heads * model.head_width * bytes_per_number * BLOCK
                * (-(-(min(length, window) if window else length) // BLOCK) + (1 if window else 0))
                for window in map(model.window_of, range(model.layers))
            )  # fmt: skip
            fits[length] = cache // each
    return ServingPlan(weights, cache, token, fits)


CACHE_SHARE = 0.85
"""Of the memory that weights leave free: the rest is for a step's activations and logits."""
