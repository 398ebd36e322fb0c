"""AdamW in 8 bits: one step is AdamW's, and what is kept is as near as 256 values allow."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.config.optim import OptimConfig, moment_block_size
from foundling.model.transformer import Transformer
from foundling.optim.adamw8bit import bounds, pack, table, unpack
from foundling.optim.optimizer import build_optimizer, ensure_state, saved_state, set_lr
from foundling.plan.memory import optimizer_bytes
from foundling.plan.params import sizes_of
from foundling.plan.workload import kind_of

CPU = torch.device("cpu")
CONFIG = OptimConfig(name="adamw8bit", lr=0.01, betas=(0.9, 0.9), weight_decay=0.2)
SHAPES = {
    "embed.weight": (30, 64),
    "layers.0.attn.q.weight": (24, 128),
    "layers.0.ffn.down.weight": (128, 48),
    "head.weight": (30, 64),
    "norm.weight": (64,),
}
Array = np.ndarray[Any, np.dtype[np.float64]]


def values_of(signed: bool) -> Array:
    """The 256 values, from their description."""
    found = {0.0, 1.0}
    for power in range(-6, 1):
        pieces = 2 ** (power + 6 if signed else power + 7)
        edges = np.linspace(0.1, 1, pieces + 1)
        for middle in (edges[1:] + edges[:-1]) / 2 * 10.0**power:
            found |= {middle, -middle} if signed else {middle}
    return np.array(sorted(found))


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_is_the_dynamic_tree(signed: bool) -> None:
    values = table(signed, CPU).double().numpy()
    np.testing.assert_allclose(values, values_of(signed), rtol=1e-6)
    assert len(set(values)) == 256


@pytest.mark.parametrize("signed", [True, False])
def test_every_number_becomes_the_nearest_value(signed: bool) -> None:
    chance = np.random.default_rng(1)
    numbers = chance.standard_normal((40, 128)) * 10.0 ** chance.uniform(-9, 3, (40, 128))
    numbers = (numbers if signed else np.abs(numbers)).astype(np.float32)
    codes, scale = pack(torch.tensor(numbers), 2, bounds(signed, CPU))
    assert codes.dtype == torch.uint8
    assert scale.shape == (40, 2)
    found = unpack(codes, scale, table(signed, CPU)).double().numpy().reshape(40, 2, 64)
    cut = numbers.astype(np.float64).reshape(40, 2, 64)
    largest = np.abs(cut).max(-1, keepdims=True)
    possible = values_of(signed)
    if not signed:
        possible = possible[1:]  # nothing but zero becomes zero
    nearest = np.abs(cut[..., None] / largest[..., None] - possible).min(-1) * largest
    np.testing.assert_allclose(np.abs(found - cut), nearest, atol=1e-6 * largest.max())
    np.testing.assert_array_less(np.abs(found - cut), nearest + 1e-6 * largest)


def test_zeros_stay_zeros_and_nothing_else_does() -> None:
    numbers = torch.zeros(2, 64)
    numbers[1, 0], numbers[1, 1] = 1.0, 1e-20
    codes, scale = pack(numbers, 1, bounds(False, CPU))
    found = unpack(codes, scale, table(False, CPU))
    assert not found[0].any()
    assert not found[1, 2:].any()
    assert found[1, 0] == 1.0
    assert 0 < float(found[1, 1]) < 1e-6


def test_blocks_divide_rows() -> None:
    assert [moment_block_size(width) for width in (64, 768, 1408, 96, 48, 40, 23)] == [
        64, 64, 64, 32, 16, 0, 0,
    ]  # fmt: skip


def make(config: OptimConfig) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    chance = torch.Generator().manual_seed(3)
    named = {n: nn.Parameter(torch.randn(s, generator=chance)) for n, s in SHAPES.items()}
    return named, build_optimizer(named.items(), config)


def held(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> tuple[Array, Array]:
    """The two moments as they are kept."""
    state = optimizer.state[param]
    return tuple(  # type: ignore[return-value]
        unpack(state[f"{name}_codes"], state[f"{name}_scale"], table(signed, CPU)).double().numpy()
        for name, signed in (("exp_avg", True), ("exp_avg_root", False))
    )


def gap(found: Array, wanted: Array, signed: bool, block: int) -> float:
    """How far what is kept lies from what was meant, in half distances of the table's values; a
    root next to zero may be off by a whole one, because it never becomes zero."""
    rows, columns = wanted.shape
    meant, stored = (x.reshape(rows, columns // block, block) for x in (wanted, found))
    largest = np.abs(meant).max(-1, keepdims=True)
    values = values_of(signed)
    place = np.clip(np.searchsorted(values, meant / largest), 1, 255)
    allowed = (values[place] - values[place - 1]) / 2
    if not signed:
        allowed = np.where(place == 1, values[1], allowed)
    return float((np.abs(stored - meant) / largest / allowed).max())


def test_a_step_is_adamws_from_what_was_kept() -> None:
    """Loshchilov and Hutter 2019 in numpy, from the moments as kept to the moments as meant."""
    named, optimizer = make(CONFIG)
    ensure_state(optimizer)
    chance = torch.Generator().manual_seed(4)
    covered = [name for name in SHAPES if name != "norm.weight"]
    for step in range(1, 7):
        set_lr(optimizer, lr := 0.01 / step)
        before = {
            n: (named[n].detach().double().numpy(), *held(optimizer, named[n])) for n in covered
        }
        for name, param in named.items():
            param.grad = torch.randn(SHAPES[name], generator=chance)
            if name == "embed.weight":
                param.grad[step:] = 0.0  # tokens that were not seen
        optimizer.step()
        for name in covered:
            weight, m, root = before[name]
            gradient = named[name].grad
            assert gradient is not None
            g = gradient.double().numpy()
            decay = 0.0 if name == "embed.weight" else 0.2
            m, v = 0.9 * m + 0.1 * g, 0.9 * root**2 + 0.1 * g**2
            corrected = (m / (1 - 0.9**step), np.sqrt(v / (1 - 0.9**step)))
            wanted = weight - lr * decay * weight - lr * corrected[0] / (corrected[1] + 1e-8)
            np.testing.assert_allclose(named[name].detach(), wanted, rtol=2e-6, atol=2e-7)
            found_m, found_root = held(optimizer, named[name])
            block, seen = moment_block_size(SHAPES[name][1]), np.abs(g).sum(1) > 0
            assert gap(found_m[seen], m[seen], True, block) < 1.01
            assert gap(found_root[seen], np.sqrt(v)[seen], False, block) < 1.01
            np.testing.assert_allclose(found_m[~seen], 0.9 * before[name][1][~seen], rtol=1e-6)


def test_it_stays_beside_adamw() -> None:
    """Thirty steps: what rounding does to the weights is small beside what the steps did."""
    eight, quantised = make(CONFIG)
    wide, plain = make(OptimConfig(lr=0.01, betas=(0.9, 0.9), weight_decay=0.2))
    start = {n: p.detach().clone() for n, p in wide.items()}
    chance = torch.Generator().manual_seed(5)
    for _ in range(30):
        for name, shape in SHAPES.items():
            drift = 0.3 * torch.sign(start[name])
            gradient = torch.randn(shape, generator=chance) + drift
            eight[name].grad, wide[name].grad = gradient.clone(), gradient.clone()
        quantised.step()
        plain.step()
    for name in SHAPES:
        apart = (eight[name] - wide[name]).norm() / (wide[name] - start[name]).norm()
        assert float(apart.detach()) < (0.02 if name != "norm.weight" else 1e-6), name


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_kept_and_what_the_plan_says_of_them(tied: bool) -> None:
    shape = ModelConfig(
        vocab_size=48, dim=64, layers=2, heads=2, ffn_dim=96, value_embeds=True, tie_embeddings=tied
    )
    for config in (CONFIG, CONFIG.replace(wide_embedding=True), OptimConfig(name="muon")):
        named = dict(Transformer(shape).named_parameters())
        optimizer = build_optimizer(named.items(), config)
        ensure_state(optimizer)
        size = {
            name: sum(tensor.nbytes for tensor in saved_state(optimizer, param).values())
            for name, param in named.items()
        }
        assert sum(size.values()) == optimizer_bytes(kind_of(config), sizes_of(shape))
        for name, param in named.items():
            saved = 8 - size[name] / param.numel()
            is_table = re.match(r"embed\.|value_embeds", name) is not None
            if config.name == "adamw8bit":
                is_large = param.ndim == 2 and "value_gate" not in name
                is_covered = is_large and not (is_table and config.wide_embedding)
                assert saved >= 5.5 if is_covered else saved == 0, name


def test_rows_that_do_not_divide_are_refused_by_name() -> None:
    named = {"layers.0.ffn.up.weight": nn.Parameter(torch.ones(8, 24))}
    with pytest.raises(ConfigError, match=r"layers\.0\.ffn\.up\.weight is 8 x 24"):
        build_optimizer(named.items(), CONFIG)
