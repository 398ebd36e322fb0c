"""Keys and values of the tokens so far, preallocated, with a length per row.

Key slot s of a row holds its position s, so ragged rows need no shifting: a prompt padded on the
right writes rubbish behind its end, which no mask shows and the next tokens overwrite. Rejected:
padding on the left (positions then depend on the batch) and growing by concatenation (a copy of
everything at each token).

Shapes: L layers, B rows, K key/value heads, S slots, D head width, t new tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foundling.config.model import ModelConfig


class KVCache:
    """Implements `foundling.model.attention.Cache`."""

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (config.layers, rows, config.num_kv_heads, capacity, config.head_width)
        # Zeros, not garbage: a masked NaN is still a NaN after it is multiplied by zero.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = [0] * rows
        """Real tokens of each row; on the host, so that asking for them never waits."""
        self._refresh()

    @property
    def capacity(self) -> int:
        """Positions a row has room for."""
        return self.keys.shape[3]

    def positions(self, width: int) -> Tensor:
        """Positions [B, width] of the next `width` tokens."""
        return self._starts[:, None] + torch.arange(width, device=self._starts.device)

    def reach(self, width: int) -> int:
        """Slots in use once the next `width` tokens are written."""
        return max(self.lengths) + width

    def mask(self, width: int, window: int = 0) -> Tensor | None:
        """True where a new token may look, [B, 1, t, S]; None where causality says it all.

        A window hides what is `window` or more positions back; 0 hides nothing.
        """
        fresh, level = max(self.lengths) == 0, min(self.lengths) == max(self.lengths)
        narrow = 0 < window < self.reach(width)
        if not narrow and (fresh or (level and width == 1)):
            return None
        slots = torch.arange(self.reach(width), device=self._starts.device)
        places = self.positions(width)[:, None, :, None]
        seen = slots <= places
        return seen & (slots > places - window) if narrow else seen

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v [B, K, t, D] at the next positions; return [B, K, S, D] up to the reach."""
        width = k.shape[2]
        end = self.reach(width)
        if end > self.capacity:  # an assignment to an empty slice would lose the token silently
            raise RuntimeError(f"{end} positions do not fit a cache of {self.capacity}")
        keys, values = self.keys[layer], self.values[layer]
        if min(self.lengths) == max(self.lengths):
            keys[:, :, end - width : end] = k
            values[:, :, end - width : end] = v
        else:
            rows, slots = self._rows[:, None], self.positions(width)
            # Advanced indices around a slice come first: the values are wanted as [B, t, K, D].
            keys[rows, :, slots] = k.transpose(1, 2).to(keys.dtype)
            values[rows, :, slots] = v.transpose(1, 2).to(values.dtype)
        return keys[:, :, :end].to(k.dtype), values[:, :, :end].to(v.dtype)

    def advance(self, counts: Sequence[int]) -> None:
        """Count the first `counts[r]` of the tokens just written to row r as real."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._refresh()

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        index = torch.tensor(rows, device=self.keys.device)
        self.keys, self.values = self.keys[:, index], self.values[:, index]
        self.lengths = [self.lengths[row] for row in rows]
        self._refresh()

    def _refresh(self) -> None:
        device = self.keys.device
        self._starts = torch.tensor(self.lengths, device=device)
        self._rows = torch.arange(len(self.lengths), device=device)
