"""A run as a SLURM job: script, profiles of known clusters, save before the limit, requeue."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from foundling.config.data import all_sources
from foundling.config.errors import ConfigError
from foundling.config.load import dump_yaml
from foundling.config.run import RunConfig
from foundling.launch.bad_nodes import BAD_NODES, LIMIT_S, read_bad_nodes
from foundling.launch.launcher import fingerprint_of
from foundling.plan.resolve import problems
from foundling.runtime.console import warn
from foundling.runtime.exits import Exit
from foundling.runtime.files import write_text_atomic

# Machines that others have trained on, as data: what to export and what to ask SLURM for.
#
# Values come from the runs that docs/accounts.md names, and from NCCL's documentation. `foundling
# doctor` finds out which of them a machine of yours needs.

# The caching allocator gives memory back in pieces of any size: less is lost to fragments.
_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class ClusterProfile:
    """One kind of machine."""

    about: str
    gpus_per_node: int
    env: Mapping[str, str] = field(default_factory=dict)
    interface: str = ""
    """Network interface of NCCL and gloo; empty leaves the choice to them."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch."""
    srun: tuple[str, ...] = ()
    """Further options of srun."""


PROFILES: dict[str, ClusterProfile] = {
    "plain": ClusterProfile("nothing but what is asked for on the command line", 8),
    "frontier": ClusterProfile(
        "Frontier: MI250X dies under ROCm, RCCL over Slingshot by the aws-ofi-rccl plugin",
        8,
        env={
            "NCCL_NET_GDR_LEVEL": "3",
            "NCCL_CROSS_NIC": "1",
            "NCCL_IB_TIMEOUT": "31",
            "NCCL_ALGO": "TREE",
            "TORCH_NCCL_BLOCKING_WAIT": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            **_SEGMENTS,
        },
        interface="hsn0",
        srun=("--gpu-bind=none",),
    ),
    "pods": ClusterProfile(
        "rented pods whose GPUs have neither NVLink nor InfiniBand",
        8,
        env={
            "NCCL_P2P_DISABLE": "1",
            "NCCL_IB_DISABLE": "1",
            "NCCL_NET": "Socket",
            "NCCL_NET_PLUGIN": "none",
            "NCCL_DEBUG": "WARN",
        },
        interface="lo",
    ),
    "infiniband": ClusterProfile(
        "NVIDIA GPUs with NVLink in a node and InfiniBand between nodes (NCCL's own choices)",
        8,
        env={"NCCL_IB_TIMEOUT": "22", "NCCL_DEBUG": "WARN", **_SEGMENTS},
    ),
}


def find_profile(name: str) -> ClusterProfile:
    """The profile of this name."""
    if name not in PROFILES:
        raise ConfigError(f"--profile {name} is unknown; there are {', '.join(PROFILES)}.")
    return PROFILES[name]


def environment(
    profile: ClusterProfile, interface: str, given: Mapping[str, str]
) -> dict[str, str]:
    """What the job exports; what was given by hand wins."""
    chosen = interface or profile.interface
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if chosen else ()
    return {**dict.fromkeys(names, chosen), **profile.env, **given}


# A run as a SLURM job: one launcher a node, a save before the limit, and a requeue after it.
#
# The script is short enough to be read before it is submitted (`--dry-run`). What it knows: code 75
# means "go on later"; a job that was cancelled must not come back; a node that failed its preflight
# or the run is left out the next time; a job that crashed or hung comes back a few times; and one
# that comes back three times without a new checkpoint has a problem that SLURM cannot solve. Tested
# against a real SLURM in tests/full/slurm.py.

