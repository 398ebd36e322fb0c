"""Which way of talking works: the default, or else the first known set of variables that does.

One account's pods hung at the first all-reduce until five variables were found by hand. Each way is
tried by children under a time limit, because a hang is exactly what is looked for; the first one
that works is printed as it has to be exported. Ways that switch one thing off come before ways that
switch off everything, so that what still works is kept.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from foundling.doctor.interfaces import Interface, useful
from foundling.doctor.lines import Line, failed, passed
from foundling.plan.words import size
from foundling.runtime.children import Ended

Variables = Mapping[str, str]
Trial = Callable[[Variables], Sequence[Ended]]
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


def _rates(ended: Ended) -> dict[str, float]:
    """The numbers on the last line; a library may have written before it."""
    for line in reversed(ended.out.splitlines()):
        if line.startswith("{"):
            found: dict[str, float] = json.loads(line)
            return found
    return {}


def link_line(backend: str, found: Found) -> Line:
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
    told = "works" if "all_reduce" not in found.rates else _told(found.rates)
    if found.way.variables:
        why = found.tried[0][1]
        return failed(
            backend,
            f"the default does not work ({why}), {found.way.about} it does ({told}): export"
            f" {found.way.exports}",
            facts,
        )
    return passed(backend, told, facts)


def _told(rates: Mapping[str, float]) -> str:
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
) -> Iterator[Line]:
    """A line for each backend that this machine has."""
    for backend, trial in backends.items():
        yield link_line(backend, find_way(trial, ways(backend, interfaces, profiles)))
