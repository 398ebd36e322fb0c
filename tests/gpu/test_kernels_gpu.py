"""Our own kernels and the attention kernels on CUDA, against float64."""

from collections.abc import Sequence

import pytest
import torch

from foundling.config.load import load_config
from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.run import RunConfig
from foundling.config.train import TrainConfig
from foundling.model.initialization import init_weights
from foundling.model.kernels.attention_backends import KERNELS, Kernel, MaskSpec, note_count
from foundling.model.layers import Embedding
from foundling.model.loss import (
    IGNORE,
    Float8Matrix,
    Kind,
    cross_entropy_sum,
    float8_matmul,
    loss_and_gradient,
    to_float8,
)
from foundling.model.mlp import relu2_backward_matmul, relu2_matmul
from foundling.model.transformer import Transformer
from foundling.parallel.apply import apply_parallel
from foundling.parallel.mesh import ALONE
from foundling.runtime.device import choose_device
from foundling.train.autotune.attention import AttentionShape, attention_error, reference
from foundling.train.autotune.loss import choose_loss
from foundling.train.autotune.mlp import mlp_error
from foundling.train.autotune.present_machine import autotune

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


@pytest.mark.parametrize("vocab", [5000, 5001])
@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_the_head_loss_of_narrow_products(vocab: int, softcap: float) -> None:
    """An odd head is filled up with zeros on its way into bf16."""
    torch.manual_seed(0)
    hidden = torch.randn(600, 128, device=CUDA).bfloat16()
    head = (torch.randn(vocab, 128, device=CUDA) * 0.2).bfloat16().float().requires_grad_()
    targets = torch.randint(vocab, (600,), device=CUDA)
    targets[::7] = IGNORE
    narrow = hidden.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        total, _ = cross_entropy_sum(narrow, head, targets, softcap)
    grads = torch.autograd.grad(total, (narrow, head))
    wide = (hidden.double().requires_grad_(), head.detach().double().requires_grad_())
    exact, _ = cross_entropy_sum(*wide, targets, softcap)
    assert float(total) == pytest.approx(float(exact), rel=1e-3)
    for found, right in zip(grads, torch.autograd.grad(exact, wide), strict=True):
        assert found.shape == right.shape
        assert float((found.double() - right).norm() / right.norm()) < 1e-2


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("vocab", [5000, 5001])
def test_logits_of_float8_numbers(kind: Kind, vocab: int) -> None:
    """The device multiplies the numbers that a CPU multiplies in fp32, and the loss is near."""
    torch.manual_seed(0)
    hidden = torch.randn(608, 256, device=CUDA).bfloat16().requires_grad_()
    head = (torch.randn(vocab, 256, device=CUDA) / 16).requires_grad_()
    part = to_float8(head.detach()[:4992].bfloat16(), kind)
    found = float8_matmul(hidden.detach(), part).float().cpu()
    there = Float8Matrix(part.numbers.cpu(), part.scale.cpu())
    wanted = float8_matmul(hidden.detach().cpu(), there).float()
    assert float((found - wanted).norm() / wanted.norm()) < 5e-3
    targets = torch.randint(vocab, (608,), device=CUDA)
    results = []
    for float8 in (kind, None):
        with torch.autocast("cuda", torch.bfloat16):
            total, _ = cross_entropy_sum(hidden, head, targets, 0.0, 0.0, float8)
        results.append((float(total), *torch.autograd.grad(total, (hidden, head))))
    (narrow, *grads), (exact, *right) = results
    assert narrow != exact
    assert narrow == pytest.approx(exact, rel=2e-3)
    for grad, other in zip(grads, right, strict=True):
        assert float((grad - other).norm() / other.norm()) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.5, 15.0, 40.0, 60.0])
