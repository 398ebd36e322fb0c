"""Tensors of every kind a trainer saves, and how to compare them."""

import torch


def sample(seed: int) -> dict[str, torch.Tensor]:
    """Tensors that differ for each seed."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 7, generator=g)
    weight[0, 0], weight[0, 1], weight[0, 2] = float("nan"), float("inf"), -0.0
    return {
        "model.weight": weight,
        "model.half": torch.randn(33, generator=g).bfloat16(),
        "model.transposed": torch.randn(4, 6, generator=g).T,
        "model.slice": torch.randn(10, generator=g)[3:5],
        "model.empty": torch.empty(0, 3),
        "optim.weight.step": torch.tensor(float(seed)),
        "optim.count": torch.randint(-(2**62), 2**62, (9,), generator=g),
        "optim.flag": torch.tensor([True, False]),
    }


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same form with nothing of the content."""
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two dicts hold the same bytes under the same names; NaN equals NaN."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and a[name].contiguous().view(-1).view(torch.uint8).tolist()
        == b[name].contiguous().view(-1).view(torch.uint8).tolist()
        for name in a
    )
