"""Where a command runs: alone on a machine, as a rank of a job, or on one node of many.

torchrun says so by RANK. srun says so by the variables of the *step*: those of the job are also set
in the batch script itself, where there are no other ranks to wait for.
"""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from foundling.config.errors import ConfigError
from foundling.config.run import RunConfig
from foundling.runtime.processes import LOW_PORTS

AGENT = "FOUNDLING_AGENT"
"""Variable by which a rank knows whose end is its own."""

NODE = "FOUNDLING_NODE"
"""Variable by which a rank knows the number of its launcher's node."""
COMMAND = "FOUNDLING_COMMAND"
"""Variable that holds a rank's module and arguments, as JSON. On torchrun's own command line it
would take some of them for abbreviations of its options (--run for --run-path)."""
PROCESSES_PER_CORE = 16
"""More of them than this on a CPU are a slip of the hand."""
FIRST_PORT, PORTS = LOW_PORTS.start, len(LOW_PORTS)


@dataclass(frozen=True)
class LaunchEnvironment:
    """What is around this process."""

    kind: Literal["alone", "rank", "node"]
    """alone: start what is needed; rank: join; node: start this node's part of a larger job."""
    nodes: int = 1
    node: int = 0
    head: str = "localhost"
    """Host that the others meet at."""
    port: int = 0
    name: str = ""
    """The same on every node of the job."""

    @property
    def is_head(self) -> bool:
        return self.node == 0


def detect_environment(
    nproc: int | None = None, env: Mapping[str, str] = os.environ
) -> LaunchEnvironment:
    """Who started us. Under srun with one task a node, --nproc (or several GPUs that the task sees)
    asks for a launcher a node; otherwise every task is a rank."""
    if "RANK" in env:
        return LaunchEnvironment("rank")
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks <= 1:
        return LaunchEnvironment("alone")
    hosts = expand_nodes(env["SLURM_STEP_NODELIST"])
    place = LaunchEnvironment(
        "node",
        nodes=len(hosts),
        node=int(env["SLURM_NODEID"]),
        head=env.get("MASTER_ADDR", hosts[0]),
        port=_port(env),
        name=slurm_name(env),
    )
    if tasks == len(hosts) and (nproc is not None or visible_gpus(env) > 1):
        return place
    return LaunchEnvironment("rank", place.nodes, place.node, place.head, place.port, place.name)


def slurm_name(env: Mapping[str, str] = os.environ) -> str:
    """A name that all nodes of a job have in common, and no other life of it."""
    parts = [env.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "RESTART_COUNT", "STEP_ID")]
    return "slurm-" + "-".join(parts)


def join_slurm(place: LaunchEnvironment, env: MutableMapping[str, str] = os.environ) -> None:
    """Give a task of srun the variables that torch reads; under torchrun they are there."""
    if "RANK" in env:
        return
    local = _tasks_of_node(env.get("SLURM_STEP_TASKS_PER_NODE", "1"), place.node)
    env["RANK"] = env["SLURM_PROCID"]
    env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
    # A task that was given one GPU of its own sees it as the first.
    env["LOCAL_RANK"] = "0" if _listed_gpus(env) == 1 else env["SLURM_LOCALID"]
    env["LOCAL_WORLD_SIZE"] = str(local)
    env.setdefault("MASTER_ADDR", place.head)
    env.setdefault("MASTER_PORT", str(place.port))


def processes_here(config: RunConfig, nproc: int | None) -> int:
    """Processes that this machine should run: one a GPU, or what was asked for."""
    if nproc is not None:
        check_nproc(nproc, uses_gpus=config.train.device in ("auto", "cuda"))
        return nproc
    if config.train.device in ("cpu", "mps"):
        return 1
    gpus = max(1, visible_gpus())
    parallel = config.parallel
    wanted = parallel.replicate * parallel.shard * parallel.tensor
    # A layout that names all its degrees says how many it needs.
    return min(wanted, gpus) if wanted else gpus


def check_nproc(nproc: int, *, uses_gpus: bool, remedy: str = "--train.device cpu") -> None:
    """Refuse more processes than there are GPUs (the others would find none and crash, try after
    try), and on a CPU so many that the machine would stand still before one could be refused."""
    gpus = visible_gpus() if uses_gpus else 0
    if gpus and nproc > gpus:
        raise ConfigError(
            f"--nproc {nproc} is more than the {gpus} GPUs here; give fewer, or {remedy}."
        )
    most = PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if not gpus and nproc > most:
        raise ConfigError(
            f"--nproc {nproc} is more than {PROCESSES_PER_CORE} for each of the"
            f" {os.cpu_count() or 1} cores here; give {most} or fewer."
        )


def visible_gpus(env: Mapping[str, str] = os.environ) -> int:
    """GPUs that torch would see; asking it costs seconds, so it is asked where a driver is."""
    if (listed := _listed_gpus(env)) is not None:
        return listed
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return 0
    import torch

    return int(torch.cuda.device_count())


def _listed_gpus(env: Mapping[str, str]) -> int | None:
    """GPUs that a variable allows us, if one does."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in env:
            return len([word for word in env[name].split(",") if word.strip() not in ("", "-1")])
    return None


def expand_nodes(listed: str) -> list[str]:
    """SLURM's short form of host names written out: n[01-02,7],x to n01, n02, n7, x."""
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listed):
        parts = re.split(r"\[([^\]]*)\]", word)
        choices = [_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
        names += ["".join(chosen) for chosen in product(*choices)]
    if not names:
        raise ConfigError("SLURM's list of nodes is empty; start the job with srun.")
    return names


def _numbers(ranges: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        low, dash, high = part.partition("-")
        if not dash:
            found.append(low)
        else:
            found += [f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1)]
    return found


def _tasks_of_node(text: str, node: int) -> int:
    """Tasks of one node from SLURM's 4(x2),3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(node, len(counts) - 1)] if counts else 1


def _port(env: Mapping[str, str]) -> int:
    """A port that all tasks work out alike and that two jobs on a node hardly share."""
    job, step = int(env.get("SLURM_JOB_ID", "0")), int(env.get("SLURM_STEP_ID", "0"))
    return FIRST_PORT + (job * 97 + step) % PORTS


def node_name() -> str:
    """This machine's name as SLURM calls it, where there is one."""
    return os.environ.get("SLURMD_NODENAME") or host()


def host() -> str:
    """This machine's name."""
    return socket.gethostname()