def test_logits_beyond_every_cap(softcap: float, dtype: torch.dtype) -> None:
    """Ten thousand on either side and infinite ones are bent as float64 bends them; one NaN makes
    its row NaN and no other."""
    logits = torch.randn(7, 5000, device=CUDA).to(dtype)
    logits[0], logits[1], logits[2, ::2] = -1e4, 1e4, 1e4
    logits[3], logits[3, 5], logits[4] = torch.inf, -torch.inf, -torch.inf
    logits[5, 4999] = torch.nan
    targets = torch.tensor([0, 1, 2, 5, 4998, 0, 3], device=CUDA)
    exact, wanted = loss_and_gradient(logits.double(), targets, softcap, 0.0)
    losses, found = loss_and_gradient(logits, targets, softcap, 0.0)
    assert losses[5].isnan()
    assert found[5].isnan().all()
    others = torch.arange(7, device=CUDA) != 5
    torch.testing.assert_close(losses[others].double(), exact[others], rtol=1e-5, atol=1e-5)
    near = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found[others].double(), wanted[others], rtol=near, atol=near)


@pytest.mark.parametrize("spread", [1.0, 4.0, 15.0])
def test_bent_logits_cost_no_more_than_bf16_does(spread: float) -> None:
    """The hardware's tanh bends bf16 logits: what it adds to the gradient cannot be seen beside the
    rounding of the gradient itself, on the words that were not wanted either."""
    torch.manual_seed(0)
    logits = (torch.randn(128, 32768, device=CUDA) * spread).bfloat16()
    targets = torch.randint(32768, (128,), device=CUDA)
    exact, wanted = loss_and_gradient(logits.double(), targets, 15.0, 0.0)
    losses, found = loss_and_gradient(logits.clone(), targets, 15.0, 0.0)
    assert abs(float((losses - exact).mean())) < 2e-5
    assert float((losses - exact).abs().max()) < 1e-4
    others = torch.ones_like(wanted, dtype=torch.bool).scatter_(1, targets[:, None], False)
    for part in (others, others & (logits.abs() > 30), ~others):
        right = wanted[part]
        rounding = (right.bfloat16().double() - right).norm()
        assert float((found.double()[part] - right).norm()) <= 1.05 * float(rounding)


