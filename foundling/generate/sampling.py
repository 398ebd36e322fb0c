"""From logits to a token: penalties, temperature, top-k, top-p, min-p, keyed randomness.

A token is drawn by the Gumbel trick: each token's noise is a hash of (seed, position, token id),
and the largest sum of scaled logit and noise wins. So a completion depends neither on which other
requests share its step nor on the device, no generator has a state to keep, and nothing has to be
summed over the vocabulary. Rejected: a point on the cumulative distribution, whose rounding differs
between devices, and torch's generators, whose numbers depend on the batch.

Filters apply in the order of the fields, each to what the ones before left, as in other engines.

Shapes: B rows, V vocabulary.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foundling.config.errors import ConfigError

LARGEST = 1e30
"""Of a temperature, a penalty or a bias: what is computed from them stays a number in fp32."""


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
    """Same seed, same prompt, same tokens."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that came before, and multiplies the negative ones."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that was generated already."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit as often as it was generated already."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""

    def __post_init__(self) -> None:
        for name, valid, range_ in (
            ("temperature", 0 <= self.temperature <= LARGEST, f"between 0 and {LARGEST:g}"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            (
                "repetition_penalty",
                1 / LARGEST <= self.repetition_penalty <= LARGEST,
                f"between {1 / LARGEST:g} and {LARGEST:g}",
            ),
            *(
                (name, abs(getattr(self, name)) <= LARGEST, f"at most {LARGEST:g} either way")
                for name in ("presence_penalty", "frequency_penalty")
            ),
        ):
            if not valid:
                raise ConfigError(f"{name} is {getattr(self, name)} and must be {range_}.")
        for token, bias in self.logit_bias.items():
            if not abs(bias) <= LARGEST:
                raise ConfigError(
                    f"logit_bias of token {token} is {bias} and must be at most {LARGEST:g} either"
                    " way."
                )
        if self.temperature == 0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0):
            raise ConfigError(
                "top_k, top_p and min_p have no effect at temperature 0; raise the temperature or"
                " leave them out."
            )

    @property
    def filters(self) -> bool:
        """Whether some tokens are ruled out by their rank or probability."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def penalises(self) -> bool:
        """Whether what came before changes the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_plain(self) -> bool:
        """Whether temperature and seed say it all."""
        return not (self.filters or self.penalises or self.logit_bias)


def derived_seed(seed: int, number: int) -> int:
    """The seed of sample `number` of a request, or of prompt `number` of a list."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") if number else seed


def signed(seed: int) -> int:
    """A seed as the 64-bit number that tensors hold."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed


NOT_FINITE = (
    "the model computes NaN or infinity: its weights have diverged, or the precision is too"
    " narrow for them; use --dtype fp32 or an earlier checkpoint (RUN@STEP)."
)
NOTHING_LEFT = (
    "the request's own rules (min_tokens, logit_bias, the answer's form) leave no token to go on"
    " with; ask for less."
)
NO_TOKEN = -1
"""What is drawn from a row with NaN or infinity, or where everything is ruled out."""


