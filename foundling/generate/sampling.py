"""From logits to a token: temperature, top-k, top-p, min-p, and randomness that is a function.

The random number of a token is a hash of (seed, row, position), so a completion depends neither on
which other prompts share its batch nor on how many tokens they took, and no generator has a state
to keep. One number a token is enough: it picks a point on the cumulative distribution.

Filters apply in the order of the fields, each to what the ones before left, as in other engines.

Shapes: B rows, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foundling.config.errors import CheckpointError, ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is picked."""

    temperature: float = 0.0
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens that hold this share of the probability."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely one's probability."""
    seed: int = 0
    """Same seed, same prompts, same tokens."""

    def __post_init__(self) -> None:
        for name, valid, range_ in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
        ):
            if not valid:
                raise ConfigError(f"{name} is {getattr(self, name)} and must be {range_}.")
        if self.temperature == 0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0):
            raise ConfigError(
                "top_k, top_p and min_p have no effect at temperature 0; raise the temperature or"
                " leave them out."
            )


def choose(
    logits: Tensor, sampling: Sampling, rows: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """Token ids [B] for logits [B, V]; rows and positions key the randomness."""
    check_numbers(logits.amax(-1))  # NaN if one is; minus infinity rules a single token out
    if sampling.temperature == 0:
        return logits.argmax(-1)
    points = [uniform(sampling.seed, *key) for key in zip(rows, positions, strict=True)]
    return pick(probabilities(logits, sampling), torch.tensor(points, dtype=torch.float64))


def check_numbers(computed: Tensor) -> None:
    """Refuse logits or losses of which one is NaN or infinite."""
    if not bool(computed.isfinite().all()):
        raise CheckpointError(
            "the model computes NaN or infinity: its weights have diverged, or the precision is too"
            " narrow for them; use --dtype fp32 or an earlier checkpoint (RUN@STEP)."
        )


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [B, V] that is drawn from, in float64."""
    # On the CPU, the one place where every backend has float64 and a deterministic cumsum.
    # Shifted first, so that a tiny temperature cannot overflow.
    wide = logits.to("cpu", torch.float64)
    wide = (wide - wide.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k:
        wide = wide.masked_fill(~top_k_mask(wide, sampling.top_k), float("-inf"))
    if sampling.top_p < 1:
        wide = wide.masked_fill(~top_p_mask(wide.softmax(-1), sampling.top_p), float("-inf"))
    if sampling.min_p:
        wide = wide.masked_fill(~min_p_mask(wide.softmax(-1), sampling.min_p), float("-inf"))
    return wide.softmax(-1)


def top_k_mask(logits: Tensor, k: int) -> Tensor:
    """True on the k largest; equal ones go to the smaller id, so that exactly k are kept."""
    return _ranks(logits) < min(k, logits.shape[-1])


def top_p_mask(probs: Tensor, p: float) -> Tensor:
    """True on the shortest run of most likely tokens whose sum reaches p; never empty."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, before < p)


def min_p_mask(probs: Tensor, p: float) -> Tensor:
    """True on tokens with at least p times the largest probability."""
    return probs >= p * probs.amax(-1, keepdim=True)


def uniform(seed: int, row: int, position: int) -> float:
    """A number in [0, 1) with 40 random bits, from a hash: the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{row}:{position}".encode(), digest_size=5).digest()
    return int.from_bytes(digest, "little") / 2**40


def pick(probs: Tensor, points: Tensor) -> Tensor:
    """The id at which the cumulative distribution first passes each row's point."""
    cumulative = probs.cumsum(-1)
    # Scaled by the computed total, so that rounding cannot push a point past the end, and strictly
    # greater, so that a token of probability zero is never picked.
    target = points.to(probs.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _ranks(values: Tensor) -> Tensor:
    order = values.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(values.shape[-1], device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)