@pytest.mark.parametrize("height", [6.0, 12.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sure_row_still_learns(height: float, dtype: torch.dtype) -> None:
    """Where a target has nearly all of the probability, what is left of its loss and gradient is
    that of float64, not the rounding of a tanh."""
    torch.manual_seed(0)
    logits = torch.randn(64, 1000, device=CUDA) - height
    targets = torch.randint(1000, (64,), device=CUDA)
    logits[torch.arange(64, device=CUDA), targets] = height + torch.rand(64, device=CUDA)
    logits = logits.to(dtype)
    exact, wanted = loss_and_gradient(logits.double(), targets, 15.0, 0.0)
    losses, found = loss_and_gradient(logits.clone(), targets, 15.0, 0.0)
    torch.testing.assert_close(losses.double(), exact, rtol=1e-2, atol=4e-6)
    own = targets[:, None]
    torch.testing.assert_close(
        found.gather(1, own).double(), wanted.gather(1, own), rtol=2e-2, atol=0
    )


@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_the_loss_is_chosen_by_launching_each(softcap: float) -> None:
    config = load_config("llama-1.24b", {"train.kernels.loss": "auto", "train.batch-size": "4"})
    config = config.replace(model={"logit_softcap": softcap})
    choice = choose_device("cuda", "bf16")
    found, line = choose_loss(config.model, config.train, config.parallel, choice)
    assert found in ("fused", "torch", "liger")
    assert "fused" in line
    for way in ("torch", "liger"):  # timed, or refused with a reason
        assert way in line


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_table_is_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = Embedding(5000, 1280, device=CUDA)
    tokens = torch.randint(50, (4, 512), device=CUDA)  # many of each
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        rows = table(tokens)
    assert rows.dtype == dtype
    grad = torch.randn_like(rows)
    (found,) = torch.autograd.grad(rows, table.weight, grad)
    wanted = torch.zeros(5000, 1280, device=CUDA, dtype=torch.float64)
    wanted.index_add_(0, tokens.flatten(), grad.flatten(0, 1).double())
    assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize(
    "name", ["cudnn", "band", "flash", "flash3", "flash4", "flex", "efficient", "math"]
)
@pytest.mark.parametrize("mask", ["causal", "documents", "window", "both"])
def test_attention_kernels_against_float64(name: str, mask: str) -> None:
    kernel, shape = KERNELS[name], AttentionShape(2, 512, 8, 2, 64, 0.0)
    documents = None
    if mask in ("documents", "both"):
        documents = (torch.arange(512, device=CUDA) // 100).expand(2, -1).contiguous()
    spec = MaskSpec(documents, 64 if mask in ("window", "both") else 0)
    if kernel.refusal(spec, 0.0):
        pytest.skip(str(kernel.refusal(spec, 0.0)))
    assert attention_error(kernel, shape, spec, CUDA, torch.bfloat16) < 2e-2


@pytest.mark.parametrize("heads", [(8, 8, 64), (8, 2, 64), (6, 6, 128), (14, 2, 64)])
@pytest.mark.parametrize("window", [0, 48])
@pytest.mark.parametrize("name", ["flash", "flash4"])
def test_documents_of_every_length_through_flash(
    name: str, heads: tuple[int, int, int], window: int
) -> None:
    """One position, a block of the kernel and one more, a whole row, rows that end in padding; the
    whole batch at once, as a run has it, and float64 over every row."""
    kernel = needed(name)
    lengths = [[1, 1, 2, 127, 128, 129, 124], [512], [500], [3, 200, 256]]
    documents = torch.full((4, 512), -1, dtype=torch.int32)
    for row, parts in enumerate(lengths):
        numbers = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(parts))
        documents[row, : len(numbers)] = numbers.int()
    shape = AttentionShape(4, 512, *heads, 0.0)
    for noted in (None, 15, 200):
        given = documents.to(CUDA)
        spec = MaskSpec(given if noted is None else note_count(given, noted), window)
        q, k, v = shape.random_inputs(CUDA, torch.bfloat16)
        out = kernel.attend(q, k, v, kernel.mask(spec, 512, CUDA), 0.0)
        grad = torch.randn_like(out)
        found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        exact = reference(spec, *wide)
        wanted = [exact, *torch.autograd.grad(exact, wide, grad.double())]
        for ours, right in zip(found, wanted, strict=True):
            assert float((ours.double() - right).norm() / right.norm()) < 1e-2


@pytest.mark.parametrize(
    ("mode", "policy"), [("off", "none"), ("blocks", "none"), ("blocks", "all")]
)
@pytest.mark.parametrize("name", ["band", "flash", "flash4", "flex"])
def test_windows_inside_blocks(name: str, mode: str, policy: str) -> None:
    needed(name, 64)
    sizes = {"vocab_size": 64, "dim": 256, "layers": 2, "heads": 4, "kv_heads": 2}
    config = ModelConfig(**sizes, ffn_dim=256, windows=(64, 64, 64, 0))  # type: ignore[arg-type]
    tokens = torch.randint(64, (3, 257), device=CUDA)
    right = gradients(config, tokens, "math", "none", "off")
    found = gradients(config, tokens, name, policy, mode)
    assert float((found - right).norm() / right.norm()) < 2e-2


def needed(name: str, window: int = 0) -> Kernel:
    """A kernel, where its package is there."""
    if refusal := KERNELS[name].refusal(MaskSpec(None, window), 0.0):
        pytest.skip(refusal)
    return KERNELS[name]


def gradients(
    config: ModelConfig,
    tokens: torch.Tensor,
    kernel: str,
    policy: str,
    mode: str,
    masks: Sequence[torch.Tensor | None] = (None,),
    only: str = "",
    exact: bool = False,
) -> torch.Tensor:
    """Of all weights or `only` some, by a kernel inside a model, in bf16 or `exact` in fp32; of the
    last of several micro-batches."""
    torch._dynamo.reset()
    model = Transformer(config)
    init_weights(model, 1)
    model.to(CUDA).use_kernels(KERNELS[kernel], KERNELS[kernel])
    for name, param in model.named_parameters():
        if "value_" in name:  # gates begin as zero, and would have no gradient to pass on
            generator = torch.Generator(CUDA).manual_seed(2)
            torch.nn.init.normal_(param, generator=generator)
    train = TrainConfig(compile=mode)  # type: ignore[arg-type]
    module = apply_parallel(model, ParallelConfig(recompute=policy), ALONE, train)
    for documents in masks:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=not exact):
            total, _ = module(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), documents)
            (total / 768).backward()
    named = [(name, param.grad) for name, param in model.named_parameters() if only in name]
    return torch.cat([grad.flatten() for _, grad in named if grad is not None]).double()


