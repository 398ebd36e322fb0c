"""Memory stays flat: four times the text needs no more of it."""

from pathlib import Path

import pytest
from build_memory import cheap_tokenizer, weigh

from foundling.config.data_manifest import Manifest


@pytest.mark.timeout(300)
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    cheap_tokenizer().save(tmp_path / "tokenizer")
    peaks = {}
    for megabytes in (100, 400):
        # Shards of a million tokens, so that even the smaller build has several of everything.
        peaks[megabytes] = weigh(megabytes, tmp_path, shard_tokens=1_000_000)["peak_mb"]
        manifest = Manifest.load(tmp_path / str(megabytes))
        text_bytes = sum(shard.text_bytes for shard in (*manifest.train, *manifest.val))
        assert text_bytes > megabytes * 1_000_000
        assert len(manifest.train) >= 3
    assert peaks[400] < 1.1 * peaks[100] + 10, peaks
    assert peaks[400] < 700, peaks
