"""The presets for small cards fit them on paper; tests/gpu/small_cards.py runs them."""

from pathlib import Path

import pytest
from asking import plan

from foundling.config.data import packing_spec_of
from foundling.config.load import load_config


@pytest.mark.parametrize(
    ("preset", "gigabytes"),
    [("qwen2-0.5b-gpt2-24gb", 24), ("tinygpt-524m-16gb", 16), ("llama-1.24b-24gb", 24)],
)
def test_a_preset_fits_its_card(
    preset: str, gigabytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text(f"card: {{like: rtx4090, memory: {gigabytes}e9}}\n")
    monkeypatch.setenv("FOUNDLING_HARDWARE", str(file))
    found = plan(preset, "card")
    assert found.fits
    assert found.choice.memory.needed < 0.95 * gigabytes * 1e9
    # The same run without its diet does not: else the preset would be for nothing.
    if preset != "qwen2-0.5b-gpt2-24gb":  # account 002 recomputed although it need not
        hungry = {"optim.name": "adamw", "parallel.recompute": "none", "train.batch-size": "8"}
        assert not plan(preset, "card", hungry).fits


def test_the_buckets_of_account_002() -> None:
    config = load_config("qwen2-0.5b-gpt2-24gb")
    spec = packing_spec_of(config.train.seq_len, config.data.packing, config.data)
    assert spec.edges == (256, 512, 768, 1024, 1536, 2048, 8192)
    # FACTS.md has 19 for 768: 18.7 rounded up.
    assert [spec.rows_in(edge) for edge in spec.edges] == [56, 28, 18, 14, 9, 7, 1]
    assert spec.units_per_step(config.train.global_batch_tokens) == 16
