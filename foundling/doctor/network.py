"""Checks of the network: interfaces, NCCL settings that work, collectives timed."""

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from foundling.doctor.checks import CheckResult, failed, passed, warned
from foundling.runtime.console import size
from foundling.runtime.processes import ChildResult, tie_to_parent

# Which network interfaces there are, and which one leads to the others of a job.
#
# gloo takes the interface that the host's own name resolves to, NCCL the first that looks good. On
# a pod that name is often 127.0.1.1 or nothing, and on a cluster the first is the slow one.

SIOCGIFADDR = 0x8915
VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "flannel", "tun", "tap")
"""Names of interfaces that lead to containers and not to other machines."""


@dataclass(frozen=True)
class Interface:
    """One way out of this machine."""

    name: str
    address: str
    is_up: bool = True
    mbit: int = 0
    """Its speed as the driver states it; 0 where it does not."""

    @property
    def is_loopback(self) -> bool:
        return self.address.startswith("127.")

    def __str__(self) -> str:
        speed = f", {self.mbit / 1000:g} Gbit/s" if self.mbit > 0 else ""
        return f"{self.name} ({self.address}{speed})"


def list_interfaces() -> list[Interface]:
    """Those that have an IPv4 address."""
    found = []
    for _, name in socket.if_nameindex():
        address = _address(name)
        if address:
            found.append(Interface(name, address, _read(name, "operstate") != "down", _mbit(name)))
    return found


def _address(name: str) -> str:
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(packed[20:24])


def _read(name: str, field: str) -> str:
    try:
        return Path(f"/sys/class/net/{name}/{field}").read_text().strip()
    except OSError:
        return ""


def _mbit(name: str) -> int:
    text = _read(name, "speed")
    return max(0, int(text)) if text.lstrip("-").isdigit() else 0


def address_towards(host: str) -> str:
    """Our own address on the way to a host; nothing is sent. Empty where there is no way."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def own_name_leads_to() -> str:
    """The address that this host's name resolves to, which is gloo's default; empty if none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def useful(interfaces: Sequence[Interface]) -> list[Interface]:
    """Those worth trying, the fastest first and the loopback last."""
    up = [one for one in interfaces if one.is_up and not one.name.startswith(VIRTUAL)]
    return sorted(up, key=lambda one: (one.is_loopback, -one.mbit))


def interface_lines(
    interfaces: Sequence[Interface],
    *,
    name_leads_to: str,
    head: str = "",
    towards: str = "",
    nodes: int = 1,
    env: Mapping[str, str] = os.environ,
) -> list[CheckResult]:
    """What there is; which leads to `head`, the address where the job meets; and what is wrong."""
    lines = []
    by_address = {one.address: one for one in interfaces}
    names = {one.name for one in interfaces}
    listed = ", ".join(map(str, interfaces)) or "none with an IPv4 address"
    lines.append(passed("interfaces", listed))
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        asked = env.get(variable, "").lstrip("=")
        known = not asked or any(
            name.startswith(asked.split(",")[0].lstrip("^=")) for name in names
        )
        if not known:
            lines.append(
                warned(
                    "interfaces",
                    f"{variable} is {asked} and there is no such interface; set it to one of"
                    f" {', '.join(sorted(names))}, or unset it.",
                )
            )
    if head and nodes > 1:
        lines.append(_towards(head, towards, by_address))
    if nodes > 1 and not env.get("GLOO_SOCKET_IFNAME"):
        chosen = by_address.get(name_leads_to)
        best = by_address.get(towards) or next(iter(useful(interfaces)), None)
        if (chosen is None or chosen.is_loopback) and best is not None:
            lines.append(
                warned(
                    "interfaces",
                    f"this host's name resolves to {name_leads_to or 'nothing'}, where no other"
                    f" node finds it; export GLOO_SOCKET_IFNAME={best.name}"
                    f" NCCL_SOCKET_IFNAME={best.name}",
                )
            )
    return lines


def _towards(head: str, towards: str, by_address: Mapping[str, Interface]) -> CheckResult:
    if not towards:
        return warned(
            "interfaces", f"there is no way to {head}, where the job meets; see its address."
        )
    chosen = by_address.get(towards)
    name = chosen.name if chosen else towards
    return passed("interfaces", f"{name} leads to {head}, where the job meets", {"interface": name})


# Which way of talking works: the default, or else the first known set of variables that does.
#
# One account's pods hung at the first all-reduce until five variables were found by hand. Each way
# is tried by children under a time limit, because a hang is exactly what is looked for; the first
# one that works is printed as it has to be exported. Ways that switch one thing off come before
# ways that switch off everything, so that what still works is kept.

