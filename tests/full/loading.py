"""The loader at full size: tokens a second, a seek to a trillion, and what a step waits for it."""

import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

from foundling.config.data import DataConfig
from foundling.config.load import load_config
from foundling.data.batch_reader import BatchReader
from foundling.data.build.build import build
from foundling.data.dataset import MAX_OPEN, SHARDS, DataSet
from foundling.data.open_source import open_source, training_texts
from foundling.data.order import reopen_order
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.tokenizer.bpe_trainer import train_tokenizer
from foundling.train.loop import train
from tests.full.loader_speed import load_rate, seek_s

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "data"))
from stand_ins import write_random, write_sparse

SEQ_LEN, ROWS = 2048, 16
BARS = {"concat": 50e6, "bestfit": 20e6}
"""Tokens a second of one process, boundaries and (of chats) masks included."""


def loading() -> dict[str, Any]:
    """The loader's rates at sequence 2048, a seek to 10^12 tokens, and its part of a step."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        return {**_rates(folder), **_trillion(folder), "waiting_share": _waiting(folder)}


def _rates(folder: Path) -> dict[str, Any]:
    found = {}
    for kind in ("text", "chat"):
        write_random(folder / kind, shards=8, documents=5000, chat=kind == "chat")
        sources = {"a": DataSet(folder / kind)}
        for packing in ("concat", "bestfit", "bucket", "pad"):
            data = DataConfig(
                sources={"a": 1.0},
                packing=packing,  # type: ignore[arg-type]
                bucket_tokens=ROWS * SEQ_LEN,
            )
            rate = load_rate(sources, data, seq_len=SEQ_LEN, rows=ROWS, seconds=3).tokens_per_s
            found[f"{kind} {packing} tokens/s"] = round(rate)
            assert rate > BARS.get(packing, 0), f"{kind} {packing}: {rate / 1e6:.1f}M tokens/s"
    return found


def _trillion(folder: Path) -> dict[str, Any]:
    write_sparse(folder / "trillion", shards=10_000, documents=100_000, length=1_010)
    tracemalloc.start()
    held = DataSet(folder / "trillion")
    memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del held
    began = time.perf_counter()
    sources = {"a": DataSet(folder / "trillion")}
    opened = time.perf_counter() - began
    order = reopen_order(
        (),
        sources,
        DataConfig(sources={"a": 1.0}, packing="concat"),
        seed=1,
        seq_len=SEQ_LEN,
        steps=1,
        global_batch_tokens=ROWS * SEQ_LEN,
    )
    step = 10**12 // (ROWS * SEQ_LEN)
    # The file was only just written: the first batch of all finds none of it in the page cache.
    cold = seek_s(BatchReader(sources, order, micro_tokens=ROWS * SEQ_LEN), 0)
    seeks = []
    for number in range(40):
        loader = BatchReader(sources, order, micro_tokens=ROWS * SEQ_LEN)
        seeks.append(seek_s(loader, step + number))
        assert len(SHARDS) <= MAX_OPEN
    usual = statistics.median(seeks)
    assert usual < 0.05, f"a seek took {usual:.3f} s"
    assert memory < 200e6, f"the manifest is held in {memory / 1e6:.0f} MB"
    return {
        "open of 10,000 shards, s": round(opened, 3),
        "median of 40 seeks with first batch, s": round(usual, 4),
        "slowest of them, s": round(max(seeks), 4),
        "first batch of the process, s": round(cold, 4),
        "manifest held in MB": round(memory / 1e6, 1),
    }


def _waiting(folder: Path) -> float:
    """The share of its steps' time that the demo's model waits for data."""
    texts = training_texts(["hamlet"], max_bytes=1_000_000)
    source = open_source("hamlet")
    tokenizer = train_tokenizer(texts, 2048)
    build(source, tokenizer, folder / "hamlet", name="hamlet", kind="text", max_tokens=1_000_000)
    config = load_config("hamlet", {"train.horizon": "20"})
    config = config.replace(
        data={"sources": {str(folder / "hamlet"): 1.0}},
        eval={"every": 0, "prompts": ()},
    )
    run = RunDir(folder / "run")
    train(config, run)
    lines = read_lines(run.metrics_path)[5:]
    share = sum(line["data_wait_s"] for line in lines) / sum(line["step_s"] for line in lines)
    assert share < 0.01, f"{share:.2%} of the steps' time is waiting for data"
    return round(share, 5)
