"""What is tried beside the training: one rank (several: tests/dist)."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foundling.runtime.run_dir import RunDir, read_lines
from foundling.train.evaluation import NonFatal


def fails() -> None:
    raise ValueError("no such file")


class Killed(BaseException):
    """Stands for an end of the process that nothing of ours can catch."""


def dies() -> None:
    raise Killed


def succeeds(attempts: NonFatal, what: str, step: int, action: Callable[[], None]) -> bool:
    ends = list[str]()
    attempts.attempt(what, step, lambda: (action(), ends.append(what))[0])
    return ends == [what]


def test_a_failure_is_told_and_does_not_go_further(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    attempts = NonFatal(run, collective=False, limit_s=60)
    assert not succeeds(attempts, "evaluation", 40, fails)
    assert succeeds(attempts, "evaluation", 80, lambda: None)
    lines = read_lines(run.events_path)
    assert [(line["event"], line["step"], line["error"]) for line in lines] == [
        ("failed", 40, "no such file")
    ]
    assert not (tmp_path / "tried.json").exists()


def test_what_ended_the_job_twice_is_not_tried_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for _ in range(2):
        with pytest.raises(Killed):
            NonFatal(run, collective=False, limit_s=60).attempt("evaluation", 40, dies)
    attempts = NonFatal(run, collective=False, limit_s=60)
    assert not succeeds(attempts, "evaluation", 40, dies)
    assert succeeds(attempts, "sampling", 40, lambda: None)
    assert succeeds(attempts, "evaluation", 80, lambda: None)
    assert "ended the job 2 times" in read_lines(run.events_path)[-1]["error"]


def test_what_failed_in_order_may_be_tried_again(tmp_path: Path) -> None:
    attempts = NonFatal(RunDir(tmp_path), collective=False, limit_s=60)
    for _ in range(3):
        assert not succeeds(attempts, "evaluation", 40, fails)
    assert succeeds(attempts, "evaluation", 40, lambda: None)


def test_agreed_hands_on_items_and_errors(tmp_path: Path) -> None:
    attempts = NonFatal(RunDir(tmp_path), collective=False, limit_s=60)
    assert list(attempts.same_on_all_ranks(iter(range(5)))) == [0, 1, 2, 3, 4]

    def broken() -> Iterator[int]:
        yield 1
        raise OSError("torn")

    items = attempts.same_on_all_ranks(broken())
    assert next(items) == 1
    with pytest.raises(OSError, match="torn"):
        next(items)
