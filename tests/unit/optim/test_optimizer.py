"""The rule table covers each parameter once, and the update is AdamW's."""

import math

import pytest
import torch
from torch import nn

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.config.optim import OptimConfig
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.optim.gradients import UpdateRatio, clip_, grad_norm, group_grad_norms
from foundling.optim.optimizer import build_optimizer, set_lr
from foundling.optim.rules import RULES, Rule, assign
from foundling.optim.schedule import lr_at

SHAPE = ModelConfig(vocab_size=23, dim=16, layers=2, heads=2, ffn_dim=24)


def model(tied: bool = False) -> Transformer:
    built = Transformer(SHAPE.replace(tie_embeddings=tied))
    init_weights(built, 1)
    return built


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(tied: bool) -> None:
    built = model(tied)
    names = [name for name, _ in built.named_parameters()]
    groups = assign(names)
    assert sorted(name for members in groups.values() for name in members) == sorted(names)
    assert groups["embedding"] == ["embed.weight"]
    assert groups.get("head") == (None if tied else ["head.weight"])
    assert len(groups["norm"]) == 5
    assert len(groups["matrix"]) == 14
    optimizer = build_optimizer(built.named_parameters(), OptimConfig(weight_decay=0.3))
    decay = {group["group"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decay == {"embedding": 0.0, "norm": 0.0, "matrix": 0.3} | ({} if tied else {"head": 0.3})
    assert {g["group"]: g["param_names"] for g in optimizer.param_groups} == groups


def test_a_parameter_without_a_rule_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"layers\.0\.attn\.x\.bias is covered by no rule"):
        assign(["embed.weight", "layers.0.attn.x.bias"])


def test_a_parameter_with_two_rules_is_refused_by_name() -> None:
    rules = (*RULES, Rule(group="late", pattern=r"layers\.1\..*", decay=False))
    with pytest.raises(ConfigError, match=r"layers\.1\.attn\.q\.weight is covered by matrix and"):
        assign(["layers.0.attn.q.weight", "layers.1.attn.q.weight"], rules)


def test_a_pattern_must_match_the_whole_name() -> None:
    with pytest.raises(ConfigError, match="no rule"):
        assign(["other.embed.weight"])


def test_rates_follow_the_schedule_times_the_scale() -> None:
    rules = (
        Rule(group="a", pattern="a", decay=True, lr_scale=0.5),
        Rule(group="b", pattern="b", decay=False),
    )
    named = [(name, nn.Parameter(torch.ones(2))) for name in "ab"]
    optimizer = build_optimizer(named, OptimConfig(lr=0.2), rules)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    set_lr(optimizer, 0.04)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.04]


def test_the_update_is_adamw_computed_independently() -> None:
    """Loshchilov and Hutter 2019, algorithm 2, element by element in Python floats."""
    config = OptimConfig(
        lr=0.03, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2, warmup=2, schedule="linear"
    )
    generator = torch.Generator().manual_seed(0)
    start = {n: torch.randn(p.shape, generator=generator) for n, p in model().named_parameters()}
    named = {n: nn.Parameter(start[n].double()) for n in start}
    optimizer = build_optimizer(named.items(), config)
    watched = {"embed.weight": 0.0, "layers.1.ffn.up.weight": 0.2, "norm.weight": 0.0}
    x = {n: named[n].flatten()[0].item() for n in watched}
    m, v = dict.fromkeys(watched, 0.0), dict.fromkeys(watched, 0.0)
    for step in range(6):
        lr = lr_at(step, 6, config)
        set_lr(optimizer, lr)
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).double()
        for name, decay in watched.items():
            gradient = named[name].grad
            assert gradient is not None
            g = gradient.flatten()[0].item()
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.9 * v[name] + 0.1 * g * g
            m_hat, v_hat = m[name] / (1 - 0.8 ** (step + 1)), v[name] / (1 - 0.9 ** (step + 1))
            x[name] += -lr * decay * x[name] - lr * m_hat / (math.sqrt(v_hat) + 1e-3)
        optimizer.step()
        for name in watched:
            assert named[name].flatten()[0].item() == pytest.approx(x[name], rel=1e-10, abs=1e-12)


def with_gradients() -> tuple[Transformer, list[torch.Tensor]]:
    built = model()
    generator = torch.Generator().manual_seed(0)
    for parameter in built.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return built, [p.grad.clone() for p in built.parameters() if p.grad is not None]


def test_clipping_scales_to_the_limit_and_never_up() -> None:
    built, before = with_gradients()
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in before))
    assert float(grad_norm(built.parameters())) == pytest.approx(expected, rel=1e-5)
    assert float(clip_(built.parameters(), 2 * expected)) == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(p.grad, g) for p, g in zip(built.parameters(), before, strict=True))  # type: ignore[arg-type]
    assert float(clip_(built.parameters(), 0.0)) == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(p.grad, g) for p, g in zip(built.parameters(), before, strict=True))  # type: ignore[arg-type]
    clip_(built.parameters(), 1.0)
    assert float(grad_norm(built.parameters())) == pytest.approx(1.0, rel=1e-5)


def test_clipping_nothing_is_harmless() -> None:
    built = model()
    assert float(clip_(built.parameters(), 1.0)) == 0.0
    for parameter in built.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert float(clip_(built.parameters(), 1.0)) == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in built.parameters())


def test_group_norms_add_up_to_the_whole() -> None:
    built, _ = with_gradients()
    optimizer = build_optimizer(built.named_parameters(), OptimConfig())
    norms = group_grad_norms(optimizer)
    assert set(norms) == {"embedding", "norm", "matrix", "head"}
    whole = math.sqrt(sum(float(norm) ** 2 for norm in norms.values()))
    assert whole == pytest.approx(float(grad_norm(built.parameters())), rel=1e-5)


def test_update_ratio_is_change_over_size() -> None:
    built, _ = with_gradients()
    optimizer = build_optimizer(built.named_parameters(), OptimConfig())
    watch = UpdateRatio(optimizer)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name != "embed.weight":
                parameter.mul_(1.01)
    ratios = {name: float(ratio) for name, ratio in watch.read().items()}
    assert ratios["embedding"] == 0.0
    assert ratios["matrix"] == pytest.approx(0.01, rel=1e-3)
    assert ratios["head"] == pytest.approx(0.01, rel=1e-3)
    assert 0.0 < ratios["all"] < 0.01


def test_a_small_model_learns_its_batch_by_heart() -> None:
    built = model()
    config = OptimConfig(lr=1e-2, warmup=5, schedule="cosine")
    optimizer = build_optimizer(built.named_parameters(), config)
    tokens = torch.randint(23, (4, 17), generator=torch.Generator().manual_seed(2))
    mean = torch.tensor(0.0)
    for step in range(60):
        set_lr(optimizer, lr_at(step, 60, config))
        total, count = built.loss(tokens[:, :-1], tokens[:, 1:])
        mean = total / count
        torch.autograd.backward(mean)
        clip_(built.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
    assert float(mean.detach()) < 0.5 < math.log(23)
