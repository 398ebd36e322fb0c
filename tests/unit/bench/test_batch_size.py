"""The search for the fastest batch size."""

import pytest

from foundling.bench.batch_size import best_batch, fastest


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
