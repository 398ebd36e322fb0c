"""THE order in which a machine is looked at, alone or as one rank of a job."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from foundling.config.errors import UserError
from foundling.doctor.asked import Asked
from foundling.doctor.interfaces import (
    address_towards,
    interface_lines,
    list_interfaces,
    own_name_leads_to,
)
from foundling.doctor.lines import Line, failed, refused
from foundling.doctor.meeting import Meeting
from foundling.doctor.task import examined
from foundling.doctor.transports import MEGABYTES, Trial, Variables, link_lines
from foundling.doctor.versions import compare_versions, own_line, own_versions
from foundling.runtime.children import Ended, free_port, run_child, run_ranks
from foundling.runtime.device import choose
from foundling.runtime.dist import World, world_from_environment

OF_DEVICE = ("kernels", "health")
OF_NODE = ("disk", "stored")
OF_TARGET = ("trial",)
PROBE = ("-m", "foundling.doctor.link_probe")


@dataclass(frozen=True)
class Opinion:
    """What one rank found."""

    who: str
    """rank 3 on n17."""
    lines: tuple[Line, ...]


def examine(asked: Asked, profiles: Mapping[str, Variables]) -> Iterator[Line]:
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
    asked: Asked, profiles: Mapping[str, Variables]
) -> tuple[list[Line], list[Opinion]]:
    """Every check of a job: what belongs to a GPU by every rank, what belongs to a node by its
    first rank, what all nodes share by rank 0, and what is between them by all together. What this
    rank found and, on rank 0, what everybody did."""
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
    told = meeting.collect("lines", [who, [line.to_json() for line in lines]])
    meeting.leave()
    return lines, [Opinion(name, tuple(map(Line.from_json, said))) for name, said in told]


def _as_rank(
    asked: Asked,
    world: World,
    meeting: Meeting,
    profiles: Mapping[str, Variables],
    who: str,
) -> Iterator[Line]:
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
    # Cores are shared: one process speaks for them. GPUs are not.
    elif is_first_here or _is_cuda(asked):
        names = (*OF_DEVICE, *(OF_NODE if is_first_here else ()))
        yield from examined(names, _patient(asked))
    if all(meeting.tell("devices", has_device)):
        yield from link_lines(_joint_trials(asked, world, meeting), interfaces, profiles)
        if asked.config:
            yield from examined(OF_TARGET, asked, _others(world, meeting, "trial"))


def _patient(asked: Asked) -> Asked:
    """Hashing terabytes is asked for by --thorough, with the time it takes."""
    return replace(asked, limit_s=asked.limit_s * (60 if asked.thorough else 1))


def _has_device(asked: Asked) -> bool:
    try:
        choose(asked.device, asked.dtype, asked.local_rank)
    except UserError:
        return False
    return not _is_cuda(asked) or asked.local_rank < torch.cuda.device_count()


def _no_device(asked: Asked) -> Line:
    count = torch.cuda.device_count()
    return failed(
        "device",
        f"train.device {asked.device} in {asked.dtype} is not to be had for local rank"
        f" {asked.local_rank}: torch finds {count} GPUs here; leave the node out, start fewer"
        " processes, or use train.device auto and train.dtype auto.",
        of_node=_is_cuda(asked),
    )


def _is_cuda(asked: Asked) -> bool:
    return asked.device == "cuda" or (asked.device == "auto" and torch.cuda.is_available())


def _words(backend: str, asked: Asked, probe: Sequence[str]) -> list[str]:
    return [*probe, backend, str(MEGABYTES[backend]), str(asked.limit_s)]


def _local_trials(asked: Asked, probe: Sequence[str] = PROBE) -> dict[str, Trial]:
    """Small jobs that this process starts itself: two processes over gloo, every GPU over NCCL."""

    def trial(backend: str, processes: int) -> Trial:
        return lambda variables: run_ranks(
            _words(backend, asked, probe), processes, limit_s=asked.limit_s, env=variables
        )

    found = {"gloo": trial("gloo", 2)}
    if _is_cuda(asked):
        found["nccl"] = trial("nccl", torch.cuda.device_count())
    return found


def _joint_trials(
    asked: Asked, world: World, meeting: Meeting, probe: Sequence[str] = PROBE
) -> dict[str, Trial]:
    """The same with one child a rank: every rank tries the same way at the same time, and all hear
    how everybody's child ended, so that all go on alike."""
    tries = 0

    def trial(backend: str) -> Trial:
        def start(variables: Variables) -> list[Ended]:
            nonlocal tries
            tries += 1
            env = {**variables, **_others(world, meeting, f"{backend} {tries}")}
            ended = run_child(_words(backend, asked, probe), limit_s=asked.limit_s, env=env)
            mine = [ended.code, ended.out[-300:], ended.err[-300:], ended.seconds]
            return [Ended(*one) for one in meeting.tell(f"ended {backend} {tries}", mine)]

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
