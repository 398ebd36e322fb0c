"""Batched generation with a key-value cache.

Prompts of different lengths share a batch: padded on the right for the prefill, then decoded one
token at a time. Rows that finished are dropped once they are a quarter of the batch, since
copying the cache at every end would cost more than a few idle rows. Rejected: refilling free rows
with waiting prompts, which pays on a server and not for evaluations of a few hundred prompts.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foundling.config.errors import ConfigError
from foundling.generate.kv_cache import KVCache
from foundling.generate.sampling import Sampling, choose
from foundling.model.transformer import Transformer

OnToken = Callable[[int, int], bool | None]
"""Called with (index of the prompt, token id) for each new token, stop tokens excepted; what
returns True has heard enough and ends its row."""


@dataclass(frozen=True)
class Completion:
    """What the model wrote after one prompt."""

    ids: list[int]
    """The new tokens, without the one that stopped it."""
    finished: bool
    """True when a stop token came; False when the room ran out."""
    stop_id: int | None = None
    """The stop token, if one came."""


@dataclass
class _Row:
    """A prompt on its way."""

    index: int
    length: int
    limit: int
    """New tokens it may have."""
    ids: list[int] = field(default_factory=list)
    stop_id: int | None = None
    is_cut: bool = False
    """Whoever listens has heard enough."""

    @property
    def done(self) -> bool:
        return self.is_cut or self.stop_id is not None or len(self.ids) >= self.limit


class Engine:
    """Generates from one model on one device; the model is left as it was found."""

    def __init__(
        self,
        model: Transformer,
        device: torch.device | str,
        *,
        dtype: torch.dtype | None = None,
        max_batch: int = 64,
        cached: bool = True,
    ) -> None:
        self.model = model
        self.device = torch.device(device)
        self.dtype = dtype
        """Arithmetic of the matrix products, by autocast; None takes the weights' own."""
        self.max_batch = max_batch
        self._run = self._decode if cached else self._recompute
        """Without a cache every token costs the whole row again: only for a model of which this
        process has some heads and no cache could hold the others'."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Collection[int] = (),
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        """Continue every prompt until a stop token, `max_new_tokens` or the model's last position.

        The randomness of a row is keyed by (seed, its index here, position); `max_batch` rows run
        at a time, longest prompts first.
        """
        rows = [self._row(index, prompt, max_new_tokens) for index, prompt in enumerate(prompts)]
        waiting = sorted((row for row in rows if not row.done), key=lambda row: -row.length)
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode(), eager(), self._autocast():
                for first in range(0, len(waiting), self.max_batch):
                    batch = waiting[first : first + self.max_batch]
                    self._run(batch, prompts, sampling or Sampling(), stop_ids, on_token)
        finally:
            self.model.train(training)
        return [Completion(row.ids, row.stop_id is not None, row.stop_id) for row in rows]

    def _recompute(
        self,
        rows: list[_Row],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        stop_ids: Collection[int],
        on_token: OnToken | None,
    ) -> None:
        while live := [row for row in rows if not row.done]:
            texts = [[*prompts[row.index], *row.ids] for row in live]
            ends = torch.tensor([len(text) - 1 for text in texts])
            tokens = torch.zeros(len(texts), int(ends.max()) + 1, dtype=torch.long)
            for slot, text in enumerate(texts):
                tokens[slot, : len(text)] = torch.tensor(text)
            logits = self.model(tokens.to(self.device))
            logits = logits[torch.arange(len(texts)), ends]
            places = [len(text) for text in texts]
            chosen = choose(logits, sampling, [row.index for row in live], places).tolist()
            for row, token in zip(live, chosen, strict=True):
                _take(row, token, stop_ids, on_token)

    def _decode(
        self,
        rows: list[_Row],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        stop_ids: Collection[int],
        on_token: OnToken | None,
    ) -> None:
        cache, logits = self._prefill(rows, prompts)
        while True:
            places = [row.length + len(row.ids) for row in rows]
            chosen = choose(logits, sampling, [row.index for row in rows], places).tolist()
            for row, token in zip(rows, chosen, strict=True):
                _take(row, token, stop_ids, on_token)
            live = [slot for slot, row in enumerate(rows) if not row.done]
            if not live:
                return
            if len(live) <= 0.75 * len(rows):
                cache.keep(live)
                rows, chosen = [rows[slot] for slot in live], [chosen[slot] for slot in live]
            # A finished row that is still here writes the same slot again and is not listened to.
            counts = [0 if row.done else 1 for row in rows]
            tokens = torch.tensor(chosen, device=self.device)[:, None]
            logits = self.model.decode(tokens, cache, counts)

    def _prefill(
        self, rows: list[_Row], prompts: Sequence[Sequence[int]]
    ) -> tuple[KVCache, Tensor]:
        lengths = [row.length for row in rows]
        capacity = max(row.length + row.limit for row in rows)
        dtype = self.dtype or self.model.head_weight.dtype
        cache = KVCache(self.model.config, len(rows), capacity, self.device, dtype)
        tokens = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for slot, row in enumerate(rows):
            tokens[slot, : row.length] = torch.tensor(prompts[row.index])
        return cache, self.model.decode(tokens.to(self.device), cache, lengths)

    def _row(self, index: int, prompt: Sequence[int], max_new_tokens: int) -> _Row:
        if not prompt:
            raise ConfigError(
                f"prompt {index} is empty, and a model needs a token to continue;"
                " begin it with the tokenizer's BOS."
            )
        room = max_new_tokens
        if self.model.max_positions is not None:
            room = min(room, self.model.max_positions - len(prompt))
        return _Row(index, len(prompt), room)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def eager() -> AbstractContextManager[object]:
    """No compiled block runs inside."""
    # Blocks may be compiled for training's one shape; here every step has another, and each would
    # compile again. Where nothing was compiled, the compiler need not even be imported.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def _take(row: _Row, token: int, stop_ids: Collection[int], on_token: OnToken | None) -> None:
    if row.done:
        return
    if token in stop_ids:
        row.stop_id = token
        return
    row.ids.append(token)
    if on_token is not None:
        row.is_cut = bool(on_token(row.index, token))
