"""Runs a program that a model wrote, in a child process that can do little.

What it does: a process of its own in an empty temporary folder; limits on processor time, memory,
file size, open files and processes; no environment but a path; no input; killed with all its
children after a time limit; and where the kernel lets an ordinary user make namespaces, no network
and no way to signal other processes.

What it does not do: it is the same user on the same machine, so a program can read every file that
you can, the environment of your other processes among them, write where you may write, and (where
namespaces are not allowed) reach the network, signal your processes and leave one running that has
made itself a session of its own. A program that knows this file can claim to have passed. It
protects against accidents (endless loops, full memory, a deleted working folder), not against an
attacker. For models that you do not trust, evaluate in a container or a virtual machine.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MEMORY = 1 << 30
SECONDS = 10.0
FILE_BYTES = 1 << 20
_GUARD = """
import resource, sys
def limit(what, most):
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))
limit(resource.RLIMIT_CPU, {cpu})
limit(resource.RLIMIT_AS, {memory})
limit(resource.RLIMIT_FSIZE, {file})
limit(resource.RLIMIT_NOFILE, 64)
limit(resource.RLIMIT_CORE, 0)
limit(resource.RLIMIT_NPROC, {processes})
code = sys.stdin.read()
sys.stdin = open("/dev/null")
exec(compile(code, "program.py", "exec"), {{"__name__": "__main__"}})
open("../done", "w").close()
"""


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended."""

    passed: bool
    why: str
    """Empty, or what went wrong in a line."""


@cache
def without_network() -> tuple[str, ...]:
    """Words that run a command in namespaces of its own, without a network; none where the kernel
    does not let us."""
    tool = shutil.which("unshare")
    if tool is None:
        return ()
    words = (tool, "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
    try:
        tried = subprocess.run([*words, "true"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return words if tried.returncode == 0 else ()


def run_program(
    code: str, *, seconds: float = SECONDS, memory: int = MEMORY, network: bool = False
) -> ProgramResult:
    """Run Python code; passed means that it came to its end (a program that calls exit() has not).
    `network` leaves the namespaces out."""
    guard = _GUARD.format(
        cpu=max(1, int(seconds) + 1), memory=memory, file=FILE_BYTES, processes=_processes()
    )
    words = [*(() if network else without_network()), sys.executable, "-I", "-c", guard]
    # What a program left may not be ours to delete any more; that is no reason to end.
    with tempfile.TemporaryDirectory(
        prefix="foundling-sandbox-", ignore_cleanup_errors=True
    ) as folder:
        output = Path(folder) / "output"
        room = Path(folder) / "room"
        room.mkdir()
        with open(output, "wb") as said:
            child = subprocess.Popen(
                words,
                cwd=room,
                env={"PATH": os.defpath, "HOME": str(room), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            try:
                child.communicate(code.encode("utf-8", "replace"), timeout=seconds)
            except subprocess.TimeoutExpired:
                return ProgramResult(False, f"still running after {seconds:g} s")
            except BrokenPipeError:
                pass  # it died before it had read all
            finally:
                _kill(child)
        if child.returncode == 0 and (Path(folder) / "done").is_file():
            return ProgramResult(True, "")
        return ProgramResult(False, _last_line(output, child.returncode))


def _processes() -> int:
    """The limit counts all processes of the user, so it must lie above those there are."""
    own = os.getuid()
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            count += entry.stat().st_uid == own
        except OSError:
            continue
    return 8 * count + 64


def _kill(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _last_line(output: Path, code: int) -> str:
    with open(output, "rb") as file:
        file.seek(max(0, output.stat().st_size - 2000))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:200] if lines else f"exit code {code}"