@pytest.mark.parametrize("name", ["flash", "flash4"])
def test_documents_inside_a_compiled_block_and_a_recomputed_one(name: str) -> None:
    needed(name)
    config = ModelConfig(vocab_size=64, dim=128, layers=3, heads=4, kv_heads=2, ffn_dim=256)
    documents = (torch.arange(256) // 50).expand(3, -1).contiguous().to(CUDA)
    tokens = torch.randint(64, (3, 257), device=CUDA)
    # Another number of places: another graph, the same result.
    masks = [note_count(documents.clone(), most) for most in (15, 40)]
    right = gradients(config, tokens, "math", "none", "off", masks)
    for policy, mode in (
        ("none", "off"),
        ("none", "blocks"),
        ("all", "blocks"),
        ("per-op", "blocks"),
    ):
        found = gradients(config, tokens, name, policy, mode, masks)
        assert float((found - right).norm() / right.norm()) < 2e-2


@pytest.mark.parametrize(
    ("mode", "policy"), [("blocks", "none"), ("blocks", "all"), ("model", "none")]
)
def test_value_gates_inside_compiled_blocks(mode: str, policy: str) -> None:
    """Their columns' gradient is added where the value product's lies, and nowhere else."""
    sizes = {"vocab_size": 64, "dim": 256, "layers": 4, "heads": 4, "ffn_dim": 256}
    fields = {"value_embeds": True, "residual_scales": True, "qk_norm": True}
    config = ModelConfig(**sizes, **fields)  # type: ignore[arg-type]
    torch.manual_seed(0)
    tokens = torch.randint(64, (3, 257), device=CUDA)
    for only in ("", "attn_norm", "mix", "value_gate"):  # what lies below the gates, by itself
        right = gradients(config, tokens, "math", "none", "off", only=only, exact=True)
        eager = gradients(config, tokens, "flash", "none", "off", only=only)
        found = gradients(config, tokens, "flash", policy, mode, only=only)
        # bf16 alone is 1% to 3% off, eager or not; a gradient that is lost is all of it.
        rounding = float((eager - right).norm() / right.norm())
        assert float((found - right).norm() / right.norm()) < 2 * rounding + 1e-2 < 0.1, only


@pytest.mark.parametrize("rows", [300, 4096])
@pytest.mark.parametrize(("width", "inner"), [(256, 1024), (768, 3072), (200, 904)])
def test_the_fused_feed_forward_is_that_of_float64(rows: int, width: int, inner: int) -> None:
    config = RunConfig(model=ModelConfig(dim=width, heads=1, ffn_dim=inner, activation="relu2"))
    assert mlp_error(config.model, CUDA) < 1e-2
    torch.manual_seed(0)
    shapes = ((rows, width), (inner, width), (width, inner))
    parts = [torch.randn(shape, device=CUDA) / shape[1] ** 0.5 for shape in shapes]
    x, up, down = (part.bfloat16() for part in parts)
    squares = relu2_matmul(x, up)
    exact = (x.double() @ up.double().t()).relu().square()
    assert float((squares.double() - exact).norm() / exact.norm()) < 5e-3
    before = relu2_backward_matmul(x, down, squares)
    exact = (x.double() @ down.double()) * 2 * squares.double().sqrt()
    assert float((before.double() - exact).norm() / exact.norm()) < 5e-3


def test_a_run_takes_the_faster_feed_forward() -> None:
    config = load_config("depth-12", {"train.batch_size": 8})
    settled, told = autotune(config, choose_device("cuda", "bf16"))
    assert settled.train.kernels.mlp in ("plain", "fused")
    assert any(line.startswith("mlp") for line in told), told


@pytest.mark.parametrize("where", ["x", "up"])
def test_one_nan_is_seen_behind_a_fused_product(where: str) -> None:
    x, up = torch.randn(300, 64, device=CUDA), torch.randn(512, 64, device=CUDA)
    (x if where == "x" else up)[7, 5] = torch.nan
    squares = relu2_matmul(x.bfloat16(), up.bfloat16())
    assert (squares[7] if where == "x" else squares[:, 7]).isnan().all()
    assert int(squares.isnan().sum()) == (512 if where == "x" else 300)
