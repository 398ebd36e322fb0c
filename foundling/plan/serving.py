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
DEFAULT_LENGTH = 1 << 13
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
    requests of the greatest length can use. A group with a window has what the requests see that
    the others hold at the greatest length, and a step's tokens on top."""
    longest = max_length or DEFAULT_LENGTH
    most = max_running * -(-(longest + BLOCK) // BLOCK)
    block_bytes = 2 * BLOCK * kv_heads * model.head_width * bytes_per_number
    layers = [
        sum(model.window_of(layer) == window for layer in range(model.layers)) for window in windows
    ]

    def counts(blocks: int) -> list[int]:
        requests = min(max_running, max(1, blocks // -(-longest // BLOCK)))
        step = -(-step_tokens // BLOCK)
        return [
            min(blocks, requests * blocks_seen(window, longest) + step) if window else blocks
            for window in windows
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


def blocks_seen(window: int, length: int) -> int:
    """Blocks of a request of `length` tokens that its next token sees through a window (0: all)."""
    whole = -(-length // BLOCK)
    return min(whole, -(-window // BLOCK) + 1) if window else whole


def requests_held(
    windows: Sequence[int], counts: Sequence[int], length: int, step_tokens: int
) -> int:
    """How many requests of `length` tokens these blocks, laid out for that length, hold at a time:
    as many as the group that sees everything; a step's blocks are not counted where none does."""
    if windows[0] == 0:
        return counts[0] // blocks_seen(0, length)
    step = -(-step_tokens // BLOCK)
    return min(
        max(1, (count - step) // blocks_seen(window, length))
        for window, count in zip(windows, counts, strict=True)
    )


def step_that_fits(
    windows: Sequence[int], counts: Sequence[int], max_length: int, step_tokens: int
) -> int:
    """Tokens of a step: fewer than asked for where every layer has a window and a request finds no
    blocks for so many at once."""
    if windows[0] == 0:
        return step_tokens  # a request that is let in has blocks for all of its tokens
    tight = [
        count - blocks_seen(window, window + BLOCK)
        for window, count in zip(windows, counts, strict=True)
        if not max_length or BLOCK * count < max_length
    ]
    if min(tight, default=1) < 1:
        raise ConfigError(
            f"a cache of {BLOCK * min(counts):,} tokens has no room beside a window of"
            f" {max(windows):,}; give it more bytes."
        )
    return min([step_tokens, *(BLOCK * blocks for blocks in tight)])


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
    step_tokens: int = STEP_TOKENS["cuda"],
) -> ServingPlan:
    """Weights, cache and requests on a device with so many bytes; refused where nothing fits. Of
    each length the cache is laid out for requests of that length."""
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
    windows, _ = cache_groups(model)
    for length in contexts:
        if length <= last:
            counts = block_counts(
                model,
                windows,
                cache,
                kv_heads=model.num_kv_heads,
                bytes_per_number=bytes_per_number,
                max_running=1 + cache // (token * BLOCK),
                max_length=length,
                step_tokens=step_tokens,
            )
            fits[length] = requests_held(windows, counts, length, step_tokens)
    return ServingPlan(weights, cache, token, fits)


CACHE_SHARE = 0.85
"""Of the memory that weights leave free: the rest is for a step's activations and logits."""
