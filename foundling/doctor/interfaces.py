"""Which network interfaces there are, and which one leads to the others of a job.

gloo takes the interface that the host's own name resolves to, NCCL the first that looks good. On a
pod that name is often 127.0.1.1 or nothing, and on a cluster the first is the slow one.
"""

import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foundling.doctor.lines import Line, passed, warned

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


def address_towards(host: str, port: int = 9) -> str:
    """Our own address on the way to a host; nothing is sent. Empty where there is no way."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
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
) -> list[Line]:
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


def _towards(head: str, towards: str, by_address: Mapping[str, Interface]) -> Line:
    if not towards:
        return warned(
            "interfaces", f"there is no way to {head}, where the job meets; see its address."
        )
    chosen = by_address.get(towards)
    name = chosen.name if chosen else towards
    return passed("interfaces", f"{name} leads to {head}, where the job meets", {"interface": name})
