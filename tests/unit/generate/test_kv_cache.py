"""The cache gives what a full pass gives, whatever the lengths of its rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundling.config.model import ModelConfig
from foundling.generate.kv_cache import KVCache
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=61, dim=24, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_dim=32, init_std=0.3
)
MODEL = Transformer(CONFIG)
init_weights(MODEL, 2)
MODEL.double().requires_grad_(False)


def fresh(rows: int, capacity: int = 40) -> KVCache:
    return KVCache(CONFIG, rows, capacity, torch.device("cpu"), torch.float64)


@settings(max_examples=30, deadline=None)
@given(
    feeds=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5
    ),
    seed=st.integers(0, 99),
)
def test_any_sequence_of_ragged_feeds_equals_one_full_pass(
    feeds: list[tuple[int, int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = fresh(3)
    texts: list[list[int]] = [[], [], []]
    for counts in feeds:
        # At least one column, and padding that must not matter.
        tokens = torch.randint(61, (3, max(1, *counts)), generator=generator)
        logits = MODEL.decode(tokens, cache, counts)
        for row, count in enumerate(counts):
            texts[row] += tokens[row, :count].tolist()
            if count:
                full = MODEL(torch.tensor([texts[row]]))[0, -1]
                assert torch.allclose(logits[row], full, atol=1e-10)
    assert cache.lengths == [len(text) for text in texts]


def test_kept_rows_go_on_as_if_alone() -> None:
    tokens = torch.randint(61, (4, 6), generator=torch.Generator().manual_seed(1))
    cache = fresh(4)
    MODEL.decode(tokens, cache, [6, 3, 5, 1])
    cache.keep([2, 1])
    assert cache.lengths == [5, 3]
    logits = MODEL.decode(torch.tensor([[7], [8]]), cache)
    for row, text in ((0, [*tokens[2, :5].tolist(), 7]), (1, [*tokens[1, :3].tolist(), 8])):
        assert torch.allclose(logits[row], MODEL(torch.tensor([text]))[0, -1], atol=1e-10)


def test_a_mask_is_made_only_where_it_is_needed() -> None:
    cache = fresh(2)
    assert cache.mask(5) is None
    cache.advance([4, 4])
    assert cache.mask(1) is None
    assert cache.mask(2) is not None
    cache.advance([1, 0])
    mask = cache.mask(1)
    assert mask is not None
    assert mask[:, 0, 0].tolist() == [[True] * 6, [True] * 5 + [False]]


def test_a_full_cache_refuses_to_lose_a_token() -> None:
    cache = fresh(1, capacity=4)
    MODEL.decode(torch.zeros(1, 4, dtype=torch.long), cache)
    with pytest.raises(RuntimeError, match="5 positions do not fit a cache of 4"):
        MODEL.decode(torch.zeros(1, 1, dtype=torch.long), cache)
