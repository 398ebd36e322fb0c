"""The search for a batch size: the fastest, and the largest that fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundling.bench.batch_size import best_batch, fastest, largest_batch


@pytest.mark.parametrize("top", [36, 40, 44, 56])
def test_the_hump_is_found_between_the_doublings(top: int) -> None:
    asked: list[int] = []

    def measure(rows: int) -> float | None:
        asked.append(rows)
        return None if rows > 56 else 1000 - abs(rows - top)

    found = best_batch(measure)
    assert fastest(found) == top
    assert found[64] is None
    assert all(rows % 4 == 0 for rows in asked)
    assert len(asked) == len(set(asked)), "nothing is measured twice"
    assert len(asked) <= 10


def test_a_steady_rise_goes_to_the_limit_and_a_fall_stops_at_once() -> None:
    assert fastest(best_batch(lambda rows: float(rows), most=64)) == 64
    asked: list[int] = []

    def falling(rows: int) -> float:
        asked.append(rows)
        return 100 / rows

    assert fastest(best_batch(falling)) == 8
    assert asked == [8, 16, 12]


@pytest.mark.parametrize("room", [0, 1, 3, 7])
def test_where_not_even_eight_fit_fewer_are_tried(room: int) -> None:
    found = best_batch(lambda rows: float(rows) if rows <= room else None)
    assert fastest(found) == {0: 0, 1: 1, 3: 2, 7: 4}[room]


@given(
    st.integers(0, 70),
    st.integers(1, 64),
    st.integers(0, 50),
    st.booleans(),
    st.floats(0.5, 1.5),
)
def test_the_largest_that_fits_is_found_to_the_row(
    end: int, most: int, fixed: int, knows_room: bool, bend: float
) -> None:
    asked: list[int] = []

    def peak(rows: int) -> int | None:
        asked.append(rows)
        assert 1 <= rows <= most
        return int(fixed + 10 * rows**bend) if rows <= end else None

    room = int(fixed + 10 * end**bend) if knows_room else 0
    assert largest_batch(peak, most=most, room=room) == min(end, most)
    assert len(asked) == len(set(asked))


def test_a_straight_line_needs_few_tries() -> None:
    asked: list[int] = []

    def peak(rows: int) -> int | None:
        asked.append(rows)
        return 20 + 3 * rows if rows <= 43 else None

    assert largest_batch(peak, most=256, room=20 + 3 * 43 + 2, known={16: 68}) == 43
    assert len(asked) <= 4
