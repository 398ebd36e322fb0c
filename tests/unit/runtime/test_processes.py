"""Children under a limit: what hangs is killed, what dies is named, and nobody is left behind."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foundling.config.errors import RunError
from foundling.runtime import processes
from foundling.runtime.processes import free_port, run_child, run_ranks

ROOT = Path(__file__).parents[3]


def test_what_it_says_comes_back() -> None:
    code = "import sys; print(sys.stdin.read() * 2); print('hm', file=sys.stderr)"
    ended = run_child(["-c", code], limit_s=20, stdin="ab")
    assert (ended.is_good, ended.out, ended.err) == (True, "abab\n", "hm\n")


def test_a_hang_is_killed_with_everything_it_has_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '300']); open({str(tmp_path / 'pid')!r}, 'w')"
        ".write(str(child.pid))\nprint('begun', flush=True)\ntime.sleep(300)"
    )
    began = time.monotonic()
    ended = run_child(["-c", code], limit_s=1.5)
    assert time.monotonic() - began < 10
    assert ended.code is None
    assert ended.reason == "no answer within 2 s"
    assert ended.out == "begun\n"
    grandchild = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{grandchild}").exists() or _is_zombie(grandchild):
            return
        time.sleep(0.02)
    raise AssertionError("what the child had started lives on")


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_death_is_named() -> None:
    ended = run_child(["-c", "import os; os.kill(os.getpid(), 4)"], limit_s=20)
    assert ended.reason == "killed by SIGILL"
    ended = run_child(["-c", "raise ValueError('no such thing')"], limit_s=20)
    assert ended.reason == "ValueError: no such thing"


def test_a_child_that_talks_has_the_limit_for_each_word() -> None:
    code = "import time\nfor _ in range(6): print('.', flush=True); time.sleep(0.3)"
    assert run_child(["-c", code], limit_s=1.5, output_extends_limit=True).is_good
    assert run_child(["-c", code], limit_s=1.0).code is None


def test_ranks_have_their_numbers_and_end_with_the_one_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "LINGER_S", 0.3)
    code = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['EXTRA'])"
    ended = run_ranks(["-c", code], 3, limit_s=20, env={"EXTRA": "x"})
    assert [one.out.split() for one in ended] == [[str(rank), "3", "x"] for rank in range(3)]
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(300)"
    began = time.monotonic()
    ended = run_ranks(["-c", code], 2, limit_s=200)
    assert time.monotonic() - began < 30
    assert [one.code for one in ended] == [None, 7]


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = (
        "import os, time; from foundling.runtime.processes import tie_to_parent; tie_to_parent();"
        f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    )
    parent = (
        "from foundling.runtime.processes import run_child; "
        f"run_child(['-c', {child!r}], limit_s=300)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    last = time.monotonic() + 30
    while not (pid_file.is_file() and pid_file.read_text()):
        assert time.monotonic() < last
        time.sleep(0.02)
    process.kill()
    process.wait()
    pid = int(pid_file.read_text())
    while Path(f"/proc/{pid}").exists() and not _is_zombie(pid):
        assert time.monotonic() < last, "the child outlived its parent"
        time.sleep(0.02)


def test_a_free_port_is_none_that_linux_gives_away(monkeypatch: pytest.MonkeyPatch) -> None:
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = free_port()
    assert port < given
    with socket.socket() as taken:
        taken.bind(("", port))
        monkeypatch.setattr(processes, "LOW_PORTS", range(port, port + 1))
        monkeypatch.setattr(processes.random.SystemRandom, "sample", lambda self, ports, _: ports)
        with pytest.raises(RunError, match="no port"):
            free_port()
    assert free_port() == port
