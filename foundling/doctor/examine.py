"""THE order in which a machine is looked at, alone or as one rank of a job."""

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from foundling.config.errors import RunError, UserError
from foundling.doctor.checks import (
    CheckResult,
    DoctorRequest,
    examined,
    failed,
    passed,
    refused,
    warned,
)
from foundling.doctor.network import (
    MEGABYTES,
    Trial,
    Variables,
    address_towards,
    interface_lines,
    link_lines,
    list_interfaces,
    own_name_leads_to,
)
from foundling.runtime.device import choose_device
from foundling.runtime.dist import World, world_from_environment
from foundling.runtime.processes import ChildResult, free_port, run_child, run_ranks
from foundling.runtime.versions import LEAST_TORCH, Versions, own_versions


def own_line(versions: Versions) -> CheckResult:
    """This process's versions; a driver without a torch that can use it is the common mistake."""
    listed = ", ".join(f"{name} {value}" for name, value in versions.items())
    if "driver" in versions and not torch.cuda.is_available():
        built = "without CUDA" if "cuda" not in versions else f"for CUDA {versions['cuda']}"
        return failed(
            "versions",
            f"{listed}: there is a GPU driver and torch, built {built}, finds no GPU; install the"
            " torch wheel that matches the driver (nvidia-smi names the newest CUDA it knows).",
            versions,
        )
    major, minor = (int(part) for part in versions["torch"].split(".")[:2])
    if (major, minor) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        return warned("versions", f"{listed}: torch is older than {least}; upgrade it.", versions)
    return passed("versions", listed, versions)


def compare_versions(by_rank: Sequence[tuple[str, Versions]]) -> list[CheckResult]:
    """A failure for each thing that ranks have in different versions, naming the odd ones out."""
    lines = []
    names = dict.fromkeys(name for _, versions in by_rank for name in versions)
    for name in names:
        whose: dict[str, list[str]] = {}
        for rank, versions in by_rank:
            whose.setdefault(versions.get(name, "none"), []).append(rank)
        if len(whose) == 1:
            continue
        usual = max(whose, key=lambda value: len(whose[value]))
        odd = "; ".join(
            f"{', '.join(ranks[:4])}{' and more' if len(ranks) > 4 else ''} with {value}"
            for value, ranks in whose.items()
            if value != usual
        )
        lines.append(
            failed(
                "versions",
                f"{name} is {usual} on {len(whose[usual])} of {len(by_rank)} ranks, but {odd};"
                " install the same environment on every node.",
            )
        )
    if not lines and len(by_rank) > 1:
        lines.append(passed("versions", f"the same on all {len(by_rank)} ranks"))
    return lines


# Ranks that tell each other what they found, through the job's store alone.
#
# A store is one TCP connection to the first node, which works where collectives do not: the doctor
# must be able to say that gloo hangs on rank 3. Rank 0 reads what each has to say and, where all
# have to know, publishes it in one piece: a thousand ranks that read each other would be a million
# questions. Rejected: gathering over gloo, which is the patient.

PREFIX = "foundling-doctor"
JOIN, PATIENCE = 5, 25
"""Limits of one check that ranks wait for the last to come, and then for the slowest to answer: it
may try every network interface."""


class Meeting:
    """All ranks of a job. Each calls the same methods in the same order."""

    def __init__(self, world: World, limit_s: float) -> None:
        self.world, self._limit = world, timedelta(seconds=limit_s * PATIENCE)
        try:
            store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=limit_s * JOIN)))
        except RuntimeError as error:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RunError(
                f"the {world.size} ranks do not meet at {place} within {limit_s * JOIN:.0f} s; see"
                f" that each node reaches it and each rank was started ({type(error).__name__})."
            ) from None
        self._store = PrefixStore(PREFIX, store)

    def collect(self, name: str, mine: Any) -> list[Any]:
        """On rank 0 what every rank has to say about `name`, by rank; on the others nothing."""
        self._store.set(f"{name}/{self.world.rank}", json.dumps(mine))
        if not self.world.is_main:
            return []
        return [self._read(f"{name}/{rank}", f"rank {rank}") for rank in range(self.world.size)]

    def tell(self, name: str, mine: Any) -> list[Any]:
        """The same on every rank."""
        everyones = self.collect(name, mine)
        return self.from_first(f"{name}, all", everyones)  # type: ignore[no-any-return]

    def from_first(self, name: str, mine: Any) -> Any:
        """What rank 0 says; the others' word does not count."""
        if self.world.is_main:
            self._store.set(name, json.dumps(mine))
            return mine
        return self._read(name, "rank 0")

    def _read(self, key: str, who: str) -> Any:
        try:
            self._store.wait([key], self._limit)
        except RuntimeError:
            seconds = self._limit.total_seconds()
            raise RunError(
                f"{who} says nothing about {key.partition('/')[0]} within {seconds:.0f} s; see its"
                " output and its node."
            ) from None
        return json.loads(self._store.get(key))

    def leave(self) -> None:
        """The end: the first rank holds the store and goes last."""
        self.collect("leaving", True)


OF_DEVICE = ("kernels", "health")
OF_NODE = ("disk", "stored")
OF_TARGET = ("trial",)


def examine(asked: DoctorRequest, profiles: Mapping[str, Variables]) -> Iterator[CheckResult]:
    """Every check on this machine alone, as they are done."""
    yield own_line(own_versions())
    interfaces = list_interfaces()
    yield from interface_lines(interfaces, name_leads_to=own_name_leads_to())
    if not _has_device(asked):
        yield _no_device(asked)
        return
    yield from link_lines(_local_trials(asked), interfaces, profiles)
    yield from examined([*OF_DEVICE, *OF_NODE, *OF_TARGET], _patient(asked))


