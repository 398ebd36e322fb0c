"""What a GPU can do at best, what it remembers, how it talks to others, and what an hour costs.

Peaks are dense (a "with sparsity" figure is twice what training can use; one account called 41.7%
of the dense peak 18% because of it). Memory is what torch reports and not what the box says.
Rejected: asking the device at hand, because a plan is made before there is one.

Users add or change entries in YAML, `$FOUNDLING_HARDWARE` or ./hardware.yaml:

    h200: {price: 2.10}
    my-gpu: {like: h100-sxm, price: 1.5, peaks: {bf16: 900e12}, per_node: 4}

and a device that was measured (`--probe`) has its ceilings in a file of runtime/ceilings.py's.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from foundling.config.errors import ConfigError
from foundling.config.yaml_file import read_yaml
from foundling.runtime.ceilings import Ceilings, known_ceilings

GIB = 1 << 30
TERA = 1e12
GIGA = 1e9


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
    """Dollars an hour for one; None where nobody sells it by the hour."""
    capability: float = 0.0
    """CUDA compute capability; 0 where there is none."""
    reach: float = 1.0
    """Share of NVIDIA's that its libraries make of the peak."""
    source: str = ""
    ceilings: Ceilings | None = None
    """Measured on such a device: overrides the estimates."""

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
    source: str,
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
        source=source,
    )


_NVIDIA = "NVIDIA data sheet, dense figures (half of those marked with sparsity)"
_RENT = "; price: a usual on-demand list price of 2025, change it with --price"

# name, TFLOP/s (fp32, tf32, bf16, fp8), GiB, GB/s: memory, link, node's network; $/h; capability
_ROWS = (
    _gpu(
        "a40",
        (37.4, 74.8, 149.7, None),
        44.4,
        696,
        25,
        12.5,
        0.44,
        8.6,
        f"{_NVIDIA} of the A40; PCIe 4 x16 between cards{_RENT}",
    ),
    _gpu(
        "a100-40",
        (19.5, 156, 312, None),
        39.4,
        1555,
        300,
        100,
        1.29,
        8.0,
        f"{_NVIDIA} of the A100 SXM 40 GB; NVLink 3{_RENT}",
    ),
    _gpu(
        "a100-80",
        (19.5, 156, 312, None),
        79.2,
        2039,
        300,
        200,
        1.79,
        8.0,
        f"{_NVIDIA} of the A100 SXM 80 GB; NVLink 3, eight 200 Gbit/s adapters a node{_RENT}",
    ),
    _gpu(
        "h100-sxm",
        (66.9, 494.7, 989.4, 1978.9),
        79.1,
        3350,
        450,
        400,
        2.99,
        9.0,
        f"{_NVIDIA} of the H100 SXM; NVLink 4, eight 400 Gbit/s adapters a node{_RENT}",
    ),
    _gpu(
        "h100-pcie",
        (51.2, 378, 756, 1513),
        79.1,
        2039,
        50,
        25,
        2.39,
        9.0,
        f"{_NVIDIA} of the H100 PCIe; PCIe 5 x16 between cards{_RENT}",
    ),
    _gpu(
        "h100-nvl",
        (60, 417.5, 835, 1671),
        93.1,
        3938,
        50,
        25,
        2.79,
        9.0,
        f"{_NVIDIA} of the H100 NVL; NVLink joins pairs only, so PCIe 5 counts{_RENT}",
    ),
    _gpu(
        "h200",
        (66.9, 494.7, 989.4, 1978.9),
        139.8,
        4800,
        450,
        400,
        3.79,
        9.0,
        f"{_NVIDIA} of the H200 SXM; NVLink 4, eight 400 Gbit/s adapters a node{_RENT}",
    ),
    _gpu(
        "b200",
        (75, 1125, 2250, 4500),
        178.4,
        7700,
        900,
        400,
        4.99,
        10.0,
        f"{_NVIDIA} of the HGX B200; NVLink 5{_RENT}",
    ),
    _gpu(
        "mi250x",
        (23.9, None, 191.5, None),
        64.0,
        1638,
        50,
        100,
        None,
        0.0,
        "AMD data sheet of the MI250X halved, one die of two; fp32 is the vector rate;"
        " one Infinity Fabric link of 50 GB/s, four 200 Gbit/s Slingshot adapters a node"
        " (Frontier's user guide); reach fitted on account 001's 1333 tok/s",
        reach=0.7,
    ),
    _gpu(
        "mi300x",
        (163.4, 653.7, 1307.4, 2614.9),
        191.5,
        5300,
        310,
        400,
        2.99,
        0.0,
        "AMD data sheet of the MI300X, dense; Infinity Fabric to seven neighbours; reach from"
        f" public measurements of 600 to 800 TFLOP/s{_RENT}",
        reach=0.65,
    ),
    _gpu(
        "rtx3090",
        (35.6, 35.6, 71.2, None),
        23.6,
        936,
        12,
        1.25,
        0.22,
        8.6,
        f"NVIDIA's Ampere GA102 paper, fp32 accumulation; PCIe 4, no NVLink{_RENT}",
        4,
    ),
    _gpu(
        "rtx4090",
        (82.6, 82.6, 165.2, 330.3),
        23.5,
        1008,
        12,
        1.25,
        0.44,
        8.9,
        f"NVIDIA's Ada paper, fp32 accumulation; PCIe 4 without peer access{_RENT}",
        4,
    ),
    _gpu(
        "rtx5090",
        (104.8, 104.8, 209.5, 419),
        31.4,
        1792,
        25,
        1.25,
        0.89,
        12.0,
        f"NVIDIA's RTX Blackwell paper, fp32 accumulation; PCIe 5{_RENT}",
        4,
    ),
    _gpu(
        "l4",
        (30.3, 60.5, 121, 242.5),
        22.0,
        300,
        12,
        6.25,
        0.71,
        8.9,
        f"{_NVIDIA} of the L4; PCIe 4 x16{_RENT}",
    ),
    replace(
        _gpu(
            "t4",
            (8.1, None, None, None),
            14.6,
            320,
            6,
            4,
            0.35,
            7.5,
            f"{_NVIDIA} of the T4: fp16 and no bf16{_RENT}",
            4,
        ),
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
        source="a guess of two server cores; `plan --probe` measures yours",
    ),
)
TABLE: dict[str, Gpu] = {gpu.name: gpu for gpu in _ROWS}
ALIASES = {"a100": "a100-80", "h100": "h100-sxm", "3090": "rtx3090", "4090": "rtx4090"}
ALIASES |= {"5090": "rtx5090", "mi250": "mi250x"}


def hardware() -> dict[str, Gpu]:
    """The table with the user's file laid over it."""
    named = os.environ.get("FOUNDLING_HARDWARE", "")
    path = Path(named or "hardware.yaml")
    if not named and not path.is_file():
        return TABLE
    table = dict(TABLE)
    for name, changes in read_yaml(path).items():
        table[name] = _changed(name, changes, table, path)
    return table


def find_gpu(name: str) -> Gpu:
    """The entry of that name, with what was measured on such a device."""
    table = hardware()
    key = name.lower().replace("_", "-")
    key = ALIASES.get(key, key)
    if key not in table:
        close = difflib.get_close_matches(key, table, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(table)}."
        raise ConfigError(f"--gpu {name} is not in the table of hardware; {hint}")
    return _with_ceilings(table[key])


def _with_ceilings(gpu: Gpu) -> Gpu:
    """The entry with what was measured on such a device, if anything was."""
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
        given["peaks"] = {**base.peaks, **_numbers(given["peaks"], f"{path}: {name}.peaks")}
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
