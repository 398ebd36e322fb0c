"""Kernels, by launching each and comparing it with a slow one: what cannot run says so here.

One account's attention in fp32 took the path that writes the whole score matrix, and nothing said
so: 22.5 GB instead of 6.2. A bf16 product on some virtual machines ends the process with SIGILL.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from foundling.config.sections import ModelConfig, RunConfig
from foundling.doctor.asked import Asked
from foundling.doctor.lines import Line, failed, passed, warned
from foundling.doctor.task import Notes
from foundling.model import Transformer
from foundling.runtime.device import choose
from foundling.train.feed_forward import choose_feed_forward

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Relative, in norm: TF32 products are allowed, nonsense is not."""
REMEDY = "install the torch build that fits this device"


def check(asked: Asked, notes: Notes) -> Iterator[Line]:
    """Every kernel that a training step launches."""
    choice = choose(asked.device, asked.dtype, asked.local_rank)
    device, dtype, config = choice.device, choice.dtype, asked.run_config()
    where = f"on {device} in {str(dtype).removeprefix('torch.')}"
    if notes.begins("matmul"):
        yield _held("matmul", where, dtype, lambda: _matmul(device, dtype))
    model = config.model if config else ModelConfig()
    with_mask = bool(config and config.data.document_mask)
    offered = []
    for name, backend in BACKENDS.items():
        if notes.begins(f"attention, {name}") and _attends(model, device, dtype, backend):
            offered.append(name)
    if notes.begins("attention, chosen"):
        yield _chosen(model, device, dtype, offered, with_mask=with_mask)
    if config and notes.begins("feed-forward"):
        yield from _feed_forward(config, device, dtype)
    if notes.begins("fused AdamW"):
        yield _held("fused AdamW", f"on {device}", torch.float32, lambda: _adamw(device))
    if notes.begins("compiled block"):
        yield _compiled(device, config)


def _feed_forward(config: RunConfig, device: torch.device, dtype: torch.dtype) -> Iterator[Line]:
    """The kernels of a squared ReLU, where there is a choice: rank 0 chooses for all others."""
    _, line = choose_feed_forward(config, device, dtype)
    if line:
        yield (warned if "WARNING" in line else passed)("kernels", line)


def _held(
    what: str, where: str, dtype: torch.dtype, compare: Callable[[], tuple[Tensor, Tensor]]
) -> Line:
    """A line about a result and its reference."""
    try:
        found, wanted = compare()
    except RuntimeError as error:
        return failed("kernels", f"{what} {where}: {_first_words(error)}; {REMEDY}.", of_node=True)
    gap = relative_gap(found, wanted)
    if not gap <= TOLERANCE[dtype]:
        return failed(
            "kernels",
            f"{what} {where} is wrong by {gap:.1e} of its norm; leave this device out: it computes"
            " nonsense.",
            of_node=True,
        )
    return passed("kernels", f"{what} {where} (off by {gap:.0e})", {"gap": gap})


def relative_gap(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is right."""
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def _matmul(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    left, right = (torch.randn(256, 256, dtype=torch.float64) for _ in range(2))
    found = left.to(device, dtype) @ right.to(device, dtype)
    return found, left.to(dtype).double() @ right.to(dtype).double()


def _inputs(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    heads = (model.heads, model.num_kv_heads, model.num_kv_heads)
    return [
        torch.randn(1, count, 128, model.head_width, device=device, dtype=dtype).requires_grad_()
        for count in heads
    ]


def _attends(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, backend: SDPBackend
) -> bool:
    """Whether a backend takes the model's heads, forward and backward."""
    q, k, v = _inputs(model, device, dtype)
    grouped = model.heads != model.num_kv_heads
    try:
        with sdpa_kernel([backend]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            out.sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def _chosen(
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    offered: list[str],
    *,
    with_mask: bool,
) -> Line:
    """Which backend torch takes by itself, and whether that is the slow one."""
    q, k, v = _inputs(model, device, dtype)
    grouped = model.heads != model.num_kv_heads
    mask = torch.ones(128, 128, dtype=torch.bool, device=device).tril() if with_mask else None
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )
    out.sum().backward()  # type: ignore[no-untyped-call]
    taken = taken_backend(q, k, v, mask, grouped=grouped)
    heads = f"{model.heads}/{model.num_kv_heads} heads of {model.head_width}"
    told = f"attention with {heads}: {taken} is taken; offered are {', '.join(offered) or 'none'}"
    if taken == "math" and device.type == "cuda":
        return warned(
            "kernels",
            f"{told}: math keeps the whole score matrix; use train.dtype bf16, or a head width that"
            " a fused kernel takes (a multiple of 8, at most 256).",
            {"taken": taken},
        )
    return passed("kernels", told, {"taken": taken, "offered": offered})


def taken_backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, grouped: bool) -> str:
    """What scaled_dot_product_attention would choose for these."""
    number = torch._fused_sdp_choice(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )
    by_number = {int(backend): name for name, backend in BACKENDS.items()}  # type: ignore[call-overload]
    return by_number.get(int(number), f"backend {number}")


def _adamw(device: torch.device) -> tuple[Tensor, Tensor]:
    start, grad = torch.randn(4096), torch.randn(4096)
    results = []
    for place, fused in ((device, True), (torch.device("cpu"), False)):
        weight = nn.Parameter(start.clone().to(place))
        weight.grad = grad.to(place)
        torch.optim.AdamW([weight], lr=0.1, fused=fused, foreach=False).step()
        results.append(weight.detach().cpu() - start)
    return results[0], results[1]


def _compiled(device: torch.device, config: RunConfig | None) -> Line:
    """A small block through torch.compile against itself, where the target asks for it or where
    there is no target."""
    wanted = bool(config and config.train.compiles)
    if config is not None and not wanted:
        return passed("kernels", "a compiled block: not tried, train.compile is off")
    tiny = ModelConfig(vocab_size=64, dim=64, layers=1, heads=2, ffn_dim=128)
    model = Transformer(tiny).to(device)
    tokens = torch.arange(32, device=device).view(2, 16)
    try:
        with torch.no_grad():
            eager = model(tokens, None)
            model.layers[0].compile(dynamic=False)
            gap = relative_gap(model(tokens, None), eager)
    except Exception as error:
        text = f"a block does not compile on {device}: {_first_words(error)}"
        if wanted:
            return failed(
                "kernels",
                f"{text}; install a C++ compiler (CPU) or triton (GPU), or set train.compile off.",
            )
        return warned("kernels", f"{text}; leave train.compile off here.")
    if not gap <= TOLERANCE[torch.float32]:
        return failed("kernels", f"a compiled block is off by {gap:.1e}; set train.compile off.")
    return passed("kernels", f"a compiled block on {device} (off by {gap:.0e})", {"gap": gap})


def _first_words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no word'}".rstrip(".;")
