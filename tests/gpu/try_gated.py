"""An experiment, and no part of the package: SwiGLU as the end of its products.

python3 tests/gpu/try_gated.py [TOKENS WIDTH INNER]

As feed_kernel.py does it for squared ReLU: one kernel makes gate, up and what they give; another
makes the gradient of what they gave and turns it at once into theirs. Prints milliseconds beside
cuBLAS with a compiled pass, on a device that other products keep hot, and how far each result is
from the plain one. What came of it stands in docs/log.md.
"""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from foundling.model import feed_kernel
from foundling.model.feed_kernel import _place


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x,
    gate_weight,
    up_weight,
    gate,
    up,
    out,
    height,
    width,
    depth,
    PROCESSORS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
):
    tall, wide = tl.cdiv(height, ROWS), tl.cdiv(width, COLUMNS)
    ended = tl.program_id(0) - PROCESSORS
    for tile in tl.range(tl.program_id(0), tall * wide, PROCESSORS, flatten=True):
        row, column = _place(tile, tall, wide, 8)
        g = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        u = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for inner in range(tl.cdiv(depth, DEPTH)):
            strip = x.load([row * ROWS, inner * DEPTH])
            g = tl.dot(strip, gate_weight.load([column * COLUMNS, inner * DEPTH]).T, g)
            u = tl.dot(strip, up_weight.load([column * COLUMNS, inner * DEPTH]).T, u)
        ended += PROCESSORS
        row, column = _place(ended, tall, wide, 8)
        row, column = row * ROWS, column * COLUMNS
        narrow_gate, narrow_up = g.to(tl.bfloat16), u.to(tl.bfloat16)
        gate.store([row, column], narrow_gate)
        up.store([row, column], narrow_up)
        wide_gate = narrow_gate.to(tl.float32)
        bent = wide_gate / (1 + tl.exp(-wide_gate))
        out.store([row, column], (bent * narrow_up.to(tl.float32)).to(tl.bfloat16))


@triton.jit
def _turned(sums, gate, up, grad_gate, grad_up, out, row, column):  # type: ignore[no-untyped-def]
    grad = sums.to(tl.bfloat16).to(tl.float32)
    g = gate.load([row, column]).to(tl.float32)
    u = up.load([row, column]).to(tl.float32)
    share = 1 / (1 + tl.exp(-g))
    bent = g * share
    grad_up.store([row, column], (grad * bent).to(tl.bfloat16))
    slope = share + bent * (1 - share)
    grad_gate.store([row, column], (grad * u * slope).to(tl.bfloat16))
    out.store([row, column], (bent * u).to(tl.bfloat16))  # again, and so it need not be kept