LIVES = 3
"""Lives of a job without a new checkpoint after which it stays dead."""
CRASHES = 3
"""Crashes and hangs, beyond the launcher's own tries, after which it stays dead too."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What the command line says about a job."""

    name: str
    run: Path
    nodes: int
    time: str
    profile: ClusterProfile
    gpus_per_node: int | None = None
    nproc: int | None = None
    partition: str = ""
    account: str = ""
    container: str = ""
    interface: str = ""
    env: Mapping[str, str] | None = None
    sbatch: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    python: str = ""
    grace_s: int = 300
    restarts: int = 9
    preflight: bool = True

    @property
    def gpus(self) -> int:
        return self.profile.gpus_per_node if self.gpus_per_node is None else self.gpus_per_node

    @property
    def processes(self) -> int:
        """Ranks a node."""
        return self.nproc or max(1, self.gpus)

    @property
    def launcher_grace_s(self) -> int:
        """The launchers' own waiting time: SLURM's, less what it takes to say how it ended."""
        return max(self.grace_s // 2, self.grace_s - 15)

    @property
    def settings(self) -> Path:
        """Where the resolved config of the job is kept."""
        return self.run / "logs" / "submitted.yaml"


def check_job(job: SlurmJob, config: RunConfig) -> None:
    """Refuse before the queue what would fail after it."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", job.time):
        raise ConfigError(f"--time {job.time} is no time limit; write HH:MM:SS or D-HH:MM:SS.")
    if seconds(job.time) <= 2 * job.grace_s:
        raise ConfigError(
            f"--time {job.time} leaves no room for --grace {job.grace_s} s; give more time or less"
            " grace."
        )
    for word in job.sbatch:
        if not re.fullmatch(r"(--)?[a-z][a-z-]*(=.*)?", word):
            raise ConfigError(f"--sbatch {word} is no option of sbatch; write NAME=VALUE.")
    named = [*all_sources(config.data), config.data.tokenizer]
    unseen = [name for name in named if name and not Path(name).exists()]
    for name in unseen:
        warn(f"{name} is not to be seen from here; every node of the job must see it.")
    found = problems(
        config,
        run=job.run,
        world=job.nodes * job.processes,
        per_node=job.processes,
        fingerprint=fingerprint_of,
        with_data=not unseen,
    )
    for problem in found:
        raise problem
    exported = environment(job.profile, job.interface, job.env or {})
    if job.nodes > 1 and exported.get("NCCL_SOCKET_IFNAME") == "lo":
        raise ConfigError(
            f"interface lo does not leave its node and the job has {job.nodes}; name the one that"
            " connects them with --interface."
        )


def seconds(limit: str) -> int:
    """A time limit as SLURM reads it: 30 is minutes, 30:00 minutes and seconds, 1-0 a day."""
    days, dash, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    # After a day the first is hours; without one, minutes are always among them.
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    total = sum(part * unit for part, unit in zip(parts, units, strict=False))
    return int(days or 0) * 86400 + total


def render(job: SlurmJob) -> str:
    """The sbatch script."""
    return "\n".join([*_header(job), "", *_exports(job), "", *_body(job), ""])


def _header(job: SlurmJob) -> list[str]:
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.gpus) if job.gpus else "",
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "exclude": ",".join(read_bad_nodes(job.run)),
        "signal": f"B:USR1@{job.grace_s}",
        "open-mode": "append",
        "chdir": str(Path.cwd()),
        "output": str(job.run.resolve() / "logs" / "slurm-%j.log"),
    }
    lines = ["#!/bin/bash", "# Written by `foundling launch slurm`: one launcher a node."]
    lines += [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items() if value]
    lines.append("#SBATCH --requeue")
    more = (*job.profile.sbatch, *job.sbatch)
    return lines + [f"#SBATCH --{word.removeprefix('--')}" for word in more]


def _exports(job: SlurmJob) -> list[str]:
    exported = environment(job.profile, job.interface, job.env or {})
    return [f"export {name}={shlex.quote(value)}" for name, value in exported.items()]


def _body(job: SlurmJob) -> list[str]:
    run, srun = shlex.quote(str(job.run.resolve())), shlex.join(_srun(job))
    train = ["train", str(job.settings.resolve()), "--run", str(job.run.resolve())]
    train += ["--nproc", str(job.processes), "--restarts", str(job.restarts)]
    train += ["--grace", str(job.launcher_grace_s)]
    check = ["doctor", "--node", "--run", str(job.run.resolve()), "--gpus", str(job.gpus)]
    check += ["--limit", f"{LIMIT_S:g}"]
    command = f"step {srun} {shlex.join([*_python(job), *train])}"
    if job.preflight:
        first = f"step {srun} {shlex.join([*_python(job), *check])}"
        command = f"{first} && {command}"
    return [
        *job.setup,
        f"run={run}",
        *_SIGNALS.splitlines(),
        "",
        command,
        "code=$?",
        *_AFTER.format(
            requeue=int(Exit.REQUEUE),
            node=int(Exit.NODE),
            crash=int(Exit.CRASH),
            hang=int(Exit.WATCHDOG),
            killed=int(Exit.KILLED),
            crashes=CRASHES,
            bad=BAD_NODES,
            lives=LIVES,
        ).splitlines(),
    ]


def _srun(job: SlurmJob) -> list[str]:
    words = ["srun", "--kill-on-bad-exit=0", "--ntasks-per-node=1", *job.profile.srun]
    if job.container and not job.container.endswith(".sif"):
        words += [f"--container-image={job.container}", f"--container-mounts={Path.cwd()}"]
    return words


def _python(job: SlurmJob) -> list[str]:
    python = job.python or ("python3" if job.container else sys.executable)
    if job.container.endswith(".sif"):
        is_amd = "hsn" in f"{job.interface} {job.profile.interface}"  # Slingshot, as on Frontier
        gpu = "--rocm" if is_amd else "--nv"
        return ["apptainer", "exec", gpu, job.container, python, "-m", "foundling"]
    return [python, "-m", "foundling"]


# bash hears a signal only while it waits for something in the background, and its `wait` then
# returns early: it is asked again until no signal came between.
_SIGNALS = """\
why=""; signals=0; pid=""
tell() { why=$1; signals=$((signals + 1)); [ -n "$pid" ] && kill -USR1 "$pid" 2>/dev/null; }
trap 'tell "${why:-limit}"' USR1
trap 'tell cancel' TERM
step() {
  [ -z "$why" ] || return 75
  "$@" & pid=$!
  [ -z "$why" ] || kill -USR1 "$pid" 2>/dev/null  # told between the two words before
  local before code
  while :; do
    before=$signals; wait "$pid"; code=$?
    [ "$before" = "$signals" ] && break
  done
  pid=""; return $code
}"""

_AFTER = """\
echo "foundling: the job's step ended with code $code${{why:+ after $why}}"
[ "$why" != cancel ] || exit $code
case $code in
  {requeue}|{node}) ;;
  {crash}|{hang}|{killed})
    echo $code >> "$run/logs/crashes-$SLURM_JOB_ID"
    if [ "$(wc -l < "$run/logs/crashes-$SLURM_JOB_ID")" -gt {crashes} ]; then
      echo "foundling: more than {crashes} crashes; not coming back"; exit $code
    fi ;;
  *) exit $code ;;
