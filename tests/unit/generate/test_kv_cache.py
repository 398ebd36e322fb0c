"""Blocks are given out once, shared by their contents, and all come back."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundling.config.model import ModelConfig
from foundling.generate.kv_cache import NOBODY, BlockManager, BlockPool
from foundling.plan.serving import BLOCK, block_counts, cache_groups


def test_a_block_is_given_to_one_user_until_all_have_left() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    assert {first, second} == {1, 2}
    assert pool.take() is None
    assert first is not None
    pool.share(first)
    pool.release(first)
    assert pool.free == 0
    pool.release(first)
    assert pool.take() == first


def test_contents_are_found_until_the_room_is_needed_oldest_first() -> None:
    pool = BlockPool(2)
    for name in (b"a", b"b"):
        block = pool.take()
        assert block is not None
        pool.name(block, name)
        pool.release(block)
    assert pool.find(b"a") == 1
    pool.take()
    assert pool.find(b"a") is None
    assert pool.find(b"b") == 2


def test_equal_beginnings_share_blocks() -> None:
    manager = BlockManager([0], [10])
    ids = list(range(50))
    first, second = manager.new_table(), manager.new_table()
    assert manager.reserve(first, 0, 50)
    manager.name_full(first, ids, 50)
    assert manager.find_prefix(second, [*ids[:40], 99], 40) == 2 * BLOCK
    assert second.blocks[0] == first.blocks[0][:2]
    assert manager.used == 4
    manager.release(first)
    assert manager.used == 2
    manager.release(second)
    assert manager.used == 0
    again = manager.new_table()
    assert manager.find_prefix(again, ids, 49) == 3 * BLOCK


def test_another_beginning_shares_nothing() -> None:
    manager = BlockManager([0], [10])
    table, other = manager.new_table(), manager.new_table()
    manager.reserve(table, 0, 32)
    manager.name_full(table, list(range(32)), 32)
    assert manager.find_prefix(other, [7, *range(1, 32)], 32) == 0  # though block 2 is alike
    assert BlockManager([0], [10], shares=False).find_prefix(other, list(range(32)), 32) == 0


def test_a_window_keeps_only_what_it_sees() -> None:
    manager = BlockManager([0, 20], [20, 20])
    table = manager.new_table()
    for computed in range(200):
        assert manager.reserve(table, computed, computed + 1)
    whole, windowed = table.blocks
    assert NOBODY not in whole
    # Position 199 sees 180 and on: blocks 11 and 12.
    assert [block != NOBODY for block in windowed] == [False] * 11 + [True] * 2
    assert manager.pools[1].free == 20 - 2
    manager.release(table)
    assert [pool.free for pool in manager.pools] == [20, 20]


def test_a_prefix_is_shared_where_the_window_still_has_its_end() -> None:
    manager = BlockManager([0, 20], [20, 20])
    table, ids = manager.new_table(), list(range(100))
    for computed in range(96):
        manager.reserve(table, computed, computed + 1)
        manager.name_full(table, ids, computed + 1)
    other = manager.new_table()
    assert manager.find_prefix(other, ids, 96) == 96
    assert other.blocks[1][:4] == [NOBODY] * 4
    assert other.blocks[1][4:] == table.blocks[1][4:]
    short = manager.new_table()
    manager.release(table)
    for _ in range(20):  # everything of the window that nobody holds is needed elsewhere
        manager.pools[1].take()
    manager.release(other)
    assert manager.find_prefix(short, ids[:60], 48) == 0


def test_a_prefix_that_windows_have_lost_is_looked_for_in_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, length = BlockManager([0, 512], [600, 200]), 4096
    table, ids = manager.new_table(), list(range(length))
    for computed in range(0, length, 256):
        manager.reserve(table, computed, computed + 256)
        manager.name_full(table, ids, computed + 256)
    manager.release(table)
    for _ in range(200):
        manager.pools[1].take()
    looks, find = [0], BlockPool.find

    def counted(self: BlockPool, digest: bytes) -> int | None:
        looks[0] += 1
        return find(self, digest)

    monkeypatch.setattr(BlockPool, "find", counted)
    assert manager.find_prefix(manager.new_table(), ids, length - 1) == 0
    assert looks[0] <= 2 * length // BLOCK


def test_what_does_not_fit_takes_nothing() -> None:
    manager = BlockManager([0, 20], [5, 3])
    table = manager.new_table()
    assert not manager.reserve(table, 0, 4 * BLOCK)
    assert manager.used == 0
    assert table.blocks == [[], []]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), windows=st.sampled_from([(0,), (0, 17), (40,), (0, 5, 33)]))
def test_whatever_happens_every_block_comes_back(seed: int, windows: tuple[int, ...]) -> None:
    rng = random.Random(seed)
    manager = BlockManager(windows, [rng.randint(4, 12) for _ in windows])
    live = []
    for _ in range(60):
        if live and rng.random() < 0.4:
            manager.release(live.pop(rng.randrange(len(live)))[0])
            continue
        ids = [rng.randrange(2) for _ in range(rng.randrange(1, 60))]
        table = manager.new_table()
        known = manager.find_prefix(table, ids, len(ids) - 1)
        assert known <= len(ids) - 1
        if manager.reserve(table, known, len(ids)):
            manager.name_full(table, ids, len(ids))
            live.append((table, ids))
        else:
            manager.release(table)
        for group, pool in enumerate(manager.pools):
            held = [b for t, _ in live for b in t.blocks[group] if b != NOBODY]
            assert pool.count - pool.free == len(set(held))
    for table, _ in live:
        manager.release(table)
    assert [pool.free for pool in manager.pools] == [pool.count for pool in manager.pools]


def test_blocks_are_counted_by_what_layers_see() -> None:
    model = ModelConfig(vocab_size=9, dim=64, layers=4, heads=4, windows=(32, 32, 32, 0))
    windows, groups = cache_groups(model)
    assert (windows, groups) == ([0, 32], [1, 1, 1, 0])
    how = {"kv_heads": 4, "bytes_per_number": 4, "max_running": 4, "step_tokens": 64}
    counts = block_counts(model, windows, 10**9, max_length=1000, **how)
    assert counts == [4 * 64, 4 * 3 + 64 // BLOCK]
    small = block_counts(model, windows, 400_000, max_length=1000, **how)
    block_bytes = 2 * BLOCK * 64 * 4
    used = small[0] * block_bytes + 3 * small[1] * block_bytes
    assert 400_000 - 4 * block_bytes < used <= 400_000
    with pytest.raises(Exception, match="does not hold one block"):
        block_counts(model, windows, 1000, max_length=1000, **how)
