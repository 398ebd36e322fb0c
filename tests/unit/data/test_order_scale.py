"""A trillion tokens in ten thousand shards: opened, sought and read as if it were small."""

import time
import tracemalloc
from pathlib import Path

import pytest
from stand_ins import write_random, write_sparse

from foundling.config.data import DataConfig, packing_spec_of
from foundling.config.packing_spec import shard_key, write_size_cache
from foundling.data.batch_reader import BatchReader
from foundling.data.dataset import MAX_OPEN, PLANS, SHARDS, DataSet
from foundling.data.order import reopen_order
from foundling.data.packing import pack
from tests.full.loader_speed import load_rate

SHARDS_THERE = 10_000
TRILLION = 10**12
ROWS, SEQ_LEN = 16, 2048


@pytest.fixture(scope="module")
def trillion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trillion") / "data"
    write_sparse(folder, shards=SHARDS_THERE, documents=100_000, length=1_010)
    return folder


def test_opening_ten_thousand_shards_is_quick_and_small(trillion: Path) -> None:
    tracemalloc.start()
    began = time.thread_time()
    data = DataSet(trillion)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.thread_time() - began < 5  # tracing slows it down five times
    assert held < 200e6 / 10
    assert data.manifest.train_tokens > TRILLION


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_seeking_to_a_trillion_tokens_and_the_first_batch_take_no_time(
    trillion: Path, packing: str
) -> None:
    data = DataSet(trillion)
    if packing == "bestfit":
        # Packed before, as a first run leaves it: here all shards are alike.
        spec = packing_spec_of(SEQ_LEN, "bestfit")
        size = pack(data.shard(0).offsets, spec).size
        write_size_cache(trillion, spec, {shard_key(info): size for info in data.shards})
    sources = {"a": data}
    order = reopen_order(
        (),
        sources,
        DataConfig(sources={"a": 1.0}, packing=packing),  # type: ignore[arg-type]
        seed=1,
        seq_len=SEQ_LEN,
        steps=1,
        global_batch_tokens=ROWS * SEQ_LEN,
    )
    taken = []
    there = TRILLION // (ROWS * SEQ_LEN)
    for step in (there, there + 1) * 3:  # the least counts: other work slows some of them
        if packing == "bestfit":
            BatchReader(sources, order, micro_tokens=ROWS * SEQ_LEN).step(step)  # leaves its plans
        SHARDS.clear()
        PLANS.clear()
        began = time.thread_time()
        (batch,) = BatchReader(sources, order, micro_tokens=ROWS * SEQ_LEN).step(step)
        taken.append(time.thread_time() - began)
        assert batch.counts.tokens > 0.99 * ROWS * SEQ_LEN
    # The thread's own time, because others use the machine; the full suite looks at the wall's.
    assert min(taken) < 0.05, taken


def test_no_more_shards_are_open_than_allowed_whatever_the_sources(trillion: Path) -> None:
    sources = {"a": DataSet(trillion), "b": DataSet(trillion)}
    data = DataConfig(sources={"a": 1.0, "b": 1.0}, packing="concat")
    order = reopen_order(
        (), sources, data, seed=1, seq_len=64, steps=1, global_batch_tokens=ROWS * 64
    )
    loader = BatchReader(sources, order, micro_tokens=ROWS * 64)
    seen = set()
    for step in range(4 * MAX_OPEN // ROWS):
        loader.step(step)
        seen |= _mapped(trillion)
        assert len(_mapped(trillion)) <= MAX_OPEN
    assert len(SHARDS) == MAX_OPEN
    assert len(seen) > MAX_OPEN


def _mapped(folder: Path) -> set[str]:
    """Shards of a folder that this process has mapped, as the kernel sees it."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc to look into")
    lines = maps.read_text().splitlines()
    return {line.split()[-1] for line in lines if str(folder) in line and ".arrow" in line}


@pytest.mark.parametrize(("packing", "chat"), [("concat", False), ("bestfit", True)])
def test_the_loader_is_not_ten_times_slower_than_it_was(
    tmp_path: Path, packing: str, chat: bool
) -> None:
    """The real bars are the full suite's; a busy machine must not fail this one."""
    write_random(tmp_path / "data", shards=2, documents=2000, chat=chat)
    sources = {"a": DataSet(tmp_path / "data")}
    data = DataConfig(sources={"a": 1.0}, packing=packing)  # type: ignore[arg-type]
    rate = load_rate(sources, data, seconds=0.3)
    assert rate.tokens_per_thread_s > (10e6 if packing == "concat" else 5e6)
