"""train.kernels.loss plain: the same sum, count and gradients as the fused loss."""

from typing import Literal

import pytest
import torch

from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.train import TrainConfig
from foundling.model.initialization import init_weights
from foundling.model.loss import IGNORE
from foundling.model.transformer import Transformer
from foundling.parallel.apply import apply_parallel
from foundling.parallel.mesh import ALONE

MODEL = ModelConfig(vocab_size=70, dim=16, layers=2, heads=2, ffn_dim=32)


def run(
    config: ModelConfig, loss: Literal["fused", "plain"], masked: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor | None]]:
    model = Transformer(config)
    init_weights(model, 1)
    model.to(dtype)
    module = apply_parallel(
        model, ParallelConfig(), ALONE, TrainConfig(compile="off", kernels={"loss": loss})
    )
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(70, (4, 12), generator=generator)
    targets = tokens.roll(-1, 1)
    targets[torch.rand(4, 12, generator=generator) < masked] = IGNORE
    total, count = module(tokens, targets, None)
    total.backward()
    return total.detach(), count, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("masked", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    "config",
    [MODEL, MODEL.replace(tie_embeddings=True), MODEL.replace(logit_softcap=5.0)],
    ids=["untied", "tied", "softcap"],
)
def test_both_losses_are_one_function(config: ModelConfig, masked: float) -> None:
    """In float64, where equal formulas agree to rounding and different ones do not."""
    fused = run(config, "fused", masked, torch.float64)
    plain = run(config, "plain", masked, torch.float64)
    assert fused[1] == plain[1]
    torch.testing.assert_close(plain[0], fused[0], rtol=1e-12, atol=1e-12)
    for name, grad in fused[2].items():
        torch.testing.assert_close(plain[2][name], grad, rtol=1e-9, atol=1e-12)


def test_plain_sums_in_fp32() -> None:
    fused, plain = (run(MODEL, loss, 0.2, torch.float32) for loss in ("fused", "plain"))  # type: ignore[arg-type]
    assert plain[0].dtype == fused[0].dtype == torch.float32
    torch.testing.assert_close(plain[0], fused[0], rtol=1e-6, atol=0)


def test_it_is_a_setting() -> None:
    assert load_config("hamlet", {"train.kernels.loss": "plain"}).train.kernels.loss == "plain"
    with pytest.raises(ConfigError, match=r"train\.kernels\.loss must be one of"):
        load_config("hamlet", {"train.kernels.loss": "chunked"})