def draw_each(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """A token for each row by its own rules."""
    if all(s.temperature == 0 for s in samplings):
        return draw_greedy(logits).tolist()
    device = logits.device
    places = torch.tensor(positions, device=device)
    if any(s.filters for s in samplings):
        return draw_filtered(logits, samplings, places).tolist()
    temperatures = torch.tensor([s.temperature for s in samplings], device=device)
    seeds = torch.tensor([signed(s.seed) for s in samplings], device=device)
    return draw(logits, temperatures, seeds, places).tolist()


def draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Token ids [B] for logits [B, V] in fp32.

    `temperatures` [B] fp32 (0: the most likely token), `seeds` and `positions` [B] int64.
    """
    # Shifted first, so that a tiny temperature cannot overflow.
    shifted = logits - logits.amax(-1, keepdim=True)
    scaled = shifted / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    ids = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)
    noisy = scaled + gumbel(seeds, positions, ids)
    return _checked(logits, torch.where(temperatures > 0, noisy.argmax(-1), logits.argmax(-1)))


def draw_greedy(logits: Tensor) -> Tensor:
    """The most likely token ids [B]."""
    return _checked(logits, logits.argmax(-1))


def draw_filtered(logits: Tensor, samplings: Sequence[Sampling], positions: Tensor) -> Tensor:
    """The same for rows of which some have a top-k, top-p or min-p."""
    device = logits.device
    temperatures, top_p, min_p = (
        torch.tensor([getattr(s, name) for s in samplings], device=device)[:, None]
        for name in ("temperature", "top_p", "min_p")
    )
    size = logits.shape[-1]
    tops = [s.top_k or size for s in samplings]
    top_k = torch.tensor(tops, device=device)[:, None]
    is_greedy = temperatures == 0
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if max(tops) < size:
        ordered, order = ordered[:, : max(tops)], order[:, : max(tops)]
    scaled = (ordered - ordered[:, :1]) / torch.where(is_greedy, 1.0, temperatures)
    scaled = filter_ordered(scaled, top_k, top_p, min_p)
    seeds = torch.tensor([signed(s.seed) for s in samplings], device=device)
    noisy = scaled + gumbel(seeds, positions, order.to(torch.int32))
    best = torch.where(is_greedy[:, 0], 0, noisy.argmax(-1))
    return _checked(logits, order.gather(-1, best[:, None])[:, 0])


def filter_ordered(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits [B, V], the largest first, with minus infinity where a filter [B, 1] rules one out."""
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    logits = logits.masked_fill(ranks >= top_k, -math.inf)
    shares = logits.softmax(-1)
    before = shares.cumsum(-1) - shares
    kept = (before < top_p) | (top_p >= 1) | (ranks == 0)
    kept &= shares >= min_p * shares[:, :1]
    return logits.masked_fill(~kept, -math.inf)


def _checked(logits: Tensor, tokens: Tensor) -> Tensor:
    top = logits.amax(-1)  # NaN if one is; minus infinity rules a single token out
    return torch.where(top.isfinite(), tokens, NO_TOKEN)


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Noise [B, V] of the Gumbel distribution for token ids [V] or [B, V] (int32): a hash of
    (seed, position, id), the same on every device to the last bit of its 31."""
    key = _mix64(seeds ^ _mix64(positions + _STEP64))
    low, high = (key & 0xFFFFFFFF).to(torch.int32), (key >> 32).to(torch.int32)
    hashed = _mix32(_mix32(ids * _STEP32 + low[:, None]) ^ high[:, None])
    uniform = ((hashed & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-31
    return -torch.log(-torch.log1p(-uniform))


# Finalisers of splitmix64 (Steele, Lea, Flood 2014) and MurmurHash3 (Appleby), on integers that
# wrap: tensors have no unsigned ones everywhere, so shifts are masked and constants are signed.

_STEP64 = signed(0x9E3779B97F4A7C15)
_FIRST64, _SECOND64 = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)
_STEP32, _FIRST32, _SECOND32 = 0x9E3779B1 - 2**32, 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _FIRST64
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _SECOND64
    return x ^ ((x >> 31) & (2**33 - 1))


def _mix32(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FIRST32
    x = (x ^ ((x >> 13) & 0x7FFFF)) * _SECOND32
    return x ^ ((x >> 16) & 0xFFFF)


def adjust(
    logits: Tensor, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]
) -> None:
    """Penalties and biases of one row [V], in place."""
    device = logits.device
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *generated}), device=device)
        some, factor = logits[seen], sampling.repetition_penalty
        logits[seen] = torch.where(some > 0, some / factor, some * factor)
    if generated and (sampling.presence_penalty or sampling.frequency_penalty):
        said, counts = torch.tensor(list(generated), device=device).unique(return_counts=True)  # type: ignore[no-untyped-call]
        logits[said] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=device)
        bias = torch.tensor(list(sampling.logit_bias.values()), device=device, dtype=logits.dtype)
        logits[ids] += bias


def judge(
    logits: Tensor, targets: Tensor, top: int
) -> tuple[list[float], list[bool], list[dict[int, float]]]:
    """Log-probability of each target [N], whether it is the likeliest, and the `top` likeliest."""
    logsums = logits.logsumexp(-1)
    chosen = logits.gather(-1, targets[:, None])[:, 0] - logsums
    best = logits.argmax(-1) == targets
    likeliest: list[dict[int, float]] = [{}] * len(logits)
    if top:
        values, ids = logits.topk(min(top, logits.shape[-1]), dim=-1)
        pairs = zip(ids.tolist(), (values - logsums[:, None]).tolist(), strict=True)
        likeliest = [dict(zip(*pair, strict=True)) for pair in pairs]
    # A logit that is no number, or infinity, makes its row's logsum none.
    chosen = torch.where(logsums.isfinite(), chosen, float("nan"))
    return chosen.double().tolist(), best.tolist(), likeliest
