"""How likely a model finds given ends of texts: the loss of each, and whether it would say them.

Texts come in groups that begin alike (one question, several answers). What a group shares goes
through the model once (likelihood.py), logits are made only where a token is judged, and groups of
like
length go together, as many as a budget of tokens allows, longest first, so that memory that does
not suffice is met at once. None of this changes a number by more than rounding: a test holds it
against one text at a time without any of it.

A batch for which memory runs out is halved and tried again, and so are those after it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from foundling.eval.oom_retry import Budget, is_cut, run_halving
from foundling.generate.sampling import check_numbers
from foundling.model.kernels.attention_backends import MaskSpec, dense_mask
from foundling.model.transformer import Transformer

# Keys and values of a prompt that several answers share: filled once, then read by all of them.
#
# First the prompts go through the model, padded on the right; then the answers of each prompt, laid
# end to end in one row, each seeing the prompt and itself alone. So a question with four answers
# costs its prompt once instead of four times. Rejected: the cache of `generate`, repeated for every
# answer (four copies of the keys), and one row with prompt and answers under a full mask (the
# prompt would lose the causal fast path).
#
# Shapes: B prompts, P longest prompt, t longest row of answers, K key/value heads, D head width.


class PrefixCache:
    """Implements `foundling.model.attention.Cache` for one fill and one reading."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """Prompts of these lengths."""
        self._lengths = torch.tensor(lengths, device=device)
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int, Tensor] = {}
        self._positions: Tensor | None = None
        self._branches = torch.zeros(0)
        self._reach = max(lengths)

    def branch(self, positions: Tensor, branches: Tensor, reach: int) -> None:
        """From now on read: tokens [B, t] at these positions of these branches; `reach` is one more
        than the last position, known without asking the device."""
        self._positions, self._branches, self._reach = positions, branches, reach

    def positions(self, width: int) -> Tensor:
        """Positions [B or 1, width] of the tokens that come."""
        if self._positions is None:
            return torch.arange(width, device=self._lengths.device)[None]
        return self._positions

    def reach(self, width: int) -> int:
        """One more than the last position."""
        return self._reach

    def mask(self, width: int, window: int = 0) -> Tensor | None:
        """None while prompts are filled in, where causality says it all; then [B, 1, t, P + t]."""
        if self._positions is None:
            return dense_mask(MaskSpec(None, window), width, self._lengths.device)
        if window not in self._masks:
            self._masks[window] = self._branch_mask(self._positions, window)
        return self._masks[window]

    def _branch_mask(self, positions: Tensor, window: int) -> Tensor:
        slots = torch.arange(next(iter(self._keys.values()))[0].shape[2], device=positions.device)
        of_prompt = (slots < self._lengths[:, None])[:, None, :]
        same = self._branches[:, :, None] == self._branches[:, None, :]
        distance = positions[:, :, None] - positions[:, None, :]
        of_answer = same & (distance >= 0)
        if window:
            of_prompt = of_prompt & (positions[:, :, None] - slots < window)
            of_answer = of_answer & (distance < window)
        of_prompt = of_prompt.expand(-1, positions.shape[1], -1)
        return torch.cat([of_prompt, of_answer], 2)[:, None]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep keys and values of a prompt; later put those of answers behind, keeping none."""
        if self._positions is None:
            self._keys[layer] = k, v
            return k, v
        keys, values = self._keys[layer]
        return torch.cat([keys, k], 2), torch.cat([values, v], 2)

    def advance(self, counts: Sequence[int]) -> None:
        """Nothing: the lengths are known from the beginning."""


BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Positions that go through the model at once."""
LEAST_SHARED = 8
"""Tokens that a group must share for a cache to be worth while."""
HEAD_ROWS = {"cpu": 160}
"""States that are collected over batches before the head: on a CPU two rows cost what eight do."""
PADDING = {"cpu": 32}
"""Positions of padding that a row may bring: on a CPU more of them cost more than a batch more."""


@dataclass(frozen=True)
class Span:
    """A text whose tokens from `start` on are judged."""

    tokens: NDArray[np.int64]
    start: int
    """At least 1: the first token of a text follows nothing."""


@dataclass(frozen=True)
class SpanScore:
    """What a model makes of a span."""

    nats: float
    count: int
    exact: bool
    """Every token of it is the one that the model finds likeliest."""

    @property
    def mean(self) -> float:
        """Nats per token; NaN for a span of nothing."""
        return self.nats / self.count if self.count else float("nan")


Group = Sequence[Span]
Found = tuple[list[int], list[list[SpanScore]]]


@dataclass(frozen=True)
class _Unit:
    """A group on its way: its distinct texts, and how much of them is shared."""

    number: int
    spans: list[Span]
    """Each text once: equal answers must score equally, to the bit."""
    which: list[int]
    """The text of each span of the group."""
    shared: int
    """Tokens that go through the model once; 0: each text on its own."""

    @property
    def width(self) -> int:
        """Positions of the prompt, or of the longest text."""
        return self.shared or max(len(span.tokens) - 1 for span in self.spans)

    @property
    def rest(self) -> int:
        """Positions behind the prompt, of all answers together."""
        return sum(len(span.tokens) - 1 - self.shared for span in self.spans) if self.shared else 0

    @property
    def rows(self) -> int:
        return 1 if self.shared else len(self.spans)

    @property
    def judged(self) -> int:
        """Tokens that the head is asked about."""
        return sum(len(span.tokens) - span.start for span in self.spans)


@dataclass(frozen=True)
class _Seen:
    """A batch on its way to the head: states [N, C], and the tokens [N] that follow them."""

    units: Sequence[_Unit]
    states: Tensor
    targets: Tensor


class Scorer:
    """Scores groups of spans with one model on one device."""

    def __init__(
        self,
        model: Transformer,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        max_tokens: int = 0,
        whole: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """`max_tokens` a batch (0: what suits the device). `whole` is for a model of which this
        process has some heads only: whole logits and no sharing. `between` is called before each
        batch, and may raise to give up."""
        self.model, self.device, self.dtype = model, device, dtype
        size = max_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
        self.budget = Budget(size, fixed=is_cut(model))
        self._whole, self._between = whole, between
        self._head_rows = 0 if whole else HEAD_ROWS.get(device.type, 0)
        self._padding = PADDING.get(device.type, size)
        self._fills = not whole and not self.budget.fixed
        """Prompts can go into a cache without the last block's work."""
        self._parts_alone = self._fills and device.type == "cpu"
        """For that a single text is parted too; on a GPU the second batch costs more."""

    @torch.no_grad()
    def run(self, groups: Sequence[Group], *, exact: bool = True) -> Iterator[Found]:
        """Again and again the numbers of groups that are done, and their spans' scores. Without
        `exact` nobody asks whether tokens are the likeliest, and the scores say no."""
        units = [self._unit(number, group) for number, group in enumerate(groups)]
        units.sort(key=lambda unit: (not unit.shared, -unit.width, -unit.rest))
        was_training = self.model.training
        self.model.eval()
        waiting: list[_Seen] = []

        def see(part: Sequence[_Unit]) -> list[Found]:
            with _eager(), _autocast(self.device, self.dtype):
                seen = _Seen(part, *self._states(part))
            if not self._head_rows:
                return finish([seen])
            waiting.append(seen)
            return []

        def finish(some: Sequence[_Seen]) -> list[Found]:
            with _eager(), _autocast(self.device, self.dtype):
                return self._finished(some, exact)

        try:
            while units:
                batch = self._next_batch(units)
                del units[: len(batch)]
                self._between()
                for _, found in run_halving(batch, see, self.budget):
                    yield from found
                if waiting and (not units or self._is_enough(waiting)):
                    for _, found in run_halving(waiting, finish, self.budget):
                        yield from found
                    waiting.clear()
        finally:
            self.model.train(was_training)

    def _unit(self, number: int, group: Group) -> _Unit:
        spans: list[Span] = []
        known: dict[tuple[bytes, int], int] = {}
        which = []
        for span in group:
            key = span.tokens.tobytes(), span.start
            if key not in known:
                known[key] = len(spans)
                spans.append(span)
            which.append(known[key])
        shared = 0
        if (len(spans) > 1 or self._parts_alone) and not self._whole:
            # The last common token predicts the first that differs, so it goes with the answers.
            common = alike([span.tokens for span in spans])
            shared = min(common, *(span.start for span in spans)) - 1
            if max(len(span.tokens) for span in spans) - 1 <= shared:
                shared = 0  # nothing is judged
        return _Unit(number, spans, which, shared if shared >= LEAST_SHARED else 0)

    def _next_batch(self, units: Sequence[_Unit]) -> list[_Unit]:
        first, rows, rest = units[0], 0, 0
        for count, unit in enumerate(units):
            rows, rest = rows + unit.rows, max(rest, unit.rest)
            cost = rows * (first.width + rest)
            padding = first.width + rest - unit.width - unit.rest
            is_other = bool(unit.shared) != bool(first.shared) or padding > self._padding
            if count and (cost > self.budget.size or is_other):
                return list(units[:count])
        return list(units)

    def _is_enough(self, waiting: "Sequence[_Seen]") -> bool:
        """For the head to be worth while, or too much for a kill to cost."""
        rows = sum(len(seen.targets) for seen in waiting)
        units = [unit for seen in waiting for unit in seen.units]
        positions = sum(unit.rows * (unit.width + unit.rest) for unit in units)
        return rows >= self._head_rows or positions >= 2 * self.budget.size

    def _finished(self, waiting: "Sequence[_Seen]", exact: bool) -> list[Found]:
        """The scores of batches that have come to the head."""
        states = torch.cat([seen.states for seen in waiting])
        targets = torch.cat([seen.targets for seen in waiting])
        batches = [seen.units for seen in waiting]
        losses, best = self._judged(states, targets, exact)
        check_numbers(losses)
        # One copy to the host, and sums in double precision, which not every device has.
        hits = torch.zeros_like(losses) if best is None else (best == targets)
        found = torch.stack([losses.double().cpu(), hits.double().cpu()]).numpy()
        ends = np.cumsum([sum(unit.judged for unit in batch) for batch in batches])
        parts = np.split(found, ends[:-1], axis=1)
        return [
            ([unit.number for unit in batch], _scores(batch, part))
            for batch, part in zip(batches, parts, strict=True)
        ]

    def _states(self, batch: Sequence[_Unit]) -> tuple[Tensor, Tensor]:
        return self._shared(batch) if batch[0].shared else self._apart(batch)

    def _apart(self, batch: Sequence[_Unit]) -> tuple[Tensor, Tensor]:
        """Every text in a row of its own."""
        spans = [span for unit in batch for span in unit.spans]
        width = max(len(span.tokens) - 1 for span in spans)
        tokens = np.zeros((len(spans), width), np.int64)
        places, targets = [], []
        for row, span in enumerate(spans):
            tokens[row, : len(span.tokens) - 1] = span.tokens[:-1]
            places.append(np.arange(span.start - 1, len(span.tokens) - 1) + row * width)
            targets.append(span.tokens[span.start :])
        return self._seen(tokens, places, targets, None)

    def _shared(self, batch: Sequence[_Unit]) -> tuple[Tensor, Tensor]:
        """The prompts first, then for each the row of its answers."""
        prompts = np.zeros((len(batch), max(unit.shared for unit in batch)), np.int64)
        for row, unit in enumerate(batch):
            prompts[row, : unit.shared] = unit.spans[0].tokens[: unit.shared]
        cache = PrefixCache([unit.shared for unit in batch], self.device)
        if self._fills:
            self.model.fill(self._put(prompts), cache)
        else:
            self._seen(prompts, [], [], cache)
        shape = (len(batch), max(unit.rest for unit in batch))
        tokens, positions, branches = (np.zeros(shape, np.int64) for _ in range(3))
        places, targets = [], []
        for row, unit in enumerate(batch):
            at = 0
            for branch, span in enumerate(unit.spans):
                inputs = span.tokens[unit.shared : -1]
                here = slice(at, at + len(inputs))
                tokens[row, here], branches[row, here] = inputs, branch + 1
                positions[row, here] = np.arange(len(inputs)) + unit.shared
                first = row * shape[1] + at + span.start - 1 - unit.shared
                places.append(np.arange(len(span.tokens) - span.start) + first)
                targets.append(span.tokens[span.start :])
                at += len(inputs)
        cache.branch(self._put(positions), self._put(branches), int(positions.max()) + 1)
        return self._seen(tokens, places, targets, cache)

    def _seen(
        self,
        tokens: NDArray[np.int64],
        places: Sequence[NDArray[np.int64]],
        targets: Sequence[NDArray[np.int64]],
        cache: PrefixCache | None,
    ) -> tuple[Tensor, Tensor]:
        """What the head is given at these places, and what it is to find there."""
        none = np.zeros(0, np.int64)
        at = self._put(np.concatenate([none, *places]))
        wanted = self._put(np.concatenate([none, *targets]))
        if self._whole:  # the head is applied already, by all ranks together
            return self.model(self._put(tokens)).flatten(0, 1)[at], wanted
        return self.model.states_at(self._put(tokens), at, cache), wanted

    def _judged(self, states: Tensor, wanted: Tensor, exact: bool) -> tuple[Tensor, Tensor | None]:
        if not self._whole:
            return self.model.judge(states, wanted, best=exact)
        logits = states.float()
        losses = F.cross_entropy(logits, wanted, reduction="none")
        return losses, logits.argmax(-1) if exact else None

    def _put(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _scores(batch: Sequence[_Unit], found: NDArray[np.float64]) -> list[list[SpanScore]]:
    """From losses and hits [2, N] of a batch to the scores of its groups."""
    scores, at = [], 0
    for unit in batch:
        of_texts = []
        for span in unit.spans:
            count = len(span.tokens) - span.start
            nats, hits = found[:, at : at + count].sum(1)
            of_texts.append(SpanScore(float(nats), count, int(hits) == count))
            at += count
        scores.append([of_texts[text] for text in unit.which])
    return scores


def alike(texts: Sequence[NDArray[np.int64]]) -> int:
    """How many tokens all texts begin with."""
    shortest = min(len(text) for text in texts)
    same = np.ones(shortest, bool)
    for text in texts[1:]:
        same &= text[:shortest] == texts[0][:shortest]
    return shortest if same.all() else int(same.argmin())


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def _eager() -> AbstractContextManager[Any]:
    # Compiled blocks are for training's one shape; here every batch has another. Where nothing was
    # compiled, the compiler need not even be imported.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
