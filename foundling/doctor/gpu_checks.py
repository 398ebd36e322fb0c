"""Checks of a GPU: memory, error counters, matmul rate, and every kernel launched once."""

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from foundling.config.errors import UserError
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.doctor.checks import (
    CheckResult,
    DoctorRequest,
    Notes,
    failed,
    passed,
    refused,
    warned,
)
from foundling.model.kernels.attention_backends import KERNELS, MaskSpec
from foundling.model.transformer import Transformer
from foundling.plan.hardware import device_slug, find_gpu, known_ceilings, name_of_device
from foundling.profiling.ceilings import memory_bytes
from foundling.runtime.console import size
from foundling.runtime.device import choose_device, device_name, memory_free
from foundling.train.autotune.attention import choose_attention_kernels, refusal_at, shapes_of
from foundling.train.autotune.harness import matmul_peak
from foundling.train.autotune.mlp import choose_mlp

FREE_SHARE = 0.9
"""Of a GPU's memory; less means that another process uses it."""
GOOD_SHARE, BAD_SHARE = 0.55, 0.35
"""Of the table's dense peak: a square product reaches about 0.8 on a healthy card."""
OWN_SHARE = 0.75
"""Of what this very device was measured to reach before."""
SMI_S = 20.0
COUNTED = {
    "ecc.errors.uncorrected.volatile.total": "uncorrected memory errors since the last reboot",
    "remapped_rows.failure": "memory rows that could not be remapped",
}
SLOWED = {
    "clocks_throttle_reasons.hw_thermal_slowdown": "too hot",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "its power supply brakes it",
}


def check_health(asked: DoctorRequest, notes: Notes) -> Iterator[CheckResult]:
    """Memory, counters and rate of the device that this process would train on."""
    choice = choose_device(asked.device, asked.dtype, asked.local_rank)
    if notes.begins("memory"):
        yield _memory(choice.device)
    if choice.device.type == "cuda" and notes.begins("nvidia-smi"):
        yield from smi_lines(_ask_smi(choice.device), str(choice.device))
    if notes.begins("matmul rate"):
        rate = matmul_peak(choice.device, choice.dtype)
        dtype = "bf16" if choice.dtype == torch.bfloat16 else "fp32"
        name = device_name(choice.device)
        yield rate_line(rate, name, dtype, choice.device.type, alone=asked.neighbours == 1)


def _memory(device: torch.device) -> CheckResult:
    free, total = memory_free(device), memory_bytes(device)
    is_cuda, in_host = device.type == "cuda", "in the host's memory"
    text = f"{size(free)} of {size(total)} are free {f'on {device}' if is_cuda else in_host}"
    if free >= (FREE_SHARE if is_cuda else 0.1) * total:
        return passed("memory", text, {"free": free})
    remedy = (
        "nvidia-smi names the processes that hold the rest" if is_cuda else "end what else runs"
    )
    return warned("memory", f"{text}; {remedy}.", {"free": free})


