"""Nodes that failed: which machine an attempt was lost to, and which are left out of the next."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from foundling.launch.attempt import Attempt, killed_rank
from foundling.launch.environment import host, node_name
from foundling.runtime.exits import EndOfRun, Exit, RankOutcome

# The Llama-3.1 run on Frontier saw four or five launches of ten succeed at 640 nodes. A preflight
# of every node costs seconds, and a node that fails it costs one requeue instead of a time-out of
# all the others.

BAD_NODES = "bad_nodes"
"""File of a run: one line a failed node, its name first."""
LIMIT_S = 180.0
"""Seconds for the GPUs of a node that a job begins on, where CUDA may start slowly."""
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


def preflight(run: Path, gpus: int, limit_s: float) -> None:
    """`doctor --node`: see that this node can compute and write; else note it and end with 71."""
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


# Which machine an attempt was lost to, as far as that is known, and what follows from it.
#
# Most nodes that fall out of a large job have only lost a peer, and an aborted NCCL says the same
# on all of them. What counts against a machine is what no peer can cause: a rank of it that is
# killed without a word, an error of its GPU, or the watchdog's finding that only its ranks differ.
# A death can be an accident, so it takes two of them within a day. Rejected: blaming the first that
# says it failed, which is as often the quickest of the bereaved.

STRIKES = "strikes"
"""File under RUN/logs: one line a death, its node and time first."""
LIMIT = 2
WINDOW_S = 86400.0
# Not SIGABRT: torch aborts a rank whose peer is gone.
_SILENT = ("SIGKILL", "SIGSEGV", "SIGBUS")
_GPU = re.compile(
    r"CUDA error|cudaError|CUBLAS_STATUS|CUDNN_STATUS|HIP error|uncorrectable|\bECC\b"
)
_NCCL = re.compile(r"NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError")
_CULPRIT = re.compile(r"the culprit is ranks? ([\d, ]+)")


def note_own_failures(run: Path, attempt: Attempt) -> None:
    """Every node, after a try that failed: write down what only this machine can have done."""
    killed = killed_rank(attempt)
    if killed and killed[0] in _SILENT:
        count_failure(run, node_name(), f"a rank was killed by {killed[0]}")
        return
    own = attempt.ranks()
    for said in attempt.said().values():
        if said.rank in own and _is_gpu_error(said):
            count_failure(run, node_name(), said.sentence)
            return


def note_named_node(run: Path, attempt: Attempt, end: RankOutcome) -> None:
    """The first node, after a try that failed: what the job's verdict says about one machine."""
    named = _CULPRIT.search(end.sentence) if end.code == Exit.WATCHDOG else None
    if named:
        nodes = _nodes_of(attempt, [int(word) for word in re.findall(r"\d+", named[1])])
        if len(nodes) == 1:
            note_bad_node(run, end.sentence, nodes.pop())
    elif end.code == Exit.CRASH and _NCCL.search(end.sentence) and not _is_gpu_error(end):
        for node in _nodes_of(attempt, [end.rank]):
            count_failure(run, node, end.sentence)


def lost_node(run: Path, known: Iterable[str]) -> str:
    """A sentence about the machines written down since; empty if there are none."""
    new = sorted(set(read_bad_nodes(run)) - set(known))
    return f"{', '.join(new)} failed and is left out of the next life of the job" if new else ""


def count_failure(run: Path, node: str, why: str) -> None:
    """Count a death against a machine; the second one puts it among the bad."""
    path = run / "logs" / STRIKES
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{node} {time.time():.0f} {' '.join(why.split())[:200]}\n")
    since = time.time() - WINDOW_S
    lines = [line.split() for line in path.read_text().splitlines()]
    if sum(words[0] == node and float(words[1]) > since for words in lines) >= LIMIT:
        note_bad_node(run, f"twice in a day: {why}", node)


def _is_gpu_error(said: RankOutcome) -> bool:
    """Too little memory is the settings' fault and not the machine's."""
    is_ours = "out of memory" in said.sentence
    return said.code == Exit.CRASH and not is_ours and bool(_GPU.search(said.sentence))


def _nodes_of(attempt: Attempt, ranks: Iterable[int]) -> set[str]:
    """Machines of these ranks, by what they wrote down when they began."""
    wanted, found = set(ranks), set()
    for path in attempt.folder.glob("node-*.ranks"):
        for words in map(str.split, path.read_text().splitlines()):
            if len(words) == 3 and int(words[0]) in wanted:
                found.add(words[2])
    return found
