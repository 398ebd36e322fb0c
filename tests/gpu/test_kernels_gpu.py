"""Our own kernels and the attention kernels on CUDA, against float64."""

import pytest
import torch

from foundling.model.kernels import KERNELS, MaskSpec
from foundling.model.lookup import Lookup
from foundling.model.loss import IGNORE, cross_entropy_sum
from foundling.train.kernels import Shape, worst_error

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("vocab", [1000, 32768, 50257, 131072])
@pytest.mark.parametrize(
    ("softcap", "z_loss"), [(0.0, 0.0), (15.0, 0.0), (60.0, 0.0), (0.0, 1e-3), (15.0, 1e-3)]
)
def test_the_head_loss_is_that_of_float64(vocab: int, softcap: float, z_loss: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(600, 128, device=CUDA)
    head = torch.randn(vocab, 128, device=CUDA) * 0.2
    targets = torch.randint(vocab, (600,), device=CUDA)
    targets[::7] = IGNORE
    results = []
    for dtype in (torch.float32, torch.float64):
        h, w = hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()
        total, count = cross_entropy_sum(h, w, targets, softcap, z_loss)
        results.append((total.double(), count, *torch.autograd.grad(total, (h, w))))
    (ours, n, *grads), (exact, m, *wanted) = results
    assert int(n) == int(m) == int((targets != IGNORE).sum())
    assert float(ours) == pytest.approx(float(exact), rel=1e-5)
    for found, right in zip(grads, wanted, strict=True):
        assert float((found.double() - right).norm() / right.norm()) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_table_is_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = Lookup(5000, 1280, device=CUDA)
    tokens = torch.randint(50, (4, 512), device=CUDA)  # many of each
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        rows = table(tokens)
    assert rows.dtype == dtype
    grad = torch.randn_like(rows)
    (found,) = torch.autograd.grad(rows, table.weight, grad)
    wanted = torch.zeros(5000, 1280, device=CUDA, dtype=torch.float64)
    wanted.index_add_(0, tokens.flatten(), grad.flatten(0, 1).double())
    assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("name", ["cudnn", "flash", "flex", "efficient", "math"])
@pytest.mark.parametrize("mask", ["causal", "documents", "window"])
def test_attention_kernels_against_float64(name: str, mask: str) -> None:
    kernel, shape = KERNELS[name], Shape(2, 512, 8, 2, 64, 0.0)
    places = torch.arange(512, device=CUDA)
    documents = (places // 100).expand(2, -1).contiguous() if mask == "documents" else None
    spec = MaskSpec(documents, 128 if mask == "window" else 0)
    if kernel.refusal(spec, 0.0):
        pytest.skip(str(kernel.refusal(spec, 0.0)))
    assert worst_error(kernel, shape, spec, CUDA, torch.bfloat16) < 2e-2
