"""A whole SLURM on one machine: munged, slurmctld and two slurmd, in a folder of their own.

Debian's slurm-wlm and munge are enough; no cluster, no configuration of the machine, no database.
Needs root, as munged and slurmd do, and leaves nothing running.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
CONFIG = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={home}/munge.sock,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SchedulerType=sched/builtin
SelectType=select/linear
SlurmdParameters=config_overrides
ReturnToService=2
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmdSpoolDir={home}/spool-%n
StateSaveLocation={home}/state
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
KillWait=30
MinJobAge=3600
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """What this machine lacks, in words; empty if nothing."""
    lacks = [name for name in PROGRAMS if _find(name) is None]
    if lacks:
        return f"{', '.join(lacks)} (Debian: apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "root, which munged and slurmd need"


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextlib.contextmanager
def one_machine_slurm(home: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch and the others talk to a fresh SLURM with nodes n1 and n2."""
    for name in ("state", "spool-n1", "spool-n2"):
        (home / name).mkdir(parents=True)
    ports = {name: _free_port() for name in ("port", "port1", "port2")}
    text = CONFIG.format(home=home, host=socket.gethostname(), **ports)
    (home / "slurm.conf").write_text(text)
    key = home / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    home.chmod(0o755)
    environment = {**os.environ, "SLURM_CONF": str(home / "slurm.conf")}
    started = []
    try:
        for name, words in _daemons(home, key).items():
            command = [str(_find(words[0])), *words[1:]]
            log = open(home / f"{name}.out", "wb")  # noqa: SIM115
            started.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
            time.sleep(0.5)
        _wait_for_nodes(environment)
        try:
            yield environment
        finally:
            _end_jobs(environment)
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(started):
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def _end_jobs(environment: dict[str, str]) -> None:
    """A daemon that ends leaves the processes of its jobs behind."""
    ask = ["squeue", "--noheader", "--format=%i"]
    last = time.monotonic() + 60
    while time.monotonic() < last:
        jobs = subprocess.run(ask, env=environment, capture_output=True, text=True).stdout.split()
        if not jobs:
            return
        subprocess.run(["scancel", *jobs], env=environment, capture_output=True)
        time.sleep(1)


def _daemons(home: Path, key: Path) -> dict[str, list[str]]:
    """Each in the foreground, so that we are their parent and can end them."""
    munge = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munge += [f"--socket={home}/munge.sock", f"--pid-file={home}/munge.pid"]
    munge += [f"--log-file={home}/munge.log", f"--seed-file={home}/munge.seed"]
    return {
        "munged": munge,
        "slurmctld": ["slurmctld", "-D"],
        "slurmd-n1": ["slurmd", "-D", "-N", "n1"],
        "slurmd-n2": ["slurmd", "-D", "-N", "n2"],
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_nodes(environment: dict[str, str]) -> None:
    last = time.monotonic() + 60
    while time.monotonic() < last:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%D %T"],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.stdout.strip() == "2 idle":
            return
        time.sleep(0.5)
    raise OSError(f"SLURM's nodes did not come up: {done.stdout} {done.stderr}")


def job_field(environment: dict[str, str], job: str, name: str) -> str:
    """One field of `scontrol show job`."""
    done = subprocess.run(
        ["scontrol", "show", "job", job], env=environment, capture_output=True, text=True
    )
    found = re.search(rf"\b{name}=(\S*)", done.stdout)
    return found[1] if found else ""


def wait_for_state(
    environment: dict[str, str], job: str, states: tuple[str, ...], limit_s: float
) -> str:
    """Wait until a job is in one of these states."""
    last = time.monotonic() + limit_s
    while (state := job_field(environment, job, "JobState")) not in states:
        assert time.monotonic() < last, f"job {job} is still {state} after {limit_s:g} s"
        time.sleep(0.5)
    return state
