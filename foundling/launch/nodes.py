"""Nodes that failed: found before a run starts on them (or by blame.py while it goes), written
down, left out of the next try.

001 saw four or five launches of ten succeed at 640 nodes. A preflight of every node costs seconds,
and a node that fails it costs one requeue instead of a time-out of all the others.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from foundling.launch.place import host, node_name
from foundling.runtime.exits import EndOfRun, Exit

BAD_NODES = "bad_nodes"
"""File of a run: one line a failed node, its name first."""
LIMIT_S = 180.0
# Each GPU multiplies once; what does not answer in time, or answers wrongly, is not to be trusted.
_PROBE = """
import sys, torch
wanted = int(sys.argv[1])
found = torch.cuda.device_count()
assert found >= wanted, f"{found} GPUs of {wanted}"
for number in range(wanted):
    a = torch.ones(512, 512, device=f"cuda:{number}")
    assert (a @ a)[0, 0].item() == 512, f"GPU {number} cannot multiply"
"""


def read_bad_nodes(run: Path) -> list[str]:
    """Names of the nodes that failed, each once."""
    try:
        lines = (run / BAD_NODES).read_text().splitlines()
    except OSError:
        return []
    return sorted({line.split()[0] for line in lines if line.strip()})


def note_bad_node(run: Path, why: str, node: str = "") -> None:
    """Write a node down, this one if none is named; one short append, so that many nodes can do it
    at once."""
    name = node or node_name()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
    with open(run / BAD_NODES, "a", encoding="utf-8") as file:
        file.write(f"{name} {stamp} {' '.join(why.split())}\n")


def preflight(run: Path, gpus: int, limit_s: float = LIMIT_S) -> None:
    """See that this node can compute and write; otherwise write it down and end with 71."""
    why = _why_not(run, gpus, limit_s)
    if why:
        note_bad_node(run, why)
        raise EndOfRun(Exit.NODE, f"{host()} fails its preflight: {why}")


def _why_not(run: Path, gpus: int, limit_s: float) -> str:
    probe = run / "logs" / f"preflight-{host()}-{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("x")
        probe.unlink()
    except OSError as error:
        return f"{run} cannot be written: {error.strerror}"
    if not gpus:
        return ""
    command = [sys.executable, "-c", _PROBE, str(gpus)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"its GPUs do not answer within {limit_s:g} s"
    said = done.stderr.strip().splitlines()[-1:]
    return "" if done.returncode == 0 else said[0] if said else f"code {done.returncode}"
