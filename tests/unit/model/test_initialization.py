"""Initial weights depend on seed, name and shape alone, and start at the predicted loss."""

import math

import pytest
import torch

from foundling.config.model import ModelConfig
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer

SHAPE = ModelConfig(vocab_size=512, dim=64, layers=4, heads=4, ffn_dim=160)


def weights(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    model = Transformer(config)
    init_weights(model, seed)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_a_parameter_does_not_depend_on_what_else_is_in_the_model() -> None:
    torch.manual_seed(1)
    small = weights(ModelConfig(vocab_size=512, dim=64, layers=2, heads=4, ffn_dim=160), 5)
    torch.manual_seed(2)
    large = weights(SHAPE, 5)
    for name in small:
        # The matrices that write into the stream scale with depth; the draw itself must not move.
        scale = math.sqrt(2) if name.endswith(("attn.o.weight", "ffn.down.weight")) else 1.0
        assert torch.allclose(small[name], large[name] * scale, atol=1e-7), name


def test_seeds_and_names_give_different_draws() -> None:
    one, two = weights(SHAPE, 1), weights(SHAPE, 2)
    assert not torch.equal(one["layers.0.attn.q.weight"], two["layers.0.attn.q.weight"])
    assert not torch.equal(one["layers.0.attn.q.weight"], one["layers.0.attn.k.weight"])
    assert not torch.equal(one["layers.0.attn.q.weight"], one["layers.1.attn.q.weight"])


def test_the_draw_is_pinned() -> None:
    """A change of this number is a change of every run that starts from a seed."""
    first = weights(SHAPE, 1)["layers.0.attn.q.weight"].flatten()[0]
    assert float(first) == pytest.approx(0.23184097, abs=1e-6)


def test_spreads_are_those_of_the_recipe() -> None:
    found = weights(SHAPE, 1)
    residual = 64**-0.5 / math.sqrt(2 * 4)
    expected = {
        "embed.weight": 0.02,
        "head.weight": 64**-0.5,
        "layers.3.attn.q.weight": 64**-0.5,
        "layers.3.ffn.gate.weight": 64**-0.5,
        "layers.3.attn.o.weight": residual,
        "layers.3.ffn.down.weight": residual,
    }
    for name, std in expected.items():
        assert float(found[name].std()) == pytest.approx(std, rel=0.05), name
        assert abs(float(found[name].mean())) < 0.05 * std * 4, name
    assert all(torch.equal(w, torch.ones(64)) for n, w in found.items() if "norm" in n)


@pytest.mark.parametrize(("tied", "std"), [(False, 0.02), (True, 0.02), (True, 0.1)])
def test_the_first_loss_is_ln_v_plus_half_the_logits_variance(tied: bool, std: float) -> None:
    config = ModelConfig(
        vocab_size=2048,
        dim=64,
        layers=4,
        heads=4,
        ffn_dim=160,
        tie_embeddings=tied,
        init={"std": std},
    )
    model = Transformer(config)
    init_weights(model, 1)
    tokens = torch.randint(2048, (8, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        total, count = model.loss(tokens, tokens.flip(0))
    variance = 64 * std**2 if tied else 1.0
    assert float(total) / int(count) == pytest.approx(math.log(2048) + variance / 2, abs=0.08)
