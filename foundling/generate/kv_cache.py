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
from foundling.plan.serving import BLOCK
from foundling.runtime.device import ran_out, triton_is_here

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
    left: list[int] = field(default_factory=list)
    """Of each group, blocks that its window has left behind."""
    version: int = 0
    """Goes up when all blocks were given back: those of a later version are others."""


class BlockManager:
    """Gives blocks of all groups to requests, shares prefixes and takes blocks back."""

    def __init__(self, windows: Sequence[int], counts: Sequence[int], *, shares: bool = True):
        """`windows` of the groups (0: all tokens are seen) and the blocks that each has."""
        self.windows = tuple(windows)
        self.pools = [BlockPool(count) for count in counts]
        self.shares = shares

    @property
    def capacity(self) -> int:
        """Tokens of the longest request that there is room for."""
        whole = [p.count for p, window in zip(self.pools, self.windows, strict=True) if not window]
        return BLOCK * min(whole) if whole else 2**40

    @property
    def used(self) -> int:
        """Blocks that belong to requests."""
        return sum(pool.count - pool.free for pool in self.pools)

    def new_table(self) -> BlockTable:
        """Of a request that has nothing yet."""
        return BlockTable([[] for _ in self.pools], left=[0] * len(self.pools))

    def find_prefix(self, table: BlockTable, ids: Sequence[int], most: int) -> int:
        """Share the longest known beginning of `ids`, at most `most` tokens; how many it has."""
        if not self.shares:
            return 0
        full = most // BLOCK
        _digest(table, ids, full)
        for count in range(self._longest(table.digests[:full]), 0, -1):
            found = [self._run(pool, window, table.digests, count)
                     for pool, window in zip(self.pools, self.windows, strict=True)]  # fmt: skip
            if all(run is not None for run in found):
                for group, run in enumerate(found):
                    assert run is not None
                    for block in run:
                        if block != NOBODY:
                            self.pools[group].share(block)
                    table.blocks[group] = run
                    table.left[group] = run.count(NOBODY)
                table.named = count
                return count * BLOCK
        return 0

    def _longest(self, digests: Sequence[bytes]) -> int:
        """Blocks that all groups without a window know in a row; a bound where all have one."""
        whole = [p for p, window in zip(self.pools, self.windows, strict=True) if not window]
        for count, digest in enumerate(digests):
            if any(pool.find(digest) is None for pool in whole):
                return count
        return len(digests)

    @staticmethod
    def _run(
        pool: BlockPool, window: int, digests: Sequence[bytes], count: int
    ) -> list[int] | None:
        """The blocks of a prefix of `count` blocks that later tokens see; None if one is gone."""
        unseen = max(0, count * BLOCK - window + 1) // BLOCK if window else 0
        run = [pool.find(digest) for digest in digests[unseen:count]]
        return None if None in run else [NOBODY] * unseen + run  # type: ignore[operator]

    def reserve(self, table: BlockTable, computed: int, length: int) -> bool:
        """Room for `length` tokens, of which `computed` are stored; blocks that no window sees any
        more are given back first. False, and nothing is taken, if room is missing."""
        wanted = -(-length // BLOCK)
        if len(table.blocks[0]) >= wanted:
            return True
        for group, window in enumerate(self.windows):
            if window:
                self._leave(table, group, max(0, computed - window + 1) // BLOCK)
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
        wanted = -(-length // BLOCK)
        for pool, blocks, window in zip(self.pools, table.blocks, self.windows, strict=True):
            seen = wanted if not window else min(wanted, -(-window // BLOCK) + 1)
            if pool.free < seen - len(blocks):
                return False
        return True

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
        table.left = [0] * len(self.pools)
        table.named = 0
        table.version += 1

    def forget(self) -> None:
        """No prefix is known any more: after a step that failed, or with other weights."""
        for pool in self.pools:
            pool.forget()

    def _leave(self, table: BlockTable, group: int, end: int) -> None:
        blocks = table.blocks[group]
        for number in range(table.left[group], min(end, len(blocks))):
            self.pools[group].release(blocks[number])
            blocks[number] = NOBODY
        table.left[group] = max(table.left[group], min(end, len(blocks)))


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
            if not ran_out(error):
                raise
            raise ConfigError(
                f"a cache of {BLOCK * max(counts):,} tokens does not fit into memory; give it fewer"
                " bytes or a smaller model."
            ) from None

    @property
    def bytes(self) -> int:
        """Of all keys and values."""
        return sum(part.nbytes for part in [*self.keys, *self.values])

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys and values [N, K, D] into these slots [N]."""
        keys, values = self.keys[layer], self.values[layer]
        k, v = k.to(keys.dtype), v.to(keys.dtype)
        if keys.device.type == "cuda" and triton_is_here():
            from foundling.model.kernels.paged_attention import store_paged

            store_paged(keys, values, slots, k, v)
        else:
            keys[slots], values[slots] = k, v