def _ask_smi(device: torch.device) -> dict[str, str]:
    """What nvidia-smi knows of the device, by field; a field that this version does not know, or a
    machine without it, gives nothing."""
    if shutil.which("nvidia-smi") is None:
        return {}
    # Its numbers are the driver's, which CUDA_VISIBLE_DEVICES does not change: ask by identity.
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    found = {}
    for field in (*COUNTED, *SLOWED, "temperature.gpu"):
        words = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
        words += ["-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=SMI_S)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            found[field] = done.stdout.strip()
    return found


def smi_lines(values: Mapping[str, str], device: str) -> Iterator[CheckResult]:
    """What the driver's counters mean; [N/A] is a card without them."""
    wrong = False
    for field, about in COUNTED.items():
        value = values.get(field, "0")
        if value not in ("0", "No") and not value.startswith("["):
            wrong = True
            yield failed(
                "health",
                f"{device} has {about}: {value}; reset it (nvidia-smi -r) or leave the node out.",
                of_node=True,
            )
    for field, about in SLOWED.items():
        if values.get(field) == "Active":
            wrong = True
            heat = values.get("temperature.gpu", "?")
            yield warned(
                "health",
                f"{device} is slowed down, {about} ({heat} degrees); look after its cooling and"
                " power.",
            )
    if values and not wrong:
        heat = values.get("temperature.gpu", "?")
        yield passed("health", f"{device}: no memory errors, not slowed down, {heat} degrees")
    if not values:
        yield passed("health", f"{device}: nvidia-smi is not there, its counters were not read")


def rate_line(rate: float, name: str, dtype: str, kind: str, *, alone: bool) -> CheckResult:
    """A measured product against what the same device did before, or what the table promises."""
    text = f"{rate / 1e12:,.2f} TFLOP/s in {dtype} on {name}"
    before = known_ceilings().get(device_slug(name))
    if before and alone and (best := before.matmul_peak(dtype)):
        if rate < OWN_SHARE * best:
            return warned(
                "matmul rate",
                f"{text}, and {best / 1e12:,.2f} were measured on it before; see what else runs"
                " here, or whether it is slowed down.",
                {"flops": rate, "expected": best},
            )
        return passed(
            "matmul rate", f"{text}, {rate / best:.0%} of what it did before", {"flops": rate}
        )
    entry = name_of_device(name) if kind == "cuda" else None
    gpu = find_gpu(entry) if entry else None
    if gpu is None or dtype not in gpu.peaks:
        return passed("matmul rate", f"{text} (nothing to compare it with)", {"flops": rate})
    peak = gpu.peaks[dtype] * gpu.reach
    share = f"{text}, {rate / peak:.0%} of {gpu.name}'s peak"
    if rate < BAD_SHARE * peak:
        return failed(
            "matmul rate",
            f"{share}; such a card reaches 80%: leave the node out, or see what else runs on it.",
            {"flops": rate, "expected": peak},
            of_node=True,
        )
    if rate < GOOD_SHARE * peak:
        return warned(
            "matmul rate",
            f"{share}; see what else runs on it, its clocks and its heat.",
            {"flops": rate},
        )
    return passed("matmul rate", share, {"flops": rate})


# Kernels, by launching each and comparing it with a slow one: what cannot run says so here. Where
# there is a choice it is the trainer's own, with its reason.
#
# One account's attention in fp32 took the path that writes the whole score matrix, and nothing said
# so: 22.5 GB instead of 6.2. A bf16 product on some virtual machines ends the process with SIGILL.

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Relative, in norm: TF32 products are allowed, nonsense is not."""
REMEDY = "install the torch build that fits this device"


def check_kernels(asked: DoctorRequest, notes: Notes) -> Iterator[CheckResult]:
    """Every kernel that a training step launches."""
    choice = choose_device(asked.device, asked.dtype, asked.local_rank)
    device, dtype, config = choice.device, choice.dtype, asked.run_config()
    where = f"on {device} in {str(dtype).removeprefix('torch.')}"
    if notes.begins("matmul"):
        yield _held("matmul", where, dtype, lambda: _matmul(device, dtype))
    target = config or RunConfig()
    model, train, lines = target.model, target.train, list[str]()
    if device.type == "cuda":
        _launch_attention(target, device, dtype, notes)
    if notes.begins("attention"):
        try:
            _, lines = choose_attention_kernels(model, train, target.data, device, dtype)
        except UserError as error:  # a kernel that was named and does not work
            yield refused("kernels", error)
    if config and notes.begins("mlp"):
        lines.append(choose_mlp(model, train, config.parallel.tensor, device, dtype)[1])
    for line in filter(None, lines):
        yield (warned if "WARNING" in line else passed)("kernels", line)
    if notes.begins("fused AdamW"):
        yield _held("fused AdamW", f"on {device}", torch.float32, lambda: _adamw(device))
    if notes.begins("compiled block"):
        yield _compiled(device, config)


def _launch_attention(
    target: RunConfig, device: torch.device, dtype: torch.dtype, notes: Notes
) -> None:
    """Launch each attention kernel by itself before one is chosen: compiling it may take long, and
    one that ends its process must not hide the others. What is refused here the choice will say."""
    shape = shapes_of(target.model, target.train, target.data)[0]
    for name, kernel in KERNELS.items():
        for spec in (MaskSpec(None, 0), MaskSpec(None, max(shape.width // 4, 1))):
            if notes.begins(f"attention by {name}{', masked' if spec.window else ''}"):
                refusal_at(kernel, [(shape, spec)], device, dtype)


def _held(
    what: str, where: str, dtype: torch.dtype, compare: Callable[[], tuple[Tensor, Tensor]]
) -> CheckResult:
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


def _adamw(device: torch.device) -> tuple[Tensor, Tensor]:
    start, grad = torch.randn(4096), torch.randn(4096)
    results = []
    for place, fused in ((device, True), (torch.device("cpu"), False)):
        weight = nn.Parameter(start.clone().to(place))
        weight.grad = grad.to(place)
        torch.optim.AdamW([weight], lr=0.1, fused=fused, foreach=False).step()
        results.append(weight.detach().cpu() - start)
    return results[0], results[1]


def _compiled(device: torch.device, config: RunConfig | None) -> CheckResult:
    """A small block through torch.compile against itself, unless train.compile is off; without a
    target too."""
    asked = config.train.compile if config is not None else ""
    if asked == "off":
        return passed("kernels", "a compiled block: not tried, train.compile is off")
    # On CUDA auto takes blocks without a trial; elsewhere it measures first, and falls back.
    needed = asked not in ("", "auto") or (asked == "auto" and device.type == "cuda")
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
        if needed:
            return failed(
                "kernels",
                f"{text}; install a C++ compiler (CPU) or triton (GPU), or set train.compile off.",
            )
        remedy = "train.compile auto leaves it off" if asked else "leave train.compile off here"
        return warned("kernels", f"{text}; {remedy}.")
    if not gap <= TOLERANCE[torch.float32]:
        return failed("kernels", f"a compiled block is off by {gap:.1e}; set train.compile off.")
    why = ", tried because train.compile is auto" if asked == "auto" else ""
    return passed("kernels", f"a compiled block on {device} (off by {gap:.0e}){why}", {"gap": gap})


def _first_words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no word'}".rstrip(".;")
