"""Decoding by CUDA graphs: one launch a step, for a ladder of batch sizes.

A decode step is some two hundred small kernels, and a host takes longer to launch them than the
GPU to run them. A graph holds the whole step, from token ids to drawn tokens; what changes from
step to step lies in fixed buffers that are filled before the launch. The drawn tokens are the next
step's, so a few launches follow each other before the host looks at them: a request that ended in
between has drawn for nothing. A batch runs in the smallest graph that holds it, and its idle rows
write to the block of nobody.

Shapes: B rows of a graph, W blocks of the longest request.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foundling.generate.kv_cache import BlockManager, KVCache
from foundling.generate.sampling import Sampling, signed
from foundling.generate.scheduler import ScheduledSequence
from foundling.model.transformer import Transformer
from foundling.plan.serving import BLOCK

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
MOST_ROWS = SIZES[-1]
"""Requests that decode in a graph; more go through the model without."""
LONGEST_IN_GRAPH = 1 << 15
"""Tokens of a request up to which it decodes in a graph."""
AHEAD = 4
"""Launches that follow each other: what the host does in between costs a quarter."""


class GraphStep:
    """What the model asks of a cache, read from the graph's fixed buffers."""

    def __init__(
        self,
        cache: KVCache,
        windows: Sequence[int],
        size: int,
        buffers: "_Buffers",
        group: int,
        reach: int,
    ) -> None:
        """For `size` rows at positions below `reach`; `group` query heads share a key/value
        head."""
        from foundling.model.kernels.paged_attention import QueryTiles, tile_queries

        self.reach = reach
        self._cache, self._windows, self._buffers, self._size = cache, windows, buffers, size
        device = buffers.tokens.device
        requests, firsts, rows = tile_queries([1] * size, group)
        self._tiles = QueryTiles(
            torch.tensor(requests, dtype=torch.int32, device=device),
            torch.tensor(firsts, dtype=torch.int32, device=device),
            rows,
        )
        self._starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(size, device=device)

    def begin(self) -> None:
        """Where this step's tokens are stored; computed in the graph, once for all layers."""
        places = self._buffers.positions[: self._size]
        self._lengths = (places + 1).to(torch.int32)
        self._slots = [
            table[self._rows, places // BLOCK].long() * BLOCK + places % BLOCK
            for table in self._buffers.tables
        ]

    def positions(self) -> Tensor:
        """Positions [1, B]."""
        return self._buffers.positions[None, : self._size]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [1, B, K, D]; mixed values [1, B, H, D] of q."""
        from foundling.model.kernels.paged_attention import paged_attention

        group = self._cache.groups[layer]
        self._cache.store(layer, self._slots[group], k[0], v[0])
        return paged_attention(
            q[0],
            self._cache.keys[layer],
            self._cache.values[layer],
            tables=self._buffers.tables[group],
            starts=self._starts,
            lengths=self._lengths,
            tiles=self._tiles,
            block=BLOCK,
            window=self._windows[group],
        )[None]


class _Buffers:
    """What the graphs read, and its pinned copies on the host."""

    def __init__(self, rows: int, groups: int, device: torch.device) -> None:
        def on_device(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        def on_host(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, pin_memory=True)

        # One copy a launch: token ids, positions, seeds, temperatures (as bits) and the number of
        # the launch lie together.
        self.numbers = on_device(5, rows, dtype=torch.int64)
        self.host_numbers = on_host(5, rows, dtype=torch.int64)
        self.tables = [
            on_device(rows, LONGEST_IN_GRAPH // BLOCK, dtype=torch.int32) for _ in range(groups)
        ]
        self.host_tables = [
            on_host(rows, LONGEST_IN_GRAPH // BLOCK, dtype=torch.int32) for _ in self.tables
        ]
        # Token ids and log-probabilities of each launch.
        self.drawn = on_device(2, AHEAD, rows, dtype=torch.float64)
        self.host_drawn = on_host(2, AHEAD, rows, dtype=torch.float64)

    @property
    def tokens(self) -> Tensor:
        return self.numbers[0]

    @property
    def positions(self) -> Tensor:
        return self.numbers[1]

    @property
    def seeds(self) -> Tensor:
        return self.numbers[2]

    @property
    def temperatures(self) -> Tensor:
        return self.numbers[3].view(torch.float64)

    @property
    def launch(self) -> Tensor:
        return self.numbers[4, :1]


class DecodeGraphs:
    """One graph for each batch size that was met, captured when it is met."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        blocks: BlockManager,
        most: int,
        device: torch.device,
    ) -> None:
        """For up to `most` rows."""
        self._model, self._cache, self._windows = model, cache, blocks.windows
        self._sizes = [*[size for size in SIZES if size < most], most]
        self._buffers = _Buffers(most, len(blocks.windows), device)
        self._group = model.config.heads // model.config.num_kv_heads
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._steps: dict[int, GraphStep] = {}
        self._pool: Any = None
        self._rows: list[tuple[ScheduledSequence, int, int]] = []
        self._size = 0

    def run(
        self,
        sequences: Sequence[ScheduledSequence],
        samplings: Sequence[Sampling],
        launches: int = 1,
    ) -> tuple[list[list[int]], list[list[float]], Tensor]:
        """The next tokens of these sequences by temperature and seed, launch by launch, their
        log-probabilities, and the last logits [B, V], which the next launch overwrites."""
        count = len(sequences)
        size = next(size for size in self._sizes if size >= count)
        if size not in self._graphs:
            self._graphs[size] = self._captured(size)
        self._fill(sequences, samplings, size)
        graph, logits = self._graphs[size]
        for _ in range(launches):
            graph.replay()
        buffers = self._buffers
        buffers.host_drawn.copy_(buffers.drawn, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        drawn = buffers.host_drawn[:, :launches, :count]
        return drawn[0].long().tolist(), drawn[1].tolist(), logits[:count]

    def _fill(
        self, sequences: Sequence[ScheduledSequence], samplings: Sequence[Sampling], size: int
    ) -> None:
        buffers, count = self._buffers, len(sequences)
        numbers = buffers.host_numbers.numpy()
        numbers[0, :count] = [sequence.ids[-1] for sequence in sequences]
        numbers[1, :count] = [sequence.computed for sequence in sequences]
        numbers[2, :count] = [signed(sampling.seed) for sampling in samplings]
        numbers[3].view(np.float64)[:count] = [sampling.temperature for sampling in samplings]
        numbers[:, count:size] = numbers[4] = 0
        buffers.numbers.copy_(buffers.host_numbers, non_blocking=True)
        # A table changes when a row is another request's, or has a block more: seldom.
        rows = [
            (sequence, sequence.table.version, len(sequence.table.blocks[0]))
            for sequence in sequences
        ]
        if rows == self._rows and size == self._size:
            return
        wide = max(length for _, _, length in rows)
        for group, host in enumerate(buffers.host_tables):
            table = host.numpy()
            for row, sequence in enumerate(sequences):
                mine = sequence.table.blocks[group]
                table[row, : len(mine)] = mine
            table[count:size] = 0
            buffers.tables[group][:size, :wide].copy_(host[:size, :wide], non_blocking=True)
        self._rows, self._size = rows, size

    def _captured(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        step = self._steps[size] = GraphStep(
            self._cache,
            self._windows,
            size,
            self._buffers,
            self._group,
            self._model.max_positions or LONGEST_IN_GRAPH,
        )
        # The steps before the capture write keys and values: to nobody's block.
        for table in self._buffers.tables:
            table[:size] = 0
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, and fills every cache, before the capture
            for _ in range(2):
                self._buffers.numbers.zero_()
                self._step(step, size)
        self._buffers.numbers.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._step(step, size)
        self._pool = self._pool or graph.pool()
        return graph, logits

    def _step(self, step: GraphStep, size: int) -> Tensor:
        from foundling.model.kernels.draw_kernel import draw_on_cuda

        buffers = self._buffers
        step.begin()
        at = torch.arange(size, device=buffers.tokens.device)
        logits = self._model.logits(self._model.states_at(buffers.tokens[None, :size], at, step))
        places = buffers.positions[:size]
        places += 1  # where the new token will stand: the next launch's position
        drawn, logprobs = draw_on_cuda(
            logits, buffers.temperatures[:size], buffers.seeds[:size], places
        )
        both = torch.stack([drawn.double(), logprobs.double()])[:, None]
        buffers.drawn[:, :, :size].index_copy_(1, buffers.launch, both)
        # A row that is broken goes on with some token; the host ends it.
        buffers.tokens[:size] = drawn.clamp(min=0)
        buffers.launch.add_(1)
        return logits
