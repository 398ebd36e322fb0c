"""More rows for a larger vocabulary.

A new token begins as the mean of all tokens that were trained: in the embedding it says nothing in
particular, and in the head it is neither likely nor impossible. Random rows would be far from the
others, which have moved; rows of zeros would get a logit of zero, which after training may be far
above or below the others.
"""

from collections.abc import Mapping

from torch import Tensor

TABLES = ("embed.weight", "head.weight", "value_embeds.")
"""How the names of weights begin that have a row for each token."""


def grow_vocabulary(weights: Mapping[str, Tensor], *, used: int, size: int) -> dict[str, Tensor]:
    """Weights of a model of `size` tokens: the first `used` rows of each table as they were, and
    every row after them (new ones, and rows that no token had) the mean of those."""
    return {
        name: _grown(weight, used, size) if name.startswith(TABLES) else weight
        for name, weight in weights.items()
    }


def _grown(weight: Tensor, used: int, size: int) -> Tensor:
    if not 0 < used <= len(weight) <= size:
        raise ValueError(f"{used} rows in use of {len(weight)} cannot grow to {size}")
    trained = weight[:used]
    larger = weight.new_empty(size, weight.shape[1])
    larger[:used] = trained
    # Summed in double precision: a hundred thousand bfloat16 rows would lose the small ones.
    larger[used:] = trained.double().mean(dim=0).to(weight.dtype)
    return larger
