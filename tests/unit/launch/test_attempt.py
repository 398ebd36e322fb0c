"""What a launcher looks at while thousands of ranks work: its own, and one file of everybody."""

import os
from pathlib import Path

import pytest

from foundling.launch import attempt as attempt_module
from foundling.launch.attempt import Attempt, LauncherSignal, _poll, _Watch
from foundling.launch.environment import LaunchEnvironment
from foundling.launch.logs import ranks_file
from foundling.runtime.exits import OUTCOMES, Exit, write_outcome
from foundling.runtime.run_dir import LineFile, read_lines


class Agent:
    """Stands for torchrun."""

    pid, killed = os.getppid(), False

    def poll(self) -> None:
        return None

    def wait(self) -> None:
        return None

    def kill(self) -> None:
        self.killed = True


def watch(folder: Path) -> _Watch:
    attempt = Attempt(folder, 0, 2, LaunchEnvironment("node", nodes=640, node=7), "", ("x",), 60)
    return _Watch(attempt, Agent(), LauncherSignal())  # type: ignore[arg-type]


def test_a_node_looks_at_its_own_ranks_and_lists_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "glob", pytest.fail)
    monkeypatch.setattr(Path, "iterdir", pytest.fail)
    monkeypatch.setenv(OUTCOMES, str(tmp_path))
    monkeypatch.setattr(attempt_module, "LINGER_S", 0.0)
    node = watch(tmp_path)
    _poll(node)
    ranks_file(tmp_path, 7).write_text(f"14 {os.getpid()} n7\n15 1 n7\n16 2")
    assert node.attempt.ranks() == {14: os.getpid(), 15: 1}, "a torn line is no rank"
    monkeypatch.setenv("RANK", "3")
    write_outcome(Exit.USER, "another node's")
    _poll(node)
    assert not node.attempt.has_failed, "that node will say so"
    monkeypatch.setenv("RANK", "15")
    write_outcome(Exit.USER, "ours")
    _poll(node)
    assert node.attempt.has_failed
    _poll(node)
    assert node.agent.killed  # type: ignore[attr-defined]
    other = watch(tmp_path)
    ranks_file(tmp_path, 7).unlink()
    _poll(other)
    _poll(other)
    assert other.agent.killed  # type: ignore[attr-defined]


def test_a_line_is_added_without_reading_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "lines.jsonl"
    monkeypatch.setattr(Path, "read_bytes", pytest.fail)
    with LineFile(path) as file:
        for number in range(3):
            file.append({"n": number})
    with open(path, "ab") as file:
        file.write(b'{"n": 3, "to')
    with LineFile(path) as file:  # the next process
        file.append({"n": 4})
    monkeypatch.undo()
    assert [line["n"] for line in read_lines(path)] == [0, 1, 2, 4]
