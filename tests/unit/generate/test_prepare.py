"""A model made ready for inference says what it said before."""

import pytest
import torch
from families import FAMILIES, build, plain_logits

from foundling.generate.prepare import prepare
from foundling.generate.request import Request
from foundling.generate.text import open_engine

TEXT = [5, 9, 2, 7, 7, 100, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_products_are_the_same_function(family: str) -> None:
    before = plain_logits(build(family), TEXT)
    after = plain_logits(prepare(build(family), "fp32"), TEXT)
    assert torch.allclose(before, after, atol=1e-4)


def test_weights_in_eight_bits_say_nearly_the_same() -> None:
    pytest.importorskip("torchao")
    before = plain_logits(build(dim=64, ffn_dim=128, heads=4, head_dim=16), TEXT)
    model = prepare(build(dim=64, ffn_dim=128, heads=4, head_dim=16), "int8")
    after = plain_logits(model, TEXT).float()
    assert float((before - after).abs().mean()) < 0.1 * float(before.abs().mean())
    assert float((before - after).abs().max()) > 0
    engine = open_engine(build(dim=64, ffn_dim=128, heads=4, head_dim=16), weights="int8")
    [said] = engine.complete([Request(prompt=TEXT, max_tokens=5)])
    assert len(said.ids) == 5
