"""A build that goes on beside a training: shards that come one by one, and a look that finds what
another run found."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from foundling.config.data_manifest import Manifest
from foundling.data.build.build import build
from foundling.data.open_source import open_source
from foundling.data.segments import Segment
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.train import dataloader
from foundling.train.dataloader import read_data_order

ALL = 99
"""More shards than there are."""


def small_shards(tokenizer: Path, folder: Path) -> Path:
    """A finished data set of about ten small shards of about 63 rows each."""
    source = open_source("hamlet", val_share=0.05)
    build(source, Tokenizer.load(tokenizer), folder, max_tokens=40_000, shard_tokens=4_000)
    assert 8 < len(Manifest.load(folder).train) < 13
    return folder


def publish(whole: Path, folder: Path, count: int) -> None:
    """What a followed build has written once it has so many shards: those, and then a manifest."""
    manifest = Manifest.load(whole)
    if not folder.exists():
        shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*.arrow", "manifest.json"))
    for info in (*manifest.train[:count], *manifest.val):
        if not (folder / info.name).exists():
            shutil.copy(whole / info.name, folder / info.name)
    complete = count >= len(manifest.train)
    replace(manifest, train=manifest.train[:count], complete=complete, schema=2).save(folder)


@contextmanager
def building(whole: Path, folder: Path, run: RunDir, every_s: float) -> Iterator[None]:
    """A build beside a training: one shard, and when that is being read one more now and then."""
    stop = threading.Event()
    publish(whole, folder, 1)

    def work() -> None:
        while not read_lines(run.metrics_path) and not stop.wait(0.02):
            continue
        for count in range(2, len(Manifest.load(whole).train) + 1):
            if stop.wait(every_s):
                return
            publish(whole, folder, count)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def segments(run: RunDir) -> tuple[Segment, ...]:
    """The points that a run recorded."""
    record = read_data_order(run, None)
    assert record is not None
    return record.segments


def replaying(points: tuple[Segment, ...], whole: Path, folder: Path) -> Callable[..., Any]:
    """A look at the disk that finds what another run found at the same step."""
    real = dataloader.DataLoader._extend_segments

    def looked(self: dataloader.DataLoader, step: int) -> Any:
        [at] = [segment for segment in points if segment.first_step == step]
        publish(whole, folder, at.shards[str(folder)][1])
        return real(self, step)

    return looked
