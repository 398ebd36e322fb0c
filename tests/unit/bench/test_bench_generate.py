"""What `bench generate` times, and what it refuses by name."""

from typing import Any

import pytest
import torch

from foundling.bench.generate import GenerateBench, bench_generate
from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig

SHAPE = ModelConfig(vocab_size=200, dim=32, layers=1, heads=2, ffn_dim=64, positions=256)


def timed(config: ModelConfig = SHAPE, **more: Any) -> GenerateBench:
    asked: dict[str, Any] = {
        "batches": [1], "prompt": 20, "new": 4, "samplings": ["greedy"], "weights": None,
        "first": [], "rounds": 1, "ceilings": None,
    }  # fmt: skip
    return bench_generate(config, torch.device("cpu"), **{**asked, **more})


def test_lengths_are_those_that_the_model_has_positions_for() -> None:
    found = timed(first=[2048, 100, 4096], new=2)
    assert sorted(found.first_token_s) == [100, 255]
    assert found.checked == 8 * 2
    assert found.wrong == 0
    assert found.timings[0].tokens_per_s > 0
    with pytest.raises(
        ConfigError, match="--prompt 250 and --new 20 are more than the model's 256"
    ):
        timed(prompt=250, new=20)


def test_too_few_new_tokens_to_time_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--new 2 is too few for 8 requests"):
        timed(SHAPE.replace(positions="rotary"), batches=[8], prompt=512, new=2)
