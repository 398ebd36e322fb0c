"""Log-probabilities of tokens after a context, many at once.

Rows are padded on the right, which causal attention cannot see, so neither the batch nor the cache
changes a number by more than rounding. Only the positions that are scored go through the head: at
a vocabulary of 128,000 the logits of a whole batch would be larger than the model.

Shapes: B rows, T inputs of the longest of them, N scored positions, C width.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from foundling.config import ConfigError
from foundling.eval.halving import release
from foundling.eval.lm.spans import Cluster, Question, Span, Tokens, batches, clusters, fitted
from foundling.generate.cache import KVCache
from foundling.generate.engine import eager
from foundling.generate.sampling import check_numbers
from foundling.model import Transformer
from foundling.runtime.log import warn
from foundling.runtime.shortage import ran_out

HEAD_ROWS = 1024
"""Positions whose logits exist at one time."""
BATCH_POSITIONS = {"cuda": 65_536, "cpu": 4096}
"""Positions of a batch where nobody says; halved whenever they do not fit."""


@dataclass(frozen=True)
class SpanScore:
    """What the model thinks of a target after its context."""

    logprob: float
    """Natural logarithm of the probability of the whole target."""
    is_greedy: bool
    """Whether every token of it was the most likely one."""


@dataclass(frozen=True)
class _Read:
    """Where the next token is looked up: the state at `column` of `row` predicts `token`."""

    row: int
    column: int
    token: int
    place: int


Progress = Callable[[int], None]


class TokenScorer:
    """Scores spans with one model on one device."""

    def __init__(
        self,
        model: Transformer,
        device: torch.device,
        *,
        window: int,
        dtype: torch.dtype = torch.float32,
        positions: int = 0,
        rows: int = 0,
    ) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self.window = window
        """Longest context that the model is shown."""
        self.positions = positions or BATCH_POSITIONS.get(device.type, BATCH_POSITIONS["cpu"])
        """Positions of a batch, padding included."""
        self.rows = rows
        """Most rows of a batch; 0 leaves that to the positions."""

    def score(self, spans: Sequence[Span], progress: Progress | None = None) -> list[SpanScore]:
        """The score of each span, in the order given; `progress` is told how many are done now."""
        sums, greedy = [0.0] * len(spans), [True] * len(spans)
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode(), eager(), self._autocast():
                for cluster in clusters(fitted(spans, self.window)):
                    self._cluster(cluster, sums, greedy, progress)
        finally:
            self.model.train(was_training)
        return [SpanScore(*found) for found in zip(sums, greedy, strict=True)]

    def _cluster(
        self,
        cluster: Cluster,
        sums: list[float],
        greedy: list[bool],
        progress: Progress | None,
    ) -> None:
        stem = self._stem(cluster.prefix) if cluster.prefix else None
        waiting = list(cluster.questions)
        while waiting:
            # Asked anew each time, because the size may have been halved.
            batch = next(batches(waiting, self.positions, self.rows))
            found = self._fitting(batch, stem)
            if found is None:
                continue
            for place, logprob, is_right in found:
                sums[place] += logprob
                greedy[place] &= is_right
            waiting = waiting[len(batch) :]
            if progress:
                progress(sum(len(question.targets) for question in batch))

    def _fitting(
        self, batch: list[Question], stem: KVCache | None
    ) -> list[tuple[int, float, bool]] | None:
        """The scores of a batch; None, and a smaller size from now on, if it did not fit."""
        try:
            return self._batch(batch, stem)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            if len(batch) == 1:
                raise ConfigError(
                    f"one question of {batch[0].longest} tokens does not fit into the memory of"
                    f" {self.device}; give a smaller max_length or use another device."
                ) from None
        count = sum(len(question.targets) for question in batch)
        self.positions = max(1, count * max(q.longest for q in batch) // 2)
        warn(f"a batch did not fit into memory; from now on {self.positions:,} positions at once.")
        release()
        return None

    def _batch(self, batch: list[Question], stem: KVCache | None) -> list[tuple[int, float, bool]]:
        skipped = 0 if stem is None else stem.lengths[0]
        rests = [question.context[skipped:] for question in batch]
        if not any(question.shares for question in batch):
            return self._whole_rows(batch, rests, stem)
        return self._shared_contexts(batch, rests, stem)

    def _whole_rows(
        self, batch: list[Question], rests: list[Tokens], stem: KVCache | None
    ) -> list[tuple[int, float, bool]]:
        """Each target behind its own copy of the context."""
        rows: list[Tokens] = []
        reads: list[_Read] = []
        for question, rest in zip(batch, rests, strict=True):
            for place, target in question.targets:
                first = len(rest) - 1
                reads += [_Read(len(rows), first + n, t, place) for n, t in enumerate(target)]
                rows.append(rest + target[:-1])
        cache = None if stem is None else self._branched(stem, [0] * len(rows), _longest(rows))
        return self._looked_up(self.model.hidden(self._padded(rows), cache=cache), reads)

    def _shared_contexts(
        self, batch: list[Question], rests: list[Tokens], stem: KVCache | None
    ) -> list[tuple[int, float, bool]]:
        """Each context once: its last state predicts the first token of every target, and its keys
        and values are lent to the rest of each."""
        longest = max(len(target) for question in batch for _, target in question.targets) - 1
        capacity = _longest(rests) + longest
        cache = (
            self._empty(len(rests), capacity)
            if stem is None
            else self._branched(stem, [0] * len(rests), capacity)
        )
        hidden = self.model.hidden(self._padded(rests), cache=cache)
        cache.advance([len(rest) for rest in rests])
        owners: list[int] = []
        tails: list[Tokens] = []
        firsts: list[_Read] = []
        reads: list[_Read] = []
        for row, question in enumerate(batch):
            for place, target in question.targets:
                firsts.append(_Read(row, len(rests[row]) - 1, target[0], place))
                if len(target) > 1:
                    reads += [_Read(len(tails), n, t, place) for n, t in enumerate(target[1:])]
                    tails.append(target[:-1])
                    owners.append(row)
        found = self._looked_up(hidden, firsts)
        if tails:
            cache.keep(owners)
            found += self._looked_up(self.model.hidden(self._padded(tails), cache=cache), reads)
        return found

    def _looked_up(self, hidden: Tensor, reads: Sequence[_Read]) -> list[tuple[int, float, bool]]:
        """(place, log-probability, whether it was the likeliest) of each token that is read."""
        found: list[tuple[int, float, bool]] = []
        for start in range(0, len(reads), HEAD_ROWS):
            some = reads[start : start + HEAD_ROWS]
            rows, columns, tokens = (
                torch.tensor([getattr(read, name) for read in some], device=self.device)
                for name in ("row", "column", "token")
            )
            # In fp32 whatever the model computes in: a probability rounded to bf16 is no score.
            logits = self.model.logits(hidden[rows, columns]).float()
            wanted = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(1)
            check_numbers(wanted)
            is_right = logits.argmax(1) == tokens
            values = zip(wanted.cpu().double().tolist(), is_right.cpu().tolist(), strict=True)
            found += [(read.place, *pair) for read, pair in zip(some, values, strict=True)]
        return found

    def _stem(self, prefix: Tokens) -> KVCache:
        """Keys and values of a beginning that many contexts share, as one row."""
        cache = self._empty(1, len(prefix))
        self.model.hidden(self._padded([prefix]), cache=cache)
        cache.advance([len(prefix)])
        return cache

    def _branched(self, stem: KVCache, rows: Sequence[int], room: int) -> KVCache:
        """A copy of the stem for each row, with room behind it."""
        length = stem.lengths[0]
        cache = self._empty(len(rows), length + room)
        cache.keys[:, :, :, :length] = stem.keys
        cache.values[:, :, :, :length] = stem.values
        cache.advance([length] * len(rows))
        return cache

    def _empty(self, rows: int, capacity: int) -> KVCache:
        dtype = self.model.head_weight.dtype if self.dtype == torch.float32 else self.dtype
        return KVCache(self.model.config, rows, capacity, self.device, dtype)

    def _padded(self, rows: Sequence[Tokens]) -> Tensor:
        width = _longest(rows)
        # Any token does for padding: it stands behind everything that is read.
        return torch.tensor([row + (0,) * (width - len(row)) for row in rows], device=self.device)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def _longest(rows: Sequence[Tokens]) -> int:
    return max(len(row) for row in rows)
