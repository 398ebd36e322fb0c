"""Keys and values of a prompt that several answers share: filled once, then read by all of them.

First the prompts go through the model, padded on the right; then the answers of each prompt, laid
end to end in one row, each seeing the prompt and itself alone. So a question with four answers
costs its prompt once instead of four times. Rejected: the cache of `generate`, repeated for every
answer (four copies of the keys), and one row with prompt and answers under a full mask (the prompt
would lose the causal fast path).

Shapes: B prompts, P longest prompt, t longest row of answers, K key/value heads, D head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foundling.model.kernels import MaskSpec, dense_mask


class PrefixCache:
    """Implements `foundling.model.Cache` for one fill and one reading."""

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
