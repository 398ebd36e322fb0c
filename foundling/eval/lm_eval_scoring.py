"""Log-probabilities for lm-evaluation-harness: spans of tokens after a context, many at once."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from foundling.config.errors import ConfigError, DataError
from foundling.eval.oom_retry import release
from foundling.generate.engine import eager
from foundling.generate.kv_cache import KVCache
from foundling.generate.sampling import check_numbers
from foundling.model.transformer import Transformer
from foundling.runtime.console import warn
from foundling.runtime.device import ran_out

# What to score, put into an order that wastes little: by length, with shared beginnings shared.
#
# The answers of one question have one context, and the questions of one few-shot task begin with
# the same examples. Where that saves more than it costs, the context is computed once and its keys
# and values are kept. Rejected: a tree of all prefixes (it saves little more, since tasks share
# either everything or the examples, and would keep caches of every depth alive).

Tokens = tuple[int, ...]

LEAST_PREFIX = 64
"""Tokens that contexts must have in common before they are computed apart from the rest."""
LEAST_SHARERS = 4
"""Contexts that must share a prefix: fewer do not pay for a forward pass of its own."""


@dataclass(frozen=True)
class HarnessSpan:
    """Tokens to score after a context, which is never empty."""

    context: Tokens
    target: Tokens


@dataclass(frozen=True)
class HarnessQuestion:
    """One context and every target that is asked of it, each with its place in the request."""

    context: Tokens
    targets: tuple[tuple[int, Tokens], ...]

    @property
    def longest(self) -> int:
        """Positions of its longest row."""
        return len(self.context) + max(len(target) for _, target in self.targets) - 1

    @property
    def shares(self) -> bool:
        """Whether computing the context once is cheaper than once a target."""
        size = sum(len(target) for _, target in self.targets)
        return (len(self.targets) - 1) * len(self.context) > size


@dataclass(frozen=True)
class Cluster:
    """Questions that are scored together: all with the same beginning, which may be empty."""

    prefix: Tokens
    questions: tuple[HarnessQuestion, ...]


def fitted(spans: Iterable[HarnessSpan], window: int) -> list[HarnessSpan]:
    """Spans cut on the left to what the model can see: `window` inputs, one more token in all."""
    found = []
    for span in spans:
        if not span.context or not span.target:
            raise DataError("a context or a continuation to score is empty; give it a token.")
        if len(span.target) > window:
            raise DataError(
                f"a continuation has {len(span.target)} tokens and the model sees {window};"
                " give a larger max_length or shorter texts."
            )
        room = window + 1 - len(span.target)
        found.append(HarnessSpan(span.context[-room:], span.target))
    return found


def clusters(spans: Sequence[HarnessSpan]) -> list[Cluster]:
    """Every span once, in groups that share a beginning; the longest questions come first, so that
    what does not fit into memory is known at once."""
    asked: dict[Tokens, list[tuple[int, Tokens]]] = defaultdict(list)
    for place, span in enumerate(spans):
        asked[span.context].append((place, span.target))
    alike: dict[Tokens, list[HarnessQuestion]] = defaultdict(list)
    for context, targets in asked.items():
        alike[context[:LEAST_PREFIX]].append(HarnessQuestion(context, tuple(targets)))
    found, apart = [], list[HarnessQuestion]()
    for questions in alike.values():
        prefix = _common(questions)
        if len(questions) >= LEAST_SHARERS and len(prefix) >= LEAST_PREFIX:
            found.append(Cluster(prefix, _by_length(questions)))
        else:
            apart += questions
    for shares in (True, False):
        some = [question for question in apart if question.shares == shares]
        if some:
            found.append(Cluster((), _by_length(some)))
    return sorted(found, key=lambda cluster: -cluster.questions[0].longest)


def _by_length(questions: Iterable[HarnessQuestion]) -> tuple[HarnessQuestion, ...]:
    return tuple(sorted(questions, key=lambda question: (-question.longest, question.context)))


def _common(questions: Sequence[HarnessQuestion]) -> Tokens:
    """The beginning that all contexts have; each keeps a token of its own to be read out at."""
    low = min(question.context for question in questions)
    high = max(question.context for question in questions)
    most = min(len(question.context) for question in questions) - 1
    length = 0
    while length < most and low[length] == high[length]:
        length += 1
    return low[:length]


def batches(
    questions: Sequence[HarnessQuestion], positions: int, rows: int = 0
) -> Iterator[list[HarnessQuestion]]:
    """Neighbours whose padded rows hold at most so many positions, and at most `rows` rows (0: any
    number); one question always goes through."""
    batch: list[HarnessQuestion] = []
    count = width = 0
    for question in questions:
        more, wider = count + len(question.targets), max(width, question.longest)
        if batch and (more * wider > positions or (rows and more > rows)):
            yield batch
            batch, more, wider = [], len(question.targets), question.longest
        batch.append(question)
        count, width = more, wider
    if batch:
        yield batch


# Log-probabilities of tokens after a context, many at once.
#
# Rows are padded on the right, which causal attention cannot see, so neither the batch nor the
# cache changes a number by more than rounding. Only the positions that are scored go through the
# head: at a vocabulary of 128,000 the logits of a whole batch would be larger than the model.
#
# Shapes: B rows, T inputs of the longest of them, N scored positions, C width.

HEAD_ROWS = 1024
"""Positions whose logits exist at one time."""
BATCH_POSITIONS = {"cuda": 65_536, "cpu": 4096}
"""Positions of a batch where nobody says; halved whenever they do not fit."""


@dataclass(frozen=True)
class TokenScores:
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

    def score(
        self, spans: Sequence[HarnessSpan], progress: Progress | None = None
    ) -> list[TokenScores]:
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
        return [TokenScores(*found) for found in zip(sums, greedy, strict=True)]

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
        self, batch: list[HarnessQuestion], stem: KVCache | None
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

    def _batch(
        self, batch: list[HarnessQuestion], stem: KVCache | None
    ) -> list[tuple[int, float, bool]]:
        skipped = 0 if stem is None else stem.lengths[0]
        rests = [question.context[skipped:] for question in batch]
        if not any(question.shares for question in batch):
            return self._whole_rows(batch, rests, stem)
        return self._shared_contexts(batch, rests, stem)

    def _whole_rows(
        self, batch: list[HarnessQuestion], rests: list[Tokens], stem: KVCache | None
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
        self, batch: list[HarnessQuestion], rests: list[Tokens], stem: KVCache | None
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
