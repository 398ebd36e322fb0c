"""A model that computes NaN or infinity has no scores and no text: whoever asks is told."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from foundling.config.errors import CheckpointError
from foundling.config.model import ModelConfig
from foundling.eval.bits_per_byte import held_out_bpb
from foundling.generate.engine import Engine
from foundling.generate.request import Request
from foundling.generate.sampling import Sampling
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from tests.unit.eval.test_bits_per_byte import documents

CPU = torch.device("cpu")
TEXT = np.arange(12)


@pytest.fixture(scope="module")
def overflowing() -> Transformer:
    """Every weight of it is a number, and its logits are not."""
    made = Transformer(ModelConfig(vocab_size=61, dim=16, layers=1, heads=2, ffn_dim=32))
    init_weights(made, 3)
    with torch.no_grad():
        made.norm.weight.fill_(3e38)
        made.head_weight.fill_(3e38)
    return made.eval()


def engine(model: Transformer) -> Engine:
    return Engine(model, CPU, cache_bytes=1 << 20)


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: engine(model).complete([Request(prompt=[1, 2], max_tokens=2)]),
        lambda model: engine(model).complete(
            [Request(prompt=[1, 2], max_tokens=2, sampling=Sampling(temperature=0.8))]
        ),
        lambda model: held_out_bpb(model, documents([5, 9]), CPU),
        lambda model: list(engine(model).score([TEXT], [4])),
    ],
    ids=["greedy", "drawn", "bits per byte", "likelihood"],
)
def test_what_is_no_number_ends_with_a_sentence(
    ask: Callable[[Transformer], object], overflowing: Transformer
) -> None:
    with pytest.raises(CheckpointError, match="computes NaN or infinity"):
        ask(overflowing)