def examine_together(
    asked: DoctorRequest, profiles: Mapping[str, Variables]
) -> tuple[list[CheckResult], list[tuple[str, list[CheckResult]]]]:
    """Every check of a job: what belongs to a GPU by every rank, what belongs to a node by its
    first rank, what all nodes share by rank 0, and what is between them by all together. What this
    rank found and, on rank 0, what every rank did by its name (rank 3 on n17)."""
    world = world_from_environment()
    meeting = Meeting(world, asked.limit_s)
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    asked = replace(
        asked, local_rank=world.local_rank, neighbours=neighbours, is_main=world.is_main
    )
    who = f"rank {world.rank} on {socket.gethostname()}"
    try:
        lines = list(_as_rank(asked, world, meeting, profiles, who))
    except UserError as error:
        lines = [refused("doctor", error)]
    answers = meeting.collect("lines", [who, [asdict(line) for line in lines]])
    meeting.leave()
    return lines, [(who, [CheckResult(**one) for one in said]) for who, said in answers]


def _as_rank(
    asked: DoctorRequest,
    world: World,
    meeting: Meeting,
    profiles: Mapping[str, Variables],
    who: str,
) -> Iterator[CheckResult]:
    versions = own_versions()
    yield own_line(versions)
    everyones = meeting.collect("versions", [who, versions])
    if world.is_main:
        yield from compare_versions([(name, found) for name, found in everyones])
    interfaces = list_interfaces()
    head = os.environ.get("MASTER_ADDR", "")
    hosts = meeting.tell("host", socket.gethostname())
    is_first_here = hosts.index(hosts[world.rank]) == world.rank
    if is_first_here:
        yield from interface_lines(
            interfaces,
            name_leads_to=own_name_leads_to(),
            head=head,
            towards=address_towards(head) if head else "",
            nodes=len(set(hosts)),
        )
    has_device = _has_device(asked)
    if not has_device:
        yield _no_device(asked)
    # Cores are shared: one process measures them. GPUs are not.
    elif is_first_here or _is_cuda(asked):
        names = (*OF_DEVICE, *(OF_NODE if is_first_here else ()))
        yield from examined(names, _patient(asked))
    if all(meeting.tell("devices", has_device)):
        yield from link_lines(_joint_trials(asked, world, meeting), interfaces, profiles)
        if asked.config:
            yield from examined(OF_TARGET, asked, _others(world, meeting, "trial"))


def _patient(asked: DoctorRequest) -> DoctorRequest:
    """Hashing terabytes is asked for by --thorough, with the time it takes."""
    return replace(asked, limit_s=asked.limit_s * (60 if asked.thorough else 1))


def _has_device(asked: DoctorRequest) -> bool:
    try:
        choose_device(asked.device, asked.dtype, asked.local_rank)
    except UserError:
        return False
    return not _is_cuda(asked) or asked.local_rank < torch.cuda.device_count()


def _no_device(asked: DoctorRequest) -> CheckResult:
    count = torch.cuda.device_count()
    return failed(
        "device",
        f"train.device {asked.device} in {asked.dtype} is not to be had for local rank"
        f" {asked.local_rank}: torch finds {count} GPUs here; leave the node out, start fewer"
        " processes, or use train.device auto and train.dtype auto.",
        of_node=_is_cuda(asked),
    )


def _is_cuda(asked: DoctorRequest) -> bool:
    return asked.device == "cuda" or (asked.device == "auto" and torch.cuda.is_available())


def _words(backend: str, asked: DoctorRequest) -> list[str]:
    words = ["-m", "foundling.doctor.network", backend]
    return [*words, str(MEGABYTES[backend]), str(asked.limit_s)]


def _local_trials(asked: DoctorRequest) -> dict[str, Trial]:
    """Small jobs that this process starts itself: two processes over gloo, every GPU over NCCL."""

    def trial(backend: str, processes: int) -> Trial:
        return lambda variables: run_ranks(
            _words(backend, asked), processes, limit_s=asked.limit_s, env=variables
        )

    found = {"gloo": trial("gloo", 2)}
    if _is_cuda(asked):
        found["nccl"] = trial("nccl", torch.cuda.device_count())
    return found


def _joint_trials(asked: DoctorRequest, world: World, meeting: Meeting) -> dict[str, Trial]:
    """The same with one child a rank: every rank tries the same way at the same time, and all get
    how every rank's child ended, so that all go on alike."""
    tries = 0

    def trial(backend: str) -> Trial:
        def start(variables: Variables) -> list[ChildResult]:
            nonlocal tries
            tries += 1
            env = {**variables, **_others(world, meeting, f"{backend} {tries}")}
            ended = run_child(_words(backend, asked), limit_s=asked.limit_s, env=env)
            mine = [ended.code, ended.out[-300:], ended.err[-300:], ended.seconds]
            return [ChildResult(*one) for one in meeting.tell(f"ended {backend} {tries}", mine)]

        return start

    found = {"gloo": trial("gloo")}
    if _is_cuda(asked):
        found["nccl"] = trial("nccl")
    return found


def _others(world: World, meeting: Meeting, name: str) -> dict[str, str]:
    """Variables by which the ranks' children find each other: the job's, at a port of their own."""
    port = meeting.from_first(f"port {name}", free_port() if world.is_main else 0)
    head = os.environ.get("MASTER_ADDR", "127.0.0.1")
    return {"MASTER_ADDR": head, "MASTER_PORT": str(port)}
