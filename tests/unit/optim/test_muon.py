"""Muon's update against one written in numpy, and what orthogonalisation promises."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.config.optim import OptimConfig
from foundling.optim import muon
from foundling.optim.muon import COEFFICIENTS, CompiledOnCuda, Muon, orthogonalise, update_scale
from foundling.optim.optimizer import build_optimizer, parts_of, set_lr

CONFIG = OptimConfig(name="muon", lr=0.02, momentum=0.9, weight_decay=0.3)
SHAPES = {
    "embed.weight": (11, 8),
    "layers.0.attn.q.weight": (8, 8),
    "layers.0.attn.o.weight": (8, 8),
    "layers.0.ffn.up.weight": (20, 8),
    "layers.1.ffn.up.weight": (20, 8),
    "layers.0.ffn.down.weight": (8, 20),
    "norm.weight": (8,),
}
Array = np.ndarray[Any, np.dtype[np.float64]]


def draw(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def polar(matrix: Array) -> Array:
    """Matrix by matrix: normalise, then five polynomials of its singular values."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    s = s / (1.02 * np.sqrt((matrix**2).sum()))
    for a, b, c in COEFFICIENTS:
        s = a * s + b * s**3 + c * s**5
    found: Array = (u * s) @ v
    return found


class Reference:
    """Muon for one matrix, in numpy and float64."""

    def __init__(self, start: Array, config: OptimConfig) -> None:
        self.weight, self.config = start.copy(), config
        self.momentum = np.zeros_like(start)

    def step(self, gradient: Array, lr: float) -> None:
        mu, config = self.config.momentum, self.config
        self.momentum = mu * self.momentum + (1 - mu) * gradient
        update = polar(mu * self.momentum + (1 - mu) * gradient)
        rows, columns = self.weight.shape
        size = {"rms": 0.2 * max(rows, columns) ** 0.5, "spectral": max(1, rows / columns) ** 0.5}
        decayed = self.weight * config.weight_decay
        if config.cautious_decay:
            decayed = np.where(np.sign(update) * np.sign(self.weight) >= 0, decayed, 0.0)
        self.weight = self.weight - lr * decayed - lr * size[config.muon_scale] * update


@pytest.mark.parametrize(
    "config",
    [CONFIG, CONFIG.replace(muon_scale="spectral"), CONFIG.replace(cautious_decay=True)],
    ids=["rms", "spectral", "cautious"],
)
def test_the_update_is_muons_computed_independently(config: OptimConfig) -> None:
    named = {n: nn.Parameter(torch.tensor(draw(1, *shape))) for n, shape in SHAPES.items()}
    optimizer = build_optimizer(named.items(), config)
    matrices = [name for name in named if name.startswith("layers")]
    references = {n: Reference(named[n].detach().numpy(), config) for n in matrices}
    for step in range(4):
        lr = 0.02 / (step + 1)
        set_lr(optimizer, lr)
        for number, (name, param) in enumerate(named.items()):
            gradient = draw(100 * step + number, *SHAPES[name]) * 10.0 ** (number - 3)
            param.grad = torch.tensor(gradient)
            if name in references:
                references[name].step(gradient, lr)
        optimizer.step()
        for name, reference in references.items():
            np.testing.assert_allclose(named[name].detach(), reference.weight, rtol=1e-9)


def test_the_rest_is_adamws() -> None:
    named = {n: nn.Parameter(torch.tensor(draw(1, *shape))) for n, shape in SHAPES.items()}
    plain = {n: nn.Parameter(p.detach().clone()) for n, p in named.items()}
    mixed = build_optimizer(named.items(), CONFIG)
    adamw = build_optimizer(plain.items(), OptimConfig(lr=0.02, weight_decay=0.3))
    for params, optimizer in ((named, mixed), (plain, adamw)):
        for number, param in enumerate(params.values()):
            param.grad = torch.tensor(draw(number, *param.shape))
        optimizer.step()
    same = {name for name in named if torch.equal(named[name], plain[name])}
    assert same == {"embed.weight", "norm.weight"}
    assert [type(part) for part in parts_of(mixed)] == [torch.optim.AdamW, Muon]
    assert {g["group"] for g in mixed.param_groups} == {"embedding", "norm", "matrix"}


def test_groups_have_their_own_rates() -> None:
    config = CONFIG.replace(lr_of={"embedding": 0.3, "vector": 0.01})
    named = {n: nn.Parameter(torch.ones(shape)) for n, shape in SHAPES.items()}
    optimizer = build_optimizer(named.items(), config)
    set_lr(optimizer, 0.01)  # half-way down the schedule
    rates = {group["group"]: group["lr"] for group in optimizer.param_groups}
    assert rates == pytest.approx({"embedding": 0.15, "norm": 0.005, "matrix": 0.01})