@triton.jit
def _halves(sums, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    return tl.split(tl.permute(tl.reshape(sums, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad,
    weight,
    gate,
    up,
    grad_gate,
    grad_up,
    out,
    height,
    width,
    depth,
    PROCESSORS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
    PIECES: tl.constexpr,  # noqa: N803
):
    tall, wide = tl.cdiv(height, ROWS), tl.cdiv(width, COLUMNS)
    ended = tl.program_id(0) - PROCESSORS
    for tile in tl.range(tl.program_id(0), tall * wide, PROCESSORS, flatten=True):
        row, column = _place(tile, tall, wide, 8)
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for inner in range(tl.cdiv(depth, DEPTH)):
            strip = grad.load([row * ROWS, inner * DEPTH])
            sums = tl.dot(strip, weight.load([inner * DEPTH, column * COLUMNS]), sums)
        ended += PROCESSORS
        row, column = _place(ended, tall, wide, 8)
        row, column = row * ROWS, column * COLUMNS
        step: tl.constexpr = COLUMNS // PIECES
        first, second = _halves(sums, ROWS, COLUMNS)
        if PIECES == 2:
            _turned(first, gate, up, grad_gate, grad_up, out, row, column)
            _turned(second, gate, up, grad_gate, grad_up, out, row, column + step)
        else:
            one, two = _halves(first, ROWS, COLUMNS // 2)
            _turned(one, gate, up, grad_gate, grad_up, out, row, column)
            _turned(two, gate, up, grad_gate, grad_up, out, row, column + step)
            three, four = _halves(second, ROWS, COLUMNS // 2)
            _turned(three, gate, up, grad_gate, grad_up, out, row, column + 2 * step)
            _turned(four, gate, up, grad_gate, grad_up, out, row, column + 3 * step)


def forward(x: Tensor, gate_weight: Tensor, up_weight: Tensor, shape: dict[str, int]) -> Any:
    """Gate, up, and what they give."""
    rows, columns, depth = shape["ROWS"], shape["COLUMNS"], shape["DEPTH"]
    found = [x.new_empty(len(x), len(gate_weight)) for _ in range(3)]
    at = TensorDescriptor.from_tensor
    given = [at(x, [rows, depth]), *(at(w, [columns, depth]) for w in (gate_weight, up_weight))]
    made = [at(one, [rows, columns]) for one in found]
    count = _processors(found[0], rows, columns)
    sizes = (len(x), len(gate_weight), x.shape[1])
    _forward[(count,)](*given, *made, *sizes, PROCESSORS=count, **shape)
    return found


def backward(grad: Tensor, weight: Tensor, kept: list[Tensor], shape: dict[str, int]) -> Any:
    """Gradients of gate and up, and once more what they gave."""
    rows, columns, depth = shape["ROWS"], shape["COLUMNS"], shape["DEPTH"]
    found = [torch.empty_like(kept[0]) for _ in range(3)]
    at, piece = TensorDescriptor.from_tensor, [rows, columns // shape["PIECES"]]
    given = [at(grad, [rows, depth]), at(weight, [depth, columns])]
    wide = [at(one, piece) for one in (*kept, *found)]
    count = _processors(found[0], rows, columns)
    sizes = (len(grad), weight.shape[1], grad.shape[1])
    _backward[(count,)](*given, *wide, *sizes, PROCESSORS=count, **shape)
    return found


def _processors(out: Tensor, rows: int, columns: int) -> int:
    tiles = triton.cdiv(out.shape[0], rows) * triton.cdiv(out.shape[1], columns)
    return min(torch.cuda.get_device_properties(out.device).multi_processor_count, tiles)


def milliseconds(work: Callable[[], Any]) -> float:
    """Of one call, among products that keep the device at its power limit."""
    hot = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(60):
        hot @ hot
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    begin.record()
    for _ in range(30):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 30


def tried(name: str, work: Callable[[], Any], wanted: list[Tensor]) -> None:
    """Time it and compare it; what does not compile is told."""
    try:
        found = work()
        pairs = zip(found, wanted, strict=True)
        off = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
        print(f"{name}: {milliseconds(work):.3f} ms, off by {off:.1e}", flush=True)
    except Exception as error:
        print(f"{name}: {str(error).splitlines()[0][:120]}", flush=True)


def main() -> None:
    tokens, width, inner = map(int, sys.argv[1:4] or (90112, 2048, 8192))

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * width**-0.5

    x, grad = draw(tokens, width) * width**0.5, draw(tokens, width)
    gate_weight, up_weight, down_weight = draw(inner, width), draw(inner, width), draw(width, inner)

    @torch.compile
    def bend(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    @torch.compile
    def turn(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
        gate, up, grad = gate.float(), up.float(), grad.float()
        share = torch.sigmoid(gate)
        bent = gate * share
        slope = share + bent * (1 - share)
        found = (grad * up * slope, grad * bent, bent * up)
        return [one.to(torch.bfloat16) for one in found]

    def plain_forward() -> list[Tensor]:
        gate, up = x @ gate_weight.t(), x @ up_weight.t()
        return [gate, up, bend(gate, up)]

    kept = plain_forward()

    def plain_backward() -> list[Tensor]:
        return turn(grad @ down_weight, kept[0], kept[1])

    back = plain_backward()
    tried("forward, cuBLAS and a pass", plain_forward, kept)
    for columns, depth, stages, warps in itertools.product((128,), (64, 128), (2, 3, 4), (4, 8)):
        shape = {"ROWS": 128, "COLUMNS": columns, "DEPTH": depth}
        shape |= {"num_stages": stages, "num_warps": warps}
        if depth * stages <= 256:
            tried(f"forward {shape}", lambda s=shape: forward(x, gate_weight, up_weight, s), kept)
    tried("backward, cuBLAS and a pass", plain_backward, back)
    for pieces, stages, rows in itertools.product((2, 4), (2, 3, 4), (128, 256)):
        shape = {"ROWS": rows, "COLUMNS": 32768 // rows, "DEPTH": 64, "PIECES": pieces}
        shape |= {"num_stages": stages, "num_warps": 8}
        tried(f"backward {shape}", lambda s=shape: backward(grad, down_weight, kept[:2], s), back)
    squares = feed_kernel.squared(x, gate_weight)
    tried("squared ReLU, forward", lambda: [feed_kernel.squared(x, gate_weight)], [squares])


if __name__ == "__main__":
    main()
