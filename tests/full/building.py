"""The build at full size: its speed beside the encoder's own, its memory, fifty kills."""

import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from foundling.config.data_manifest import Manifest
from foundling.tokenizer.tokenizer import Tokenizer
from tests.full.build_baseline import encoder_alone, whole_build

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
for folder in ("unit/data/build", "chaos"):
    sys.path.insert(0, str(ROOT / "tests" / folder))
from build_memory import cheap_tokenizer, weigh  # noqa: E402
from test_build_kill import killed_builds  # noqa: E402

WORKERS = 2
ROUNDS = 5
OF_THE_ENCODER = 0.85
TIMES_MAP = 2.5
GIGABYTES = 10
MOST_MB = 1500
KILLS = 50


def building() -> dict[str, Any]:
    """A build of the real corpus: 0.85 of the encoder alone, 2.5 times `datasets.map`."""
    files = sorted(str(path) for path in (SHARED / "corpus").glob("train-*.parquet"))
    assert files, f"{SHARED} holds no corpus"
    tokenizer = Tokenizer.load(SHARED / "tokenizers" / "gpt2")
    assert tokenizer.fast, tokenizer.why_slow
    rounds = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(ROUNDS):  # in turn, so that whatever else the machine does is shared
            alone = encoder_alone(files, tokenizer, WORKERS)
            built = whole_build(files, tokenizer, Path(scratch) / str(number), WORKERS)
            shutil.rmtree(Path(scratch) / str(number))
            rounds.append((alone, built))
        mapped = _datasets_map(files, tokenizer, Path(scratch))
    middle = statistics.median
    figures = {
        "processes": WORKERS,
        "text_mib": round(rounds[0][1].text_bytes / 2**20, 1),
        "encoder_mib_per_s": round(middle(a.mib_per_s for a, _ in rounds), 1),
        "encoder_mib_per_s_with_start": round(middle(a.mib_per_s_with_start for a, _ in rounds), 1),
        "build_mib_per_s": round(middle(b.mib_per_s for _, b in rounds), 1),
        "of_the_encoder": round(middle(b.mib_per_s / a.mib_per_s for a, b in rounds), 3),
        "of_the_encoder_with_start": round(
            middle(b.mib_per_s / a.mib_per_s_with_start for a, b in rounds), 3
        ),
        "datasets_map_mib_per_s": round(mapped, 1),
    }
    figures["times_datasets_map"] = round(figures["build_mib_per_s"] / mapped, 2)
    # The build starts its processes within its time, so the encoder's start counts as well.
    assert figures["of_the_encoder_with_start"] >= OF_THE_ENCODER, figures
    assert figures["times_datasets_map"] >= TIMES_MAP, figures
    return figures


def _datasets_map(files: list[str], tokenizer: Tokenizer, scratch: Path) -> float:
    """MiB/s of `datasets.map` with a fast tokenizer of transformers, best of two."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    tokenizer.save(scratch / "tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_file=str(scratch / "tokenizer" / "tokenizer.json"))
    datasets.disable_progress_bars()
    best = 0.0
    for number in range(2):
        data = datasets.load_dataset(
            "parquet", data_files=files, split="train", cache_dir=str(scratch / f"cache-{number}")
        )
        size = sum(len(text.encode()) for text in data["text"])
        began = time.perf_counter()
        data.map(
            lambda batch: {"ids": fast(batch["text"])["input_ids"]},
            batched=True,
            num_proc=WORKERS,
            remove_columns=data.column_names,
        )
        best = max(best, size / (time.perf_counter() - began) / 2**20)
    return best


def build_memory() -> dict[str, Any]:
    """Ten gigabytes of generated text in under 1.5 GB for the whole process tree."""
    with tempfile.TemporaryDirectory(dir=_large_disk()) as scratch:
        home = Path(scratch)
        cheap_tokenizer().save(home / "tokenizer")
        found = weigh(GIGABYTES * 1000, home, shard_tokens=100_000_000)
        manifest = Manifest.load(home / str(GIGABYTES * 1000))
    shards = (*manifest.train, *manifest.val)
    size = sum(shard.text_bytes for shard in shards)
    assert size > GIGABYTES * 1e9
    assert found["peak_mb"] < MOST_MB, found
    return {
        "text_gb": round(size / 1e9, 2),
        "shards": len(shards),
        **{name: round(value, 1) for name, value in found.items()},
    }


def _large_disk() -> Path:
    folder = ROOT / "runs" / "full"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def build_kills() -> dict[str, Any]:
    """Builds killed with SIGKILL at fifty random moments end byte-identical."""
    with tempfile.TemporaryDirectory() as scratch:
        hits = killed_builds(Path(scratch), KILLS, random.Random(11), each=7)
    assert hits >= KILLS
    return {"kills": hits}