Variables = Mapping[str, str]
Trial = Callable[[Variables], Sequence[ChildResult]]
"""Start the ranks of a small job with these variables, and say how each ended."""
MEGABYTES = {"gloo": 8, "nccl": 128}
# NCCL's ways from GPU to GPU, taken away one by one (NCCL's guide, environment variables).
_SINGLE = (
    ("without direct access from GPU to GPU", {"NCCL_P2P_DISABLE": "1"}),
    ("without shared memory", {"NCCL_SHM_DISABLE": "1"}),
    ("without InfiniBand", {"NCCL_IB_DISABLE": "1"}),
    ("without NVLink's multicast", {"NCCL_NVLS_ENABLE": "0"}),
    ("without a network plugin", {"NCCL_NET_PLUGIN": "none"}),
)
_PAIRS = (
    (
        "without direct access and InfiniBand",
        {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
    ),
    (
        "without direct access and shared memory",
        {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    ),
)


@dataclass(frozen=True)
class Way:
    """One set of variables to try."""

    about: str
    variables: Variables

    @property
    def exports(self) -> str:
        """As it is typed."""
        return " ".join(f"{name}={value}" for name, value in self.variables.items())


DEFAULT = Way("the default", {})


def ways(
    backend: str, interfaces: Sequence[Interface], profiles: Mapping[str, Variables]
) -> list[Way]:
    """What is tried after the default, the mildest first; `profiles` are whole sets that others
    have found for their machines."""
    names = [one.name for one in useful(interfaces)]
    if backend == "gloo":
        return [Way(f"over {name}", {"GLOO_SOCKET_IFNAME": name}) for name in names]
    found = [Way(about, variables) for about, variables in _SINGLE]
    found += [
        Way(f"over {name}", {"NCCL_SOCKET_IFNAME": name, "GLOO_SOCKET_IFNAME": name})
        for name in names
    ]
    found += [Way(about, variables) for about, variables in _PAIRS]
    found += [Way(f"as profile {name}", variables) for name, variables in profiles.items()]
    return [way for way in found if way.variables]


@dataclass(frozen=True)
class Found:
    """What came of the tries."""

    way: Way | None
    """The first that worked."""
    rates: Mapping[str, float]
    tried: tuple[tuple[Way, str], ...]
    """Those that did not, and why."""


def find_way(trial: Trial, known: Sequence[Way]) -> Found:
    """Try the default, and the known ways only if it fails."""
    failures: list[tuple[Way, str]] = []
    for way in (DEFAULT, *known):
        ended = trial(way.variables)
        bad = [(rank, one) for rank, one in enumerate(ended) if not one.is_good]
        if not bad:
            return Found(way, _rates(ended[0]), tuple(failures))
        rank, one = bad[0]
        failures.append((way, f"rank {rank}: {one.reason}"))
    return Found(None, {}, tuple(failures))


def _rates(ended: ChildResult) -> dict[str, float]:
    """The numbers on the last line; a library may have written before it."""
    for line in reversed(ended.out.splitlines()):
        if line.startswith("{"):
            found: dict[str, float] = json.loads(line)
            return found
    return {}


def link_line(backend: str, found: Found) -> CheckResult:
    """The one line about a backend."""
    variables = dict(found.way.variables) if found.way else None
    facts = {"variables": variables, **found.rates}
    if found.way is None:
        first = found.tried[0][1]
        return failed(
            backend,
            f"{len(found.tried)} ways tried and none works (the default: {first}); run the job with"
            f" {'NCCL_DEBUG=INFO' if backend == 'nccl' else 'TORCH_DISTRIBUTED_DEBUG=DETAIL'} and"
            " read what it says of each link, and see that no firewall is between the nodes.",
            facts,
        )
    text = "works" if "all_reduce" not in found.rates else _describe_rates(found.rates)
    if found.way.variables:
        why = found.tried[0][1]
        return failed(
            backend,
            f"the default does not work ({why}), {found.way.about} it does ({text}): export"
            f" {found.way.exports}",
            facts,
        )
    return passed(backend, text, facts)


def _describe_rates(rates: Mapping[str, float]) -> str:
    ranks = int(rates.get("ranks", 0))
    if ranks == 1:
        return "starts; one rank has nobody to talk to, so there is no bandwidth to measure"
    return (
        f"all-reduce {size(rates['all_reduce'])}/s, all-gather {size(rates['all_gather'])}/s"
        f" between {ranks} ranks"
    )


def link_lines(
    backends: Mapping[str, Trial],
    interfaces: Sequence[Interface],
    profiles: Mapping[str, Variables],
) -> Iterator[CheckResult]:
    """A line for each backend that this machine has."""
    for backend, trial in backends.items():
        yield link_line(backend, find_way(trial, ways(backend, interfaces, profiles)))


# One rank of a small job that measures collectives: `python -m foundling.doctor.network
# BACKEND MEGABYTES LIMIT_S`. Prints one line of JSON; the parent kills it if it hangs.

ROUNDS = 5


def measure(megabytes: float, device: torch.device) -> dict[str, float]:
    """Bus bandwidth in bytes a second: what every link carries, whatever the number of ranks (as
    NCCL's own tests count it). The sums are checked, because a fast wrong sum is worse."""
    world, rank = dist.get_world_size(), dist.get_rank()
    count = max(world, int(megabytes * 1e6 / 4) // world * world)
    whole = torch.full((count,), float(rank + 1), device=device)
    dist.all_reduce(whole)
    wanted = world * (world + 1) / 2
    if not bool((whole == wanted).all()):
        raise RuntimeError(f"an all-reduce gave {float(whole[0])} and not {wanted}")
    part = torch.full((count // world,), float(rank), device=device)
    dist.all_gather_into_tensor(whole, part)
    if [float(piece[0]) for piece in whole.view(world, -1)] != list(map(float, range(world))):
        raise RuntimeError("an all-gather gave the ranks' parts in another order")
    share = (world - 1) / world
    reduce_s = _best(lambda: dist.all_reduce(whole), device)
    gather_s = _best(lambda: dist.all_gather_into_tensor(whole, part), device)
    return {
        "all_reduce": 2 * share * count * 4 / reduce_s,
        "all_gather": share * count * 4 / gather_s,
        "ranks": world,
    }


def _best(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    """Join, measure, say."""
    tie_to_parent()
    backend, megabytes, limit_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=limit_s),
        device_id=device if backend == "nccl" else None,
    )
    found = measure(megabytes, device)
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
