"""Which machine is written down after a try that failed, and which is not."""

import time
from pathlib import Path

import pytest

from foundling.launch.attempt import Attempt, killed_rank
from foundling.launch.bad_nodes import (
    STRIKES,
    count_failure,
    lost_node,
    note_bad_node,
    note_named_node,
    note_own_failures,
    read_bad_nodes,
)
from foundling.launch.environment import LaunchEnvironment
from foundling.launch.launcher import LaunchSpec, _without_bad_nodes
from foundling.launch.logs import ranks_file
from foundling.runtime.exits import OUTCOMES, Exit, RankOutcome, write_outcome

KILLED = "failed (exitcode: {}) local_rank: 0 (pid: 4711) of binary: python"
NODE = LaunchEnvironment("node", nodes=2, node=1)


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """The second of two nodes, with two ranks each."""
    folder = tmp_path / "logs" / "one" / "try-0"
    folder.mkdir(parents=True)
    for node in (0, 1):
        ranks_file(folder, node).write_text(f"{2 * node} 11 n{node}\n{2 * node + 1} 12 n{node}\n")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv(OUTCOMES, str(folder))
    made = Attempt(folder, 0, 2, NODE, "", ("x",), 60)
    made.agent_log.write_text("")
    return made


def says(monkeypatch: pytest.MonkeyPatch, rank: int, sentence: str) -> None:
    monkeypatch.setenv("RANK", str(rank))
    write_outcome(Exit.CRASH, sentence)


def end(code: Exit, sentence: str, rank: int = 0) -> RankOutcome:
    return RankOutcome(rank, code, sentence, "somewhere", 1)


def test_two_deaths_without_a_word_are_one_too_many(attempt: Attempt, tmp_path: Path) -> None:
    attempt.agent_log.write_text(KILLED.format(-6))
    note_own_failures(tmp_path, attempt)
    assert not (tmp_path / "logs" / STRIKES).exists(), "torch aborts the bereaved"
    attempt.agent_log.write_text(KILLED.format(-9))
    note_own_failures(tmp_path, attempt)
    assert read_bad_nodes(tmp_path) == []
    note_own_failures(tmp_path, attempt)
    assert read_bad_nodes(tmp_path) == ["n1"]


LISTED = """\
[{rank}]:
  time      : 2026-01-01_00:00:{second}
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 77)
"""


@pytest.mark.parametrize(
    ("second", "code", "name"),
    [("01.5", -9, "SIGKILL"), ("31.5", -9, ""), ("01.5", -15, ""), ("01.5", 1, "")],
)
def test_a_killed_rank_is_found_though_another_was_seen_first(
    second: str, code: int, name: str, attempt: Attempt
) -> None:
    first = KILLED.format(1) + "\n" + LISTED.format(rank=0, second="01.4", code=1)
    attempt.agent_log.write_text(first + LISTED.format(rank=1, second=second, code=code))
    killed = killed_rank(attempt)
    assert (killed[0] if killed else "") == name


def test_an_error_of_the_gpu_counts_and_too_little_memory_does_not(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, 0, "RuntimeError: CUDA error: an illegal memory access")
    says(monkeypatch, 3, "OutOfMemoryError: CUDA out of memory, CUDA error")
    note_own_failures(tmp_path, attempt)
    assert not (tmp_path / "logs" / STRIKES).exists(), "rank 0 is the other node's"
    says(monkeypatch, 2, "RuntimeError: CUDA error: uncorrectable ECC error encountered")
    note_own_failures(tmp_path, attempt)
    note_own_failures(tmp_path, attempt)
    assert read_bad_nodes(tmp_path) == ["n1"]


def test_old_deaths_are_forgotten(tmp_path: Path) -> None:
    count_failure(tmp_path, "n1", "x")
    path = tmp_path / "logs" / STRIKES
    path.write_text(path.read_text().replace(f"{time.time():.0f}"[:4], "1000"))
    count_failure(tmp_path, "n1", "x")
    count_failure(tmp_path, "n2", "x")
    assert read_bad_nodes(tmp_path) == []


def test_the_watchdog_names_a_node_if_it_is_one(attempt: Attempt, tmp_path: Path) -> None:
    hang = "no step for 60 s; the culprit is {}: in another collective"
    note_named_node(tmp_path, attempt, end(Exit.WATCHDOG, hang.format("ranks 1, 2")))
    note_named_node(
        tmp_path, attempt, end(Exit.WATCHDOG, "no step; no rank differs from the others")
    )
    assert read_bad_nodes(tmp_path) == []
    note_named_node(tmp_path, attempt, end(Exit.WATCHDOG, hang.format("ranks 2, 3")))
    assert read_bad_nodes(tmp_path) == ["n1"]
    for _ in range(2):
        note_named_node(tmp_path, attempt, end(Exit.CRASH, "DistBackendError: NCCL error in x", 1))
    assert read_bad_nodes(tmp_path) == ["n0", "n1"]


def test_a_job_with_a_bad_node_ends_to_come_back_without_it(
    attempt: Attempt, tmp_path: Path
) -> None:
    note_bad_node(tmp_path, "before", "n9")
    job, known = LaunchSpec(run=tmp_path, processes=2, command=("x",), place=NODE), ["n9"]
    crash, done = end(Exit.CRASH, "x"), end(Exit.OK, "")
    assert _without_bad_nodes(job, attempt, crash, known) == crash
    note_bad_node(tmp_path, "now", "n1")
    assert lost_node(tmp_path, known).startswith("n1 failed")
    assert _without_bad_nodes(job, attempt, crash, known).code == Exit.NODE
    assert _without_bad_nodes(job, attempt, done, known) == done