@pytest.mark.parametrize("shape", [(16, 16), (12, 40), (40, 12)])
def test_singular_values_come_out_near_one(shape: tuple[int, int]) -> None:
    """Over three powers of ten of them, and the directions stay."""
    u, _, v = np.linalg.svd(draw(5, *shape), full_matrices=False)
    spread = np.geomspace(1, 2e-3, min(shape))
    matrix = torch.tensor((u * spread) @ v)
    found = orthogonalise(matrix[None])[0].numpy()
    values = np.diag(u.T @ found @ v.T)
    assert values.min() > 0.85
    assert values.max() < 1.15
    np.testing.assert_allclose(found, (u * values) @ v, atol=1e-12)


def test_a_stack_is_its_matrices_one_by_one_whatever_their_size() -> None:
    stack = torch.tensor(draw(3, 4, 6, 10)) * torch.tensor([1e-12, 1.0, 1e9, 0.0]).view(4, 1, 1)
    found = orthogonalise(stack)
    assert not found[3].any()
    for number in range(3):
        alone = orthogonalise(stack[number : number + 1])[0]
        torch.testing.assert_close(found[number], alone, rtol=1e-12, atol=1e-14)
        assert 0.8 < float(torch.linalg.matrix_norm(alone, 2)) < 1.15


def test_rms_makes_updates_of_adamws_size() -> None:
    for shape in ((64, 64), (64, 256), (256, 64)):
        update = orthogonalise(torch.tensor(draw(2, 1, *shape)))[0] * update_scale("rms", shape)
        assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.1)


def test_large_shapes_go_in_pieces_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for most in (1 << 27, 200):
        monkeypatch.setattr(muon, "MOST", most)
        monkeypatch.setattr(muon, "MOST_MOVED", most)
        named = {
            f"layers.{i}.ffn.up.weight": nn.Parameter(torch.tensor(draw(i, 8, 12)))
            for i in range(5)
        }
        for i, param in enumerate(named.values()):
            param.grad = torch.tensor(draw(9 + i, 8, 12))
        build_optimizer(named.items(), CONFIG).step()
        results.append(torch.stack([p.detach() for p in named.values()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


def test_a_matrix_without_gradient_is_left_alone() -> None:
    named = {n: nn.Parameter(torch.tensor(draw(1, *shape))) for n, shape in SHAPES.items()}
    before = {n: p.detach().clone() for n, p in named.items()}
    named["layers.1.ffn.up.weight"].grad = torch.ones(20, 8, dtype=torch.float64)
    build_optimizer(named.items(), CONFIG).step()
    moved = [n for n in named if not torch.equal(named[n], before[n])]
    assert moved == ["layers.1.ffn.up.weight"]


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told once; an error of the function itself is not hidden."""
    told: list[str] = []
    monkeypatch.setattr(muon, "warn", told.append)
    monkeypatch.setattr(muon, "_on_cuda", lambda args: True)

    def no_compiler(function: Any, **_: Any) -> Any:
        def call(*args: Any) -> Any:
            if args[0] < 0:
                raise ZeroDivisionError
            raise torch._dynamo.exc.InternalTorchDynamoError("no compiler\nand more")

        return call

    monkeypatch.setattr(torch, "compile", no_compiler)
    half = CompiledOnCuda(lambda number: number / 2)
    with pytest.raises(ZeroDivisionError):
        half(-1)
    assert [half(4), half(6), half(-2)] == [2, 3, -1]
    assert len(told) == 1
    assert "(no compiler)" in told[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optim.momentum": "0.9"}, "optim.momentum has no effect with optim.name adamw"),
        ({"optim.name": "muon", "optim.wide-embedding": "true"}, "use optim.name adamw8bit"),
        ({"optim.name": "muon", "optim.momentum": "1"}, "optim.momentum must be below 1"),
        ({"optim.lr-of.head": "-1"}, "optim.lr_of.head must be positive"),
        ({"optim.lr": "0", "optim.lr-of.head": "1"}, "optim.lr_of.head is 1 and optim.lr"),
        (
            {"optim.name": "muon", "parallel.shard": "2", "parallel.fsdp1": "true"},
            "parallel.fsdp1 flattens the weights",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config("hamlet", changes)


def test_the_depth_recipe_follows_the_depth() -> None:
    """nanochat's public figures at depth 12 and what they become at 20 and beyond."""
    for depth, dim, decay, batch in (
        (12, 768, 0.2, 19),
        (20, 1280, 0.072, 19),
        (32, 2048, 0.028125, 20),
    ):
        config = load_config(f"depth-{depth}")
        optim, narrow = config.optim, math.sqrt(768 / dim)
        scale = 2 ** ((batch - 19) / 2)
        assert optim.name == "muon"
        assert optim.muon_scale == "spectral"
        assert optim.lr == pytest.approx(0.02 * scale)
        assert optim.lr_of["embedding"] == pytest.approx(0.3 * narrow * scale)
        assert optim.lr_of["head"] == pytest.approx(0.004 * narrow * scale)
        assert optim.weight_decay == pytest.approx(decay)
        assert config.train.global_batch_tokens == 2**batch
