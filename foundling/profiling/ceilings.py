"""Measures what this device reaches in each kind of work that a step is made of.

A datasheet's peak says nothing about a CPU and flatters a throttled GPU; and a rate depends on the
shape, so a few that models use are tried and all are kept. Values are random: products of zeros run
an eighth faster on a GPU that is limited by its power.
"""

import os
import time
from datetime import UTC, datetime

import torch
import torch.nn.functional as F
from torch import Tensor

from foundling.config.model import ModelConfig
from foundling.model.loss import cross_entropy_sum
from foundling.model.transformer import Transformer
from foundling.parallel.recompute import apply_recompute
from foundling.plan.hardware import AttentionRate, Ceilings, LossRate, MatmulRate
from foundling.runtime.device import device_name, synchronise
from foundling.train.autotune.harness import IN_A_ROW_S, median_seconds

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# (m, k, n): squares, then rows of a micro-batch times the matrices of models from 60M to 8B.
CUDA_MATMULS = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 384, 1408),
    (16384, 768, 2688),
    (16384, 1280, 5120),
    (16384, 2048, 512),
    (16384, 2048, 2048),
    (16384, 2048, 8192),
    (16384, 8192, 2048),
    (16384, 4096, 14336),
)
CPU_MATMULS = ((1024, 1024, 1024), (2048, 160, 448), (2048, 448, 160), (2048, 512, 1408))
# (batch, seq, heads, kv_heads, head_dim)
CUDA_ATTENTIONS = ((16, 2048, 32, 8, 64), (4, 8192, 32, 8, 64), (16, 2048, 10, 10, 128))
CPU_ATTENTIONS = ((8, 256, 5, 5, 32), (2, 1024, 8, 8, 64))
# (rows, dim, vocab)
CUDA_LOSSES = ((16384, 384, 49152), (16384, 2048, 131072))
CPU_LOSSES = ((2048, 160, 2048),)


