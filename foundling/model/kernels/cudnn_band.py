"""cuDNN's attention inside a window, by a graph of its own.

torch asks cuDNN for plain causal attention only, and its flash kernel, which knows windows, is
slower on Hopper: in a window of half a row it takes 2.38 ms where cuDNN takes 1.75 for whole rows
and 1.53 for this band (docs/performance.md). The package nvidia-cudnn-frontend (extra: cudnn) can
ask for one. Its graphs are built once for each shape and kept; both passes are operators that a
compiler takes as they are.

Shapes: B batch, T time, H query heads, K key/value heads, D head width.
"""

import atexit
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides."""


class BandGraphKey(NamedTuple):
    """What a graph is built for, besides the tensors' layouts."""

    device: torch.device
    dtype: torch.dtype
    window: int
    scale: float
    repeats: bool
    """Whether gradients must be the same bits each time."""


@torch.library.custom_op("foundling::band", mutates_args=())
def band(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """q [B, H, T, D] and k, v [B, K, T, D] to what each position mixes of the `window` positions up
    to itself, and the logarithms of the softmax's sums [B, H, T, 1]."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"cuDNN's band takes numbers of 16 bits, and these are {q.dtype}")
    out, sums = torch.empty_like(q), _sums(q)
    graph = _forward(_asked(q, window), *map(_layout, (q, k, v, out, sums)))
    _launch(graph, q.device, (q, k, v, out, sums))
    return out, sums


@band.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), _sums(q)


@torch.library.custom_op("foundling::band_backward", mutates_args=())
def band_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    found = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    tensors = (q, k, v, out, grad, sums, *found)
    _launch(_backward(_asked(q, window), *map(_layout, tensors)), q.device, tensors)
    return found


@band_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _turn(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    return (*band_backward(grad, *ctx.saved_tensors, ctx.window), None)


band.register_autograd(_turn, setup_context=_keep)


def _sums(q: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:-1], 1), dtype=torch.float32)


def _asked(q: Tensor, window: int) -> BandGraphKey:
    repeats = torch.are_deterministic_algorithms_enabled()
    return BandGraphKey(q.device, q.dtype, window, float(q.shape[-1]) ** -0.5, repeats)


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride()


def _launch(
    graph: tuple[Any, list[Any]], device: torch.device, tensors: tuple[Tensor, ...]
) -> None:
    import cudnn

    built, names = graph
    handle = _handle(device)
    cudnn.set_stream(handle=handle, stream=_stream(device))
    room = torch.empty(built.get_workspace_size(), dtype=torch.uint8, device=device)
    given = [tensor.detach() for tensor in tensors]
    built.execute(dict(zip(names, given, strict=True)), room, handle=handle)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@lru_cache
def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@lru_cache(maxsize=64)
def _forward(asked: BandGraphKey, *layouts: Layout) -> tuple[Any, list[Any]]:
    """The graph, and its tensors q, k, v, out, sums."""
    graph, options = _begun(asked)
    q, k, v = (_named(graph, asked, layout) for layout in layouts[:3])
    out, sums = graph.sdpa(q=q, k=k, v=v, generate_stats=True, **options)
    _give(out, layouts[3])
    _give(sums, layouts[4], wide=True)
    return _built(graph), [q, k, v, out, sums]


@lru_cache(maxsize=64)
def _backward(asked: BandGraphKey, *layouts: Layout) -> tuple[Any, list[Any]]:
    """The graph, and its tensors q, k, v, out, grad, sums and the three gradients."""
    graph, options = _begun(asked)
    q, k, v, out, grad = (_named(graph, asked, layout) for layout in layouts[:5])
    sums = _named(graph, asked, layouts[5], wide=True)
    given = {"q": q, "k": k, "v": v, "o": out, "dO": grad, "stats": sums}
    found = graph.sdpa_backward(**given, **options, use_deterministic_algorithm=asked.repeats)
    for tensor, layout in zip(found, layouts[6:], strict=True):
        _give(tensor, layout)
    return _built(graph), [q, k, v, out, grad, sums, *found]


@lru_cache
def _forget_at_the_end() -> None:
    """Graphs that are there when Python ends are pages of complaints on stderr."""
    for kept in (_forward, _backward):
        atexit.register(kept.cache_clear)


def _begun(asked: BandGraphKey) -> tuple[Any, dict[str, Any]]:
    import cudnn

    _forget_at_the_end()
    types = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=_narrow(asked),
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=_handle(asked.device),
    )
    options = {
        "attn_scale": asked.scale,
        "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
        "diagonal_band_left_bound": asked.window,
        "diagonal_band_right_bound": 0,
    }
    return graph, options


def _named(graph: Any, asked: BandGraphKey, layout: Layout, *, wide: bool = False) -> Any:
    import cudnn

    size, stride = map(list, layout)
    kind = cudnn.data_type.FLOAT if wide else _narrow(asked)
    return graph.tensor(dim=size, stride=stride, data_type=kind)


def _narrow(asked: BandGraphKey) -> Any:
    import cudnn

    types = cudnn.data_type
    return types.HALF if asked.dtype == torch.float16 else types.BFLOAT16


def _give(tensor: Any, layout: Layout, *, wide: bool = False) -> None:
    """Make a result of the graph an output that lies as ours does."""
    import cudnn

    size, stride = map(list, layout)
    tensor.set_output(True).set_dim(size).set_stride(stride)
    if wide:
        tensor.set_data_type(cudnn.data_type.FLOAT)


def _built(graph: Any) -> Any:
    import cudnn

    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph
