"""Data sheets, prices and measured rates of GPUs."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from foundling.config.base import read_yaml
from foundling.config.errors import ConfigError, did_you_mean
from foundling.runtime.files import cache_folder, write_text_atomic

# What a device was measured to reach, kept as JSON so that later plans need neither it nor torch.
#
# One file per device name in $FOUNDLING_HOME/devices, or ~/.cache/foundling/devices: a second
# measurement replaces the first. `profiling/ceilings.py` measures, `plan` reads. Rejected: a file
# in the run directory, because ceilings belong to the machine and are wanted before there is a run.

CEILINGS_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class MatmulRate:
    """A product [m, k] x [k, n] and how fast it ran."""

    dtype: str
    m: int
    k: int
    n: int
    flops_per_s: float
    """2 m k n over the seconds of one product."""


@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """Causal grouped-query attention and how long it took."""

    dtype: str
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    forward_s: float
    backward_s: float
    flops_per_s: float
    """Forward and backward, 7 batch heads seq^2 head_dim over the seconds: two products forward and
    five backward (one is made again), each 2 batch heads seq^2 head_dim, halved by the mask."""


@dataclass(frozen=True, kw_only=True)
class LossRate:
    """The fused head loss with its gradients."""

    dtype: str
    rows: int
    dim: int
    vocab: int
    seconds: float
    flops_per_s: float
    """6 rows dim vocab over the seconds."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Everything measured about one device."""

    device: str
    """The name that torch or the operating system gives it."""
    kind: str
    """cuda or cpu."""
    torch: str
    date: str
    """ISO 8601, UTC."""
    threads: int
    """CPU threads that torch used."""
    memory_bytes: int
    """Of the device, as torch reports it."""
    context_bytes: int
    """Taken by the driver and the libraries in addition to torch's own allocations."""
    matmul: tuple[MatmulRate, ...]
    attention: tuple[AttentionRate, ...]
    loss: tuple[LossRate, ...]
    copy_bytes_per_s: float
    """Read and written, by a large copy."""
    norm_bytes_per_s: float
    """Needed by RMSNorm forward and backward (read 3, written 2 tensors), over its time."""
    optimizer_bytes_per_s: float
    """28 bytes a parameter (read weight, gradient, moments; write all but the gradient)."""
    launch_s: float
    """From one tiny operation to the next, when nothing waits."""
    blocks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Python's seconds for one block, forward and backward, by how it is run: eager, per-op."""

    def matmul_peak(self, dtype: str) -> float:
        """The best rate of any shape in FLOP/s; 0 where the dtype was not measured."""
        return max((rate.flops_per_s for rate in self.matmul if rate.dtype == dtype), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return {"schema": CEILINGS_SCHEMA, **asdict(self)}


def devices_folder() -> Path:
    """Where measured devices are kept."""
    return cache_folder("devices")


def device_slug(name: str) -> str:
    """A device's name as a file name: `NVIDIA H100 80GB HBM3` is nvidia-h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "device"


def save_ceilings(ceilings: Ceilings) -> Path:
    """Write the device's file, whole or not at all; returns its path."""
    path = devices_folder() / f"{device_slug(ceilings.device)}.json"
    write_text_atomic(path, json.dumps(ceilings.to_json(), indent=1) + "\n")
    return path


def load_ceilings(path: Path) -> Ceilings | None:
    """What a file holds; None where it is missing, damaged or of another version: a plan must not
    fail because of a cache, and `--probe` writes it anew."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        known = tree["schema"] == CEILINGS_SCHEMA
        return TypeAdapter(Ceilings).validate_python(tree) if known else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def known_ceilings() -> dict[str, Ceilings]:
    """Every measured device, by slug."""
    found = {path.stem: load_ceilings(path) for path in sorted(devices_folder().glob("*.json"))}
    return {slug: ceilings for slug, ceilings in found.items() if ceilings is not None}


# GPUs: peak rates, memory, links to other GPUs, and prices.
#
# Peaks are dense (a "with sparsity" figure is twice what training can use; one account called 41.7%
# of the dense peak 18% because of it) and accumulate in fp32. Memory is the least that torch was
# seen to report and not what the box says. Links and networks are what the wires are sold for, one
# way. Prices are rough: on-demand list prices of 2026, a third to a half above those of 2025, and
# sellers differ up to fourfold; `--price` or the file below overrides them. Rejected: asking the
# device at hand, because a plan is made before there is one.
#
# Users add or change entries in YAML, `$FOUNDLING_HARDWARE` or ./hardware.yaml:
#
# h200: {price: 2.10}
# my-gpu: {like: h100-sxm, price: 1.5, peaks: {bf16: 900e12}, per_node: 4}
#
# The ceilings of a measured device (`--probe`) are in a file of their own, in the cache folder.

GIB = 1 << 30
TERA = 1e12
GIGA = 1e9
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator as a program meets it (a die, where a card has two)."""

    name: str
    peaks: Mapping[str, float]
    """Dense peak in FLOP/s by dtype: fp32, tf32, bf16, fp16, fp8; absent: no such unit."""
    memory: int
    """Bytes that torch can use."""
    bandwidth: float
    """Bytes a second to its own memory."""
    link: float
    """Bytes a second, one way, to its neighbours in the node."""
    network: float
    """Bytes a second, one way, of the whole node to other nodes."""
    per_node: int = 8
    price: float | None = None
    """Dollars an hour for one; None where no price by the hour was found."""
    capability: float = 0.0
    """CUDA compute capability; 0 where there is none."""
    reach: float = 1.0
    """Share of NVIDIA's that its libraries make of the peak."""
    source: str = ""
    ceilings: Ceilings | None = None
    """Measured on such a device: overrides the estimates."""

    @property
    def has_sheet(self) -> bool:
        """Whether the peaks are of a data sheet; those of "cpu" are a guess."""
        return self.name != "cpu"

    def peak(self, dtype: str) -> float:
        """Dense peak of a dtype, or a sentence when the GPU has no such unit."""
        if dtype not in self.peaks:
            raise ConfigError(
                f"{self.name} has no {dtype} matrix unit; it has {', '.join(self.peaks)}, so set"
                " train.dtype to one of those or take another --gpu."
            )
        return self.peaks[dtype]


def _gpu(
    name: str,
    peaks: tuple[float, float | None, float | None, float | None],
    memory_gib: float,
    bandwidth_gb: float,
    link_gb: float,
    network_gb: float,
    price: float | None,
    capability: float,
    per_node: int = 8,
    reach: float = 1.0,
) -> Gpu:
    """A row of the table; peaks in TFLOP/s are fp32, tf32, bf16 (fp16 alike) and fp8."""
    named = dict(zip(("fp32", "tf32", "bf16", "fp8"), peaks, strict=True))
    if named["bf16"]:
        named["fp16"] = named["bf16"]
    return Gpu(
        name=name,
        peaks={kind: value * TERA for kind, value in named.items() if value},
        memory=int(memory_gib * GIB),
        bandwidth=bandwidth_gb * GIGA,
        link=link_gb * GIGA,
        network=network_gb * GIGA,
        per_node=per_node,
        price=price,
        capability=capability,
        reach=reach,
        source=_SOURCES[name],
    )


_SPARSE = "dense: half of the figures marked with sparsity"
_DGX_A100 = "NVLink 3, 600 GB/s both ways; network: DGX A100, eight 200 Gbit/s adapters"
_DGX_H100 = "NVLink 4, 900 GB/s both ways; network: DGX H100, eight 400 Gbit/s adapters"
_HOST = "no peer access, so through the host at half of PCIe's rate; network: 10 Gbit/s, assumed"
_LAMBDA = "price: Lambda, eight in a node, September 2026"
_RUNPOD = "price: RunPod, secure cloud, August to November 2026"
_COMMUNITY = "price: RunPod, community cloud, March 2026"
_MODAL = "price: Modal, May 2026"
_SOURCES = {
    "a40": "NVIDIA's A40 data sheet, dense: the first of each pair; PCIe 4 x16 (NVLink joins pairs"
    f" only); network: 100 Gbit/s, assumed; {_RUNPOD}",
    "a6000": f"NVIDIA's RTX A6000 data sheet, {_SPARSE} (tf32: half of bf16); memory without ECC;"
    " PCIe 4 x16 (NVLink joins pairs only); network: 100 Gbit/s, assumed; no price was found",
    "a100-40": "NVIDIA's A100 data sheet, 40 GB SXM, dense: the first of each pair;"
    f" {_DGX_A100}; {_LAMBDA}",
    "a100-80": "NVIDIA's A100 data sheet, 80 GB SXM, dense: the first of each pair;"
    f" {_DGX_A100}; {_LAMBDA}",
    "h100-sxm": "NVIDIA's H100 white paper v1.04, table 3 (p. 39), SXM5, dense: the first of each"
    f" pair; bandwidth: H100 data sheet; {_DGX_H100}; {_LAMBDA}",
    "h100-pcie": "NVIDIA's H100 white paper v1.04, table 3 (p. 39), PCIe, dense: the first of each"
    " pair; bandwidth: 5120 bits at 1593 MHz (data sheet: 2 TB/s); PCIe 5 x16 (NVLink joins pairs"
    f" only); network: 200 Gbit/s, assumed; {_RUNPOD}",
    "h100-nvl": f"NVIDIA's H100 NVL data sheet, {_SPARSE}; bandwidth: product brief PB-11773,"
    " table 2; PCIe 5 x16 (NVLink joins pairs only); network: 200 Gbit/s, assumed;"
    f" {_RUNPOD}",
    "h200": f"NVIDIA's H200 data sheet, SXM, {_SPARSE}, with the decimals of the H100 white paper"
    f" (the same chip); memory: measured here; {_DGX_H100}; {_RUNPOD}",
    "b200": f"NVIDIA's Blackwell data sheet, HGX B200, per GPU, {_SPARSE} (tf32: half of bf16, the"
    " sheet rounds it to 1.1); NVLink 5, 1.8 TB/s both ways; network: DGX B200, eight 400 Gbit/s"
    f" adapters; {_LAMBDA}",
    "mi250x": "AMD's CDNA 3 white paper, endnotes MI300-11 and -14, halved for one die of two;"
    " dense (it has no sparsity), fp32 on the matrix units; one Infinity Fabric link of 50 GB/s,"
    " four 200 Gbit/s Slingshot adapters a node (Frontier's user guide); reach fitted on the"
    " 1333 tok/s of Llama 3.1 8B there",
    "mi300x": "AMD's CDNA 3 white paper, table 2 (p. 25), dense: the first of each pair; Infinity"
    " Fabric, 896 GB/s both ways among all eight (a pair has a seventh); network: eight 400 Gbit/s"
    " adapters, usual; reach: AMD's max-achievable 708 TFLOP/s; price: sellers' median, May 2026",
    "rtx3090": "NVIDIA's RTX Blackwell white paper, table 3 (p. 46), fp32 accumulation, dense: the"
    f" first of each pair; PCIe 4 x16, {_HOST}; {_COMMUNITY}",
    "rtx4090": "NVIDIA's Ada white paper v2.02, appendix A, fp32 accumulation, dense: the first of"
    f" each pair (before v2.02 fp8 was twice too high); PCIe 4 x16, {_HOST}; {_COMMUNITY}",
    "rtx5090": "NVIDIA's RTX Blackwell white paper, table 3 (p. 46), fp32 accumulation, dense: the"
    f" first of each pair; PCIe 5 x16, {_HOST}; {_COMMUNITY}",
    "l4": f"NVIDIA's L4 data sheet, {_SPARSE}; PCIe 4 x16; network: AWS g6.48xlarge, 100 Gbit/s"
    f" for eight; {_MODAL}",
    "t4": "NVIDIA's T4 data sheet, dense (it has no sparsity), fp16 and no bf16; bandwidth: 256"
    " bits at 10 Gbit/s (newer sheets: 300 GB/s); PCIe 3 x16; network: AWS g4dn.12xlarge,"
    f" 50 Gbit/s for four; {_MODAL}",
}

# name, TFLOP/s (fp32, tf32, bf16, fp8), GiB, GB/s: memory, link, node's network; $/h; capability
# (developer.nvidia.com/cuda-gpus); GPUs a node where not 8
_ROWS = (
    _gpu("a40", (37.4, 74.8, 149.7, None), 44.35, 696, 31.5, 12.5, 0.44, 8.6),
    _gpu("a6000", (38.7, 77.4, 154.8, None), 47.5, 768, 31.5, 12.5, None, 8.6),
    _gpu("a100-40", (19.5, 156, 312, None), 39.38, 1555, 300, 200, 1.99, 8.0),
    _gpu("a100-80", (19.5, 156, 312, None), 79.15, 2039, 300, 200, 2.79, 8.0),
    _gpu("h100-sxm", (66.9, 494.7, 989.4, 1978.9), 79.18, 3350, 450, 400, 3.99, 9.0),
    _gpu("h100-pcie", (51.2, 378, 756, 1513), 79.10, 2039, 63, 25, 2.89, 9.0),
    _gpu("h100-nvl", (60, 417.5, 835.5, 1670.5), 93.09, 3938, 63, 25, 3.19, 9.0),
    _gpu("h200", (66.9, 494.7, 989.4, 1978.9), 139.8, 4800, 450, 400, 4.59, 9.0),
    _gpu("b200", (75, 1125, 2250, 4500), 178.35, 7700, 900, 400, 6.69, 10.0),
    _gpu("mi250x", (47.85, None, 191.5, None), 63.98, 1638.4, 50, 100, None, 0.0, reach=0.7),
    _gpu("mi300x", (163.4, 653.7, 1307.4, 2614.9), 191.69, 5300, 448, 400, 1.99, 0.0, reach=0.65),
    _gpu("rtx3090", (35.6, 35.6, 71.2, None), 23.56, 936, 15.75, 1.25, 0.22, 8.6, 4),
    _gpu("rtx4090", (82.6, 82.6, 165.2, 330.3), 23.52, 1008, 15.75, 1.25, 0.34, 8.9, 4),
    _gpu("rtx5090", (104.8, 104.8, 209.5, 419), 31.34, 1792, 31.5, 1.25, 0.69, 12.0, 4),
    _gpu("l4", (30.3, 60, 121, 242.5), 22.03, 300, 31.5, 12.5, 0.80, 8.9),
    replace(
        _gpu("t4", (8.1, None, None, None), 14.56, 320, 15.75, 6.25, 0.59, 7.5, 4),
        peaks={"fp32": 8.1 * TERA, "fp16": 65 * TERA},
    ),
    Gpu(
        name="cpu",
        peaks={"fp32": 0.1 * TERA},
        memory=16 * GIB,
        bandwidth=20 * GIGA,
        link=5 * GIGA,
        network=1 * GIGA,
        per_node=1,
        price=0.10,
        source="a guess of two server cores, at half of Lambda's price for four (2026);"
        " `plan --probe` measures yours",
    ),
)
TABLE: dict[str, Gpu] = {gpu.name: gpu for gpu in _ROWS}
ALIASES = {"a100": "a100-80", "h100": "h100-sxm", "3090": "rtx3090", "4090": "rtx4090"}
ALIASES |= {"5090": "rtx5090", "mi250": "mi250x", "rtx-a6000": "a6000"}


def hardware() -> dict[str, Gpu]:
    """The table with the user's file laid over it."""
    named = os.environ.get("FOUNDLING_HARDWARE", "")
    path = Path(named or "hardware.yaml")
    table = dict(TABLE)
    for name, changes in (read_yaml(path) if named or path.is_file() else {}).items():
        if name == "providers":
            raise ConfigError(
                f"{path} has providers: write one file a provider and name it in"
                " FOUNDLING_HARDWARE, or give --price."
            )
        table[name] = _changed(name, changes, table, path)
    return table


def _key(name: str) -> str:
    """A GPU's name in the table, from how people write it."""
    key = name.lower().replace("_", "-")
    return ALIASES.get(key, key)


def find_gpu(name: str) -> Gpu:
    """The entry of that name, with what was measured on such a device."""
    table = hardware()
    key = _key(name)
    if key not in table:
        hint = did_you_mean(key, table, cutoff=0.5)
        raise ConfigError(f"--gpu {name} is not in the table of hardware; {hint}")
    gpu = table[key]
    for ceilings in known_ceilings().values():
        found = "cpu" if ceilings.kind == "cpu" else name_of_device(ceilings.device)
        if found == gpu.name:
            return replace(
                gpu,
                ceilings=ceilings,
                memory=ceilings.memory_bytes or gpu.memory,
                source=f"{gpu.source}; ceilings measured on {ceilings.device}, {ceilings.date}",
            )
    return gpu


def name_of_device(described: str) -> str | None:
    """The entry that a driver's name stands for ("NVIDIA H200" is h200), or None."""
    words = described.lower().replace("-", " ").split()
    special = {("h100", "pcie"): "h100-pcie", ("h100", "nvl"): "h100-nvl", ("h100",): "h100-sxm"}
    special |= {("a100", "40gb"): "a100-40", ("a100",): "a100-80"}
    special |= {("rtx", digits): "rtx" + digits for digits in ("3090", "4090", "5090")}
    for parts, name in special.items():
        if all(any(part in word for word in words) for part in parts):
            return name
    return next((name for name in hardware() if name in words), None)


def _changed(name: str, changes: object, table: Mapping[str, Gpu], path: Path) -> Gpu:
    if not isinstance(changes, dict):
        raise ConfigError(f"{path}: {name} must hold fields such as price, and holds {changes!r}.")
    given = {str(key).replace("-", "_"): value for key, value in changes.items()}
    like = str(given.pop("like", name))
    if like not in table:
        raise ConfigError(
            f"{path}: {name} is new; say which GPU it is like (like: h100-sxm), there are"
            f" {', '.join(table)}."
        )
    base = table[like]
    kinds = {item.name: item.type for item in fields(Gpu) if item.name not in ("name", "ceilings")}
    unknown = sorted(set(given) - set(kinds))
    if unknown:
        raise ConfigError(
            f"{path}: {name} has no field {unknown[0]}; there are {', '.join(kinds)}."
        )
    if "peaks" in given:
        peaks = _numbers(given["peaks"], f"{path}: {name}.peaks")
        for dtype in (dtype for dtype in peaks if dtype not in DTYPES):
            raise ConfigError(
                f"{path}: {name}.peaks has {dtype}, which is no dtype; there are"
                f" {', '.join(DTYPES)}."
            )
        given["peaks"] = {**base.peaks, **peaks}
    numeric = {k: v for k, v in given.items() if k not in ("peaks", "source")}
    given.update(_numbers(numeric, f"{path}: {name}"))
    for whole in ("memory", "per_node"):
        if whole in given:
            given[whole] = int(given[whole])
    return replace(base, name=name, **{"source": f"{path}, like {like}", **given})


def _numbers(values: Any, where: str) -> dict[str, float]:
    """Positive numbers; YAML reads 900e12 as a word, so words are tried too."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must hold numbers by name, and holds {values!r}.")
    found = {}
    for key, value in values.items():
        try:
            found[str(key)] = float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{where}.{key} must be a number, not {value!r}.") from None
        if not found[str(key)] > 0:
            raise ConfigError(f"{where}.{key} must be above zero (it is {value}).")
    return found