def measure_ceilings(device: torch.device, *, quick: bool = False) -> Ceilings:
    """Measure everything; a few seconds (`quick`: the first shape of each kind, for tests)."""
    cuda = device.type == "cuda"
    first = slice(0, 1) if quick else slice(None)
    seconds = 0.02 if quick else 0.2
    # bf16 products on a CPU can kill the process (see runtime/device.py), and are not offered.
    dtypes = DTYPES if cuda else {"fp32": torch.float32}
    matmuls = list(CUDA_MATMULS if cuda else CPU_MATMULS)[first]
    attentions = list(CUDA_ATTENTIONS if cuda else CPU_ATTENTIONS)[first]
    losses = list(CUDA_LOSSES if cuda else CPU_LOSSES)[first]
    elements = (1 << 28) if cuda else (1 << 22)
    found = Ceilings(
        device=device_name(device),
        kind=device.type,
        torch=torch.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        threads=torch.get_num_threads(),
        memory_bytes=memory_bytes(device),
        matmul=tuple(_matmul(device, d, s, seconds) for d in dtypes for s in matmuls),
        attention=tuple(_attention(device, d, s, seconds) for d in dtypes for s in attentions),
        loss=tuple(_loss(device, d, s, seconds) for d in dtypes for s in losses),
        copy_bytes_per_s=_copy(device, elements, seconds),
        norm_bytes_per_s=_norm(device, elements // 4, seconds),
        optimizer_bytes_per_s=_optimizer(device, elements // 4, seconds),
        launch_s=_launch(device),
        blocks=_blocks(device) if cuda else {},
        context_bytes=_context_bytes(device),
    )
    if cuda:
        torch.cuda.empty_cache()  # what follows should not find the pool full of our segments
    return found


def _matmul(
    device: torch.device, dtype: str, shape: tuple[int, int, int], seconds: float
) -> MatmulRate:
    m, k, n = shape
    left = torch.randn(m, k, device=device, dtype=DTYPES[dtype])
    right = torch.randn(k, n, device=device, dtype=DTYPES[dtype])
    # Several products a call, so that the clock's and the launch's microseconds do not count.
    repeats = max(1, round(2e11 / (2 * m * k * n))) if device.type == "cuda" else 1

    def work() -> None:
        for _ in range(repeats):
            torch.mm(left, right)

    took = median_seconds(work, device, seconds) / repeats
    return MatmulRate(dtype=dtype, m=m, k=k, n=n, flops_per_s=2 * m * k * n / took)


def _attention(
    device: torch.device, dtype: str, shape: tuple[int, int, int, int, int], seconds: float
) -> AttentionRate:
    batch, seq, heads, kv_heads, width = shape
    if dtype == "fp32" and device.type == "cuda":
        batch = max(1, batch // 4)  # eight times slower, and it should take no longer

    def draw(count: int) -> Tensor:
        shape = (batch, count, seq, width)
        return torch.randn(shape, device=device, dtype=DTYPES[dtype]).requires_grad_()

    q, k, v = draw(heads), draw(kv_heads), draw(kv_heads)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    grad = torch.randn_like(forward())

    def both() -> None:
        forward().backward(grad)  # type: ignore[no-untyped-call]

    forward_s = median_seconds(forward, device, seconds, at_least=IN_A_ROW_S)
    both_s = median_seconds(both, device, seconds, at_least=IN_A_ROW_S)
    return AttentionRate(
        dtype=dtype,
        batch=batch,
        seq=seq,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        forward_s=forward_s,
        backward_s=max(both_s - forward_s, 0.0),
        flops_per_s=7 * batch * heads * seq**2 * width / both_s,
    )


def _loss(
    device: torch.device, dtype: str, shape: tuple[int, int, int], seconds: float
) -> LossRate:
    rows, dim, vocab = shape
    if dtype == "fp32" and device.type == "cuda":
        rows //= 8
    hidden = torch.randn(rows, dim, device=device).requires_grad_()
    head = torch.randn(vocab, dim, device=device).mul_(dim**-0.5).requires_grad_()
    targets = torch.randint(vocab, (rows,), device=device)

    def work() -> None:
        with torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "fp32"):
            total, _ = cross_entropy_sum(hidden, head, targets)
            total.backward()  # type: ignore[no-untyped-call]

    took = median_seconds(work, device, seconds)
    return LossRate(
        dtype=dtype,
        rows=rows,
        dim=dim,
        vocab=vocab,
        seconds=took,
        flops_per_s=6 * rows * dim * vocab / took,
    )


def _copy(device: torch.device, elements: int, seconds: float) -> float:
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return 8 * elements / median_seconds(lambda: target.copy_(source), device, seconds)


def _norm(device: torch.device, elements: int, seconds: float) -> float:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width = 1024
    x = torch.randn(elements // width, width, device=device, dtype=dtype).requires_grad_()
    weight = torch.ones(width, device=device, dtype=dtype)
    grad = torch.randn_like(x)

    def work() -> None:
        x.grad = None
        F.rms_norm(x, (width,), weight, 1e-5).backward(grad)  # type: ignore[no-untyped-call]

    return 5 * elements * x.element_size() / median_seconds(work, device, seconds)


def _optimizer(device: torch.device, elements: int, seconds: float) -> float:
    parameters = [torch.randn(elements // 8, device=device).requires_grad_() for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    return 28 * elements / median_seconds(optimizer.step, device, seconds)


def _launch(device: torch.device, count: int = 1000) -> float:
    x = torch.zeros(1, device=device)
    for _ in range(10):
        x.add_(1.0)
    synchronise(device)
    started = time.perf_counter()
    for _ in range(count):
        x.add_(1.0)
    synchronise(device)
    return (time.perf_counter() - started) / count


def _blocks(device: torch.device, layers: int = 12) -> dict[str, tuple[float, float]]:
    """Python's time for a block: blocks so small that the device always waits for it."""
    tiny = ModelConfig(dim=64, layers=layers, heads=4, kv_heads=2, ffn_dim=128, vocab_size=64)
    tokens = torch.zeros(1, 16, dtype=torch.long, device=device)
    found = {}
    for name, policy in (("eager", "none"), ("per-op", "per-op")):
        model = Transformer(tiny).to(device)
        apply_recompute(model.layers, policy)
        passes = sorted(_two_passes(model, tokens) for _ in range(12))
        forward, backward = passes[len(passes) // 2]
        found[name] = (forward / layers, backward / layers)
    return found


def _two_passes(model: Transformer, tokens: Tensor) -> tuple[float, float]:
    device = tokens.device
    with torch.autocast(device.type, torch.bfloat16):
        synchronise(device)
        started = time.perf_counter()
        result = model.hidden(tokens)
        synchronise(device)
        turned = time.perf_counter()
        result.backward(torch.ones_like(result))  # type: ignore[no-untyped-call]
        synchronise(device)
    model.zero_grad()
    return turned - started, time.perf_counter() - turned


def memory_bytes(device: torch.device) -> int:
    """All of the device's, or of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _context_bytes(device: torch.device) -> int:
    """What is in use on the device beyond torch's own segments (other processes' too)."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))
