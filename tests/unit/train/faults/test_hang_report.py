"""The culprit of a hang: causes before their consequences."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foundling.runtime.progress import EnteredCollective, ProgressMarker
from foundling.train.faults.hang_report import (
    Calls,
    Culprit,
    RankStates,
    find_culprit,
    flight_culprit,
    read_flights,
)
from foundling.train.faults.heartbeat import (
    FINISHED,
    Heartbeat,
    heartbeat_path,
    is_gone,
    read_heartbeat,
    take_heartbeat,
    write_heartbeat,
)

LOSS, COUNTS = EnteredCollective(52, "loss", 5), EnteredCollective(53, "counts", 6)


def beat(rank: int, *entered: EnteredCollective, inside: bool = True, **more: object) -> Heartbeat:
    history = (EnteredCollective(50, "counts", 5), EnteredCollective(51, "gradients", 5), *entered)
    base = Heartbeat(
        rank=rank, host="h", pid=100 + rank, started_at="1", number=9, step=history[-1].step,
        phase="step", stall_s=3.0, inside=history[-1] if inside else None, entered=history,
        stack=("a:1 f",),
    )  # fmt: skip
    return replace(base, **more)  # type: ignore[arg-type]


def seen(*beats: Heartbeat, size: int = 0, **more: set[int]) -> RankStates:
    return RankStates({one.rank: one for one in beats}, size or len(beats), **more)


def culprit(found: Culprit | None) -> tuple[int, ...]:
    assert found is not None
    return found.ranks


def test_a_rank_that_is_not_in_the_collective_is_waited_for() -> None:
    found = find_culprit(seen(beat(0, LOSS), beat(1, inside=False), beat(2, LOSS)))
    assert culprit(found) == (1,)
    assert found is not None
    assert "2 others wait in 'loss' (number 52, step 6)" in found.why


def test_a_rank_that_skipped_a_collective_is_found_by_its_count() -> None:
    early = EnteredCollective(52, "counts", 6)  # where the others are in `loss`
    assert culprit(find_culprit(seen(beat(0, LOSS), beat(1, early), beat(2, LOSS)))) == (1,)
    # Of two, the one that is further on with as many collectives has left one out.
    assert culprit(find_culprit(seen(beat(0, LOSS), beat(1, early)))) == (1,)
    assert culprit(find_culprit(seen(beat(0, early), beat(1, LOSS)))) == (0,)


@pytest.mark.parametrize("skipper", [0, 1])
def test_of_two_that_part_within_a_step_the_one_that_breaks_the_habit_is_odd(skipper: int) -> None:
    """`stop` is asked after `loss`, in the same step: who asks it first has left `loss` out."""
    habit = [
        EnteredCollective(52, "loss", 5),
        EnteredCollective(53, "stop", 5),
        EnteredCollective(54, "counts", 6),
    ]
    habit += [EnteredCollective(55, "gradients", 6)]
    beats = [beat(rank, *habit, EnteredCollective(56, "loss", 6)) for rank in range(2)]
    beats[skipper] = beat(skipper, *habit, EnteredCollective(56, "stop", 6))
    found = find_culprit(seen(*beats))
    assert culprit(found) == (skipper,)
    assert found is not None
    assert "entered 'stop' of step 7 as its collective number 56" in found.why


def test_a_skipped_collective_comes_before_the_crash_that_it_caused() -> None:
    early = EnteredCollective(52, "counts", 6)
    crashed = beat(0, LOSS, ended="RuntimeError: wrong size")
    assert culprit(find_culprit(seen(crashed, beat(1, early)))) == (1,)
    assert culprit(find_culprit(seen(beat(0, LOSS), beat(1, early), dead={0}))) == (1,)


def test_a_dead_rank_comes_before_those_that_lost_it() -> None:
    lost = "RuntimeError: Connection closed by peer"
    found = find_culprit(seen(beat(0, LOSS, ended=lost), beat(1), beat(2, ended=lost), dead={1}))
    assert culprit(found) == (1,)


def test_the_first_error_is_the_one_that_is_no_lost_peer() -> None:
    lost = "RuntimeError: [1.2.3.4]:5: Connection reset by peer"
    found = find_culprit(seen(beat(0, ended=lost), beat(1, ended="ValueError: bad"), beat(2)))
    assert culprit(found) == (1,)
    assert found is not None
    assert "ValueError: bad" in found.why


def test_silence_and_absence_are_named() -> None:
    assert culprit(find_culprit(seen(beat(0, LOSS), beat(1, LOSS), silent={1}))) == (1,)
    assert culprit(find_culprit(seen(beat(0, LOSS), beat(1, LOSS), size=4))) == (2, 3)


def test_all_alike_is_nobodys_fault() -> None:
    assert find_culprit(seen(beat(0, LOSS), beat(1, LOSS))) is None
    assert find_culprit(seen(beat(0, inside=False), beat(1, inside=False))) is None
    assert find_culprit(seen(beat(0, LOSS))) is None
    done = beat(1, LOSS, inside=False, ended=FINISHED)
    assert find_culprit(seen(beat(0, LOSS), done)) is None


def test_who_is_behind_is_named() -> None:
    found = find_culprit(seen(beat(0, LOSS, COUNTS), beat(1, LOSS), beat(2, LOSS, COUNTS)))
    assert culprit(found) == (1,)


def test_a_beat_comes_back_from_its_file(tmp_path: Path) -> None:
    progress = ProgressMarker()
    progress.move("step", 4)
    with progress.collective("loss"):
        one = take_heartbeat(3, 7, progress)
    write_heartbeat(tmp_path, one)
    assert read_heartbeat(heartbeat_path(tmp_path, 3)) == one
    assert one.inside is not None
    assert "step 5, inside 'loss' (number 1, step 5)" in one.place()
    assert not is_gone(one)
    assert is_gone(replace(one, started_at="0"))  # another process under the same number
    assert any("test_a_beat_comes_back" in line for line in one.stack)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 1}', '{"inside": null, "entered": 3}'])
def test_a_torn_beat_is_none(tmp_path: Path, text: str) -> None:
    heartbeat_path(tmp_path, 0).write_text(text)
    assert read_heartbeat(heartbeat_path(tmp_path, 0)) is None
    assert read_heartbeat(heartbeat_path(tmp_path, 1)) is None


def flight(*calls: str, first: int = 1) -> Calls:
    return {"0 default_pg": dict(enumerate(calls, first))}


def test_the_flight_recorder_tells_who_is_behind_and_who_turned() -> None:
    behind = flight_culprit(
        {0: flight("a", "b", "c"), 1: flight("a", "b"), 2: flight("a", "b", "c")}
    )
    assert culprit(behind) == (1,)
    turned = flight_culprit({0: flight("a", "b"), 1: flight("a", "b"), 2: flight("a", "c")})
    assert culprit(turned) == (2,)
    assert culprit(flight_culprit({0: flight("a"), 1: flight("b")})) == ()  # of two, nobody knows
    assert flight_culprit({0: flight("a", "b"), 1: flight("a", "b")}) is None
    # A ring that has forgotten more is compared where both remember.
    assert flight_culprit({0: flight("a", "b", "c"), 1: flight("b", "c", first=2)}) is None


def test_a_scatter_is_the_same_on_its_root_and_elsewhere(tmp_path: Path) -> None:
    for rank, sizes in enumerate(([[6], [6]], [])):
        entry = {
            "collective_seq_id": 1,
            "profiling_name": "gloo:scatter",
            "input_sizes": sizes,
            "input_dtypes": ["Byte"] * len(sizes),
        }
        (tmp_path / f"rank-0000{rank}.gloo.json").write_text(json.dumps({"entries": [entry]}))
    assert flight_culprit({rank: read_flights(tmp_path, rank) for rank in (0, 1)}) is None


def test_a_flight_record_is_read_with_care(tmp_path: Path) -> None:
    entries = [
        {"collective_seq_id": 1, "profiling_name": "gloo:all_reduce", "input_sizes": [[3]],
         "input_dtypes": ["Float"], "process_group": ["0", "default_pg"], "is_p2p": False},
        {"collective_seq_id": 1, "profiling_name": "gloo:send", "is_p2p": True},
    ]  # fmt: skip
    (tmp_path / "rank-00002.gloo.json").write_text(json.dumps({"entries": entries}))
    (tmp_path / "rank-00002.nccl.json").write_text("torn")
    found = read_flights(tmp_path, 2)
    assert list(found) == ["0 default_pg"]
    assert found["0 default_pg"] == {1: "gloo:all_reduce ['Float'] [[3]]"}
    assert read_flights(tmp_path, 0) == {}
