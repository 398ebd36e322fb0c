"""Keys and values in blocks: which block belongs to whom, and the tensors that they lie in.

A block holds the keys and values of BLOCK tokens of one request in every layer of a group; layers
with the same window are a group and have blocks of their own, so that windowed layers can give
back what they no longer see. Full blocks are known by a digest of all tokens up to their end.
A request whose prompt begins with the same tokens shares them, and a block that nobody uses stays
known until its room is needed: the one that was freed first goes first. Rejected: a radix tree of
prefixes (the chain of digests finds the same blocks with a dictionary).

Block 0 belongs to nobody: padding is written there.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foundling.config.errors import ConfigError
from foundling.plan.serving import BLOCK, blocks_seen
from foundling.runtime.console import size
from foundling.runtime.device import has_triton, is_out_of_memory, memory_free

NOBODY = 0


class BlockPool:
    """The blocks of one group of layers: free ones, users of the others, digests of full ones."""

    def __init__(self, count: int) -> None:
        """`count` blocks beside block 0."""
        self.count = count
        self._users = [0] * (count + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count + 1))
        self._digests: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    def take(self) -> int | None:
        """A block for one user, the longest free; None if there is none."""
        if not self._free:
            return None
        block, _ = self._free.popitem(last=False)
        if (digest := self._digests.pop(block, None)) is not None:
            del self._known[digest]
        self._users[block] = 1
        return block

    def find(self, digest: bytes) -> int | None:
        """The block with these contents, if there is one."""
        return self._known.get(digest)

    def share(self, block: int) -> None:
        """One more user of a block that was found."""
        if not self._users[block]:
            del self._free[block]
        self._users[block] += 1

    def release(self, block: int) -> None:
        """One user fewer; the last one leaves the block free, and its contents known."""
        self._users[block] -= 1
        if not self._users[block]:
            self._free[block] = None

    def name(self, block: int, digest: bytes) -> None:
        """Say what a full block contains; of two with the same contents one is known."""
        if digest not in self._known and block not in self._digests:
            self._known[digest] = block
            self._digests[block] = digest

    def forget(self) -> None:
        """No block's contents are known any more."""
        self._known.clear()
        self._digests.clear()


@dataclass
class BlockTable:
    """The blocks of one request, group by group."""

    blocks: list[list[int]]
    """Of each group, by place: block b holds positions b * BLOCK and on. NOBODY where a window has
    left a block behind."""
    digests: list[bytes] = field(default_factory=list)
    """Of the request's full blocks, as far as they were asked for."""
    named: int = 0
    """Full blocks whose contents the pools know."""
    left_behind: list[int] = field(default_factory=list)
    """Of each group, blocks that its window has passed."""
    version: int = 0
    """Goes up when all blocks were given back: those of a later version are others."""


