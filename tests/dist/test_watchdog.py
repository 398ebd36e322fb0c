"""Real processes that hang, skip and die: the culprit is named in time, and the job ends as if
nothing had happened. (Twenty of twenty under torchrun: tests/full/hangs.py.)"""

from pathlib import Path

import pytest
from hang_tools import Ended, by_hand, told_after_s

LIMIT_S = 2.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    ended = by_hand(tmp_path_factory.mktemp("whole"), "none:0:0", processes=3)
    assert (ended.code, ended.hangs) == (0, []), ended.text
    return ended.weights


def report_of(folder: Path, ended: Ended) -> str:
    return (folder / str(ended.hangs[0]["report"])).read_text()


def test_a_rank_stuck_in_a_sleep_is_named_with_its_stack(undisturbed: str, tmp_path: Path) -> None:
    ended = by_hand(tmp_path, "sleep:1:6", processes=3, limit_s=LIMIT_S)
    assert (ended.code, ended.weights) == (0, undisturbed), ended.text
    assert [hang["culprit"] for hang in ended.hangs] == [[1]]
    told = told_after_s(ended.text)
    assert told is not None
    assert told < LIMIT_S
    report = report_of(tmp_path, ended)
    assert "in no collective, while 2 others wait in 'counts' (number 19, step 7)" in report
    assert "stand_in.py" in report
    assert " misbehave" in report
    assert "flight recorder: rank 1: has not entered" in report
    folder = (tmp_path / str(ended.hangs[0]["report"])).parent
    for rank in range(3):
        assert (folder / f"rank-0000{rank}.gloo.json").stat().st_size > 100
        assert (folder / f"rank-0000{rank}.stacks").stat().st_size > 100


@pytest.mark.parametrize(
    ("kind", "waits_in"),
    [
        ("told", "whether to stop"),
        pytest.param("worst", "how every rank stands", marks=pytest.mark.full),
        pytest.param("deal", "parts from rank 0", marks=pytest.mark.full),
        pytest.param("conclude", "results for rank 0", marks=pytest.mark.full),
        pytest.param("on_main", "word from rank 0", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_sleeps_before_an_agreement_is_named(
    kind: str, waits_in: str, tmp_path: Path
) -> None:
    # Who waits for a gather is rank 0; the others send and go on.
    rank = 0 if kind in ("deal", "on_main") else 1
    ended = by_hand(tmp_path, f"{kind}:{rank}:2", processes=2, steps=4, limit_s=LIMIT_S)
    assert ended.code == 0, ended.text
    assert [hang["culprit"] for hang in ended.hangs] == [[rank]]
    report = report_of(tmp_path, ended)
    assert f"in no collective, while the other waits in '{waits_in}'" in report
    assert " agree" in report
    assert "not the same everywhere" not in report, "a scatter is no difference"


def test_a_rank_that_skips_a_collective_is_named(undisturbed: str, tmp_path: Path) -> None:
    ended = by_hand(tmp_path, "skip:2:6", processes=3, limit_s=LIMIT_S)
    assert (ended.code, ended.weights) == (0, undisturbed), ended.text
    assert [hang["culprit"] for hang in ended.hangs] == [[2]]
    assert "where the others entered 'loss' of step 7" in report_of(tmp_path, ended)


def test_a_rank_that_dies_is_named_at_once(undisturbed: str, tmp_path: Path) -> None:
    ended = by_hand(tmp_path, "die:0:6", processes=3, limit_s=8.0)
    assert (ended.code, ended.weights) == (0, undisturbed), ended.text
    assert [hang["culprit"] for hang in ended.hangs] == [[0]]
    assert "gone without a word" in report_of(tmp_path, ended)
    assert told_after_s(ended.text) is None  # and not only when the limit is up


@pytest.mark.full
def test_a_rank_that_raises_is_named_with_its_error(undisturbed: str, tmp_path: Path) -> None:
    ended = by_hand(tmp_path, "raise:1:6", processes=3, limit_s=8.0)
    assert (ended.code, ended.weights) == (0, undisturbed), ended.text
    assert [hang["culprit"] for hang in ended.hangs] == [[1]]
    assert "ended with ValueError: planted" in report_of(tmp_path, ended)


@pytest.mark.full
def test_a_stopped_rank_of_two_is_named(tmp_path: Path) -> None:
    ended = by_hand(tmp_path, "stop:1:6", processes=2, limit_s=LIMIT_S)
    assert ended.code == 0, ended.text
    assert [hang["culprit"] for hang in ended.hangs] == [[1]]
    assert "rank 1 (stopped)" in report_of(tmp_path, ended)