esac
if [ -e "$run/logs/stopped-$SLURM_JOB_ID" ]; then
  echo "foundling: stopped by hand; not coming back"; exit $code
fi
# A run that was saved has its last step in its last line.
newest=$(tail -n 1 "$run/metrics.jsonl" 2>/dev/null | cut -c 1-40)
lives="$run/logs/lives-$SLURM_JOB_ID"
echo "$newest" >> "$lives"
if [ "$(tail -n {lives} "$lives" | grep -cxF -- "$newest")" -ge {lives} ]; then
  echo "foundling: {lives} lives without a step; not coming back"; exit $code
fi
trap '' TERM USR1
scontrol requeue "$SLURM_JOB_ID" || exit $code
bad=$(cut -d ' ' -f 1 "$run/{bad}" 2>/dev/null | sort -u | paste -sd,)
# Nodes can only be left out of a job that waits; SLURM ends this script in a moment.
for i in 1 2 3 4 5 6 7 8 9 10; do
  [ -z "$bad" ] || scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$bad" && break
  sleep 1
done
exit $code"""


def submit(job: SlurmJob, config: RunConfig) -> str:
    """Write the script and the config under the run and hand them to sbatch; what it answered."""
    write_text_atomic(job.settings, dump_yaml(config))
    script = job.run / "logs" / "job.sbatch"
    write_text_atomic(script, render(job))
    env = {key: value for key, value in os.environ.items() if key[:7] != "SBATCH_"}
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, env=env
        )
    except FileNotFoundError:
        raise ConfigError(
            f"sbatch is not on the PATH; run this where SLURM is (the script is {script})."
        ) from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"code {done.returncode}"
        raise ConfigError(f"SLURM refused the job: {said}; the script is {script}.")
    return done.stdout.strip().partition(";")[0]


def variables(words: list[str]) -> dict[str, str]:
    """K=V words as a mapping."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(f"--env {word} is no variable; write NAME=VALUE.")
        found[name] = value
    return found