class BlockManager:
    """Gives blocks of all groups to requests, shares prefixes and takes blocks back."""

    def __init__(
        self,
        windows: Sequence[int],
        counts: Sequence[int],
        *,
        shares: bool = True,
        capacity: int = 0,
    ) -> None:
        """`windows` of the groups (0: all tokens are seen) and the blocks that each has;
        `capacity` where every group has a window, and no number of blocks ends a request."""
        self.windows = tuple(windows)
        self.pools = [BlockPool(count) for count in counts]
        self.shares = shares
        whole = [count for count, window in zip(counts, windows, strict=True) if not window]
        self.capacity = BLOCK * min(whole) if whole else capacity or BLOCK * min(counts)
        """Tokens of all requests together, and so of the longest one, that there is room for."""

    @property
    def used(self) -> int:
        """Blocks that belong to requests."""
        return sum(pool.count - pool.free for pool in self.pools)

    def new_table(self) -> BlockTable:
        """Of a request that has nothing yet."""
        return BlockTable([[] for _ in self.pools], left_behind=[0] * len(self.pools))

    def find_prefix(self, table: BlockTable, ids: Sequence[int], most: int) -> int:
        """Share the longest known beginning of `ids`, at most `most` tokens; how many it has."""
        if not self.shares:
            return 0
        full = most // BLOCK
        _digest(table, ids, full)
        count = self._known_blocks(table.digests[:full])
        for group, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            unseen = _unseen(window, count * BLOCK)
            table.blocks[group] = [NOBODY] * unseen
            table.left_behind[group] = unseen
            for digest in table.digests[unseen:count]:
                block = pool.find(digest)
                assert block is not None
                pool.share(block)
                table.blocks[group].append(block)
        table.named = count
        return count * BLOCK

    def _known_blocks(self, digests: Sequence[bytes]) -> int:
        """Blocks of the longest beginning of which every group knows what later tokens see."""
        best, in_a_row = 0, [0] * len(self.pools)
        for count, digest in enumerate(digests, 1):
            for group, pool in enumerate(self.pools):
                in_a_row[group] = 0 if pool.find(digest) is None else in_a_row[group] + 1
                if not in_a_row[group] and not self.windows[group]:
                    return best
            if all(
                known >= count - _unseen(window, count * BLOCK)
                for known, window in zip(in_a_row, self.windows, strict=True)
            ):
                best = count
        return best

    def reserve(self, table: BlockTable, computed: int, length: int) -> bool:
        """Room for `length` tokens, of which `computed` are stored; blocks that no window sees any
        more are given back first. False, and nothing is taken, if room is missing."""
        for group, window in enumerate(self.windows):
            if window:
                self._leave_behind(table, group, _unseen(window, computed))
        wanted = -(-length // BLOCK)
        if len(table.blocks[0]) >= wanted:
            return True
        short = [wanted - len(blocks) for blocks in table.blocks]
        if any(pool.free < more for pool, more in zip(self.pools, short, strict=True)):
            return False
        for pool, blocks, more in zip(self.pools, table.blocks, short, strict=True):
            for _ in range(more):
                block = pool.take()
                assert block is not None
                blocks.append(block)
        return True

    def could_reserve(self, table: BlockTable, length: int) -> bool:
        """Whether there is room now for so many tokens in all."""
        groups = zip(self.pools, table.blocks, self.windows, strict=True)
        return all(
            pool.free >= blocks_seen(window, length) - len(blocks)
            for pool, blocks, window in groups
        )

    def name_full(self, table: BlockTable, ids: Sequence[int], length: int) -> None:
        """Say what the blocks up to `length` tokens contain, so that others find them."""
        full = length // BLOCK
        if not self.shares or full <= table.named:
            return
        _digest(table, ids, full)
        for number in range(table.named, full):
            for pool, blocks in zip(self.pools, table.blocks, strict=True):
                if blocks[number] != NOBODY:
                    pool.name(blocks[number], table.digests[number])
        table.named = full

    def release(self, table: BlockTable) -> None:
        """Take everything back, the end first: beginnings, shared most, stay known longest."""
        for pool, blocks in zip(self.pools, table.blocks, strict=True):
            for block in reversed(blocks):
                if block != NOBODY:
                    pool.release(block)
            blocks.clear()
        table.left_behind = [0] * len(self.pools)
        table.named = 0
        table.version += 1

    def forget(self) -> None:
        """No prefix is known any more: after a step that failed, or with other weights."""
        for pool in self.pools:
            pool.forget()

    def _leave_behind(self, table: BlockTable, group: int, end: int) -> None:
        blocks = table.blocks[group]
        for number in range(table.left_behind[group], min(end, len(blocks))):
            self.pools[group].release(blocks[number])
            blocks[number] = NOBODY
            table.left_behind[group] = number + 1


def _unseen(window: int, length: int) -> int:
    """Full blocks of `length` tokens that no later token sees."""
    return max(0, length - window + 1) // BLOCK if window else 0


def _digest(table: BlockTable, ids: Sequence[int], full: int) -> None:
    """The digests of the first `full` blocks: each of its tokens and of all before them."""
    for number in range(len(table.digests), full):
        before = table.digests[number - 1] if number else b""
        tokens = array("q", ids[number * BLOCK : (number + 1) * BLOCK]).tobytes()
        table.digests.append(hashlib.blake2b(before + tokens, digest_size=16).digest())


class KVCache:
    """The tensors that the blocks stand for, layer by layer: [slots, K, D] keys and values."""

    def __init__(
        self,
        groups: Sequence[int],
        counts: Sequence[int],
        kv_heads: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`groups` names each layer's group, `counts` each group's blocks (block 0 comes on top);
        this process has `kv_heads` of them, `width` wide."""
        self.groups = tuple(groups)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        try:
            for group in groups:
                shape = (counts[group] + 1) * BLOCK, kv_heads, width
                # Zeros, not garbage: a masked NaN is still a NaN after it is multiplied by zero.
                self.keys.append(torch.zeros(shape, device=device, dtype=dtype))
                self.values.append(torch.zeros(shape, device=device, dtype=dtype))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.keys, self.values = [], []
            slot = 2 * BLOCK * kv_heads * width * dtype.itemsize
            needed, free = slot * sum(counts[group] + 1 for group in groups), memory_free(device)
            fits = BLOCK * max(counts) * free // needed
            raise ConfigError(
                f"a cache of {BLOCK * max(counts):,} tokens takes {size(needed)}, and {size(free)}"
                f" are free: at most {fits:,} tokens fit. Give it fewer bytes."
            ) from None

    @property
    def bytes(self) -> int:
        """Of all keys and values."""
        return sum(part.nbytes for part in [*self.keys, *self.values])

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys and values [N, K, D] into these slots [N]."""
        keys, values = self.keys[layer], self.values[layer]
        k, v = k.to(keys.dtype), v.to(keys.dtype)
        if keys.device.type == "cuda" and has_triton():
            from foundling.model.kernels.paged_attention import store_paged

            store_paged(keys, values, slots, k, v)
        else:
            keys[slots], values[slots] = k, v
