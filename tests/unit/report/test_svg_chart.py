"""Bins, ticks, numbers and tags."""

import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foundling.report import markup
from foundling.report.markup import Markup, esc, tag
from foundling.report.page import plan_label, spread, unit_format
from foundling.report.svg_chart import Chart, Curve, Level, binned, draw

VALUES = st.floats(-1e6, 1e6)
POINTS = st.lists(st.tuples(st.floats(0, 1e9), VALUES), min_size=1, max_size=300).map(sorted)


@given(POINTS, st.integers(1, 50))
def test_bins_are_few_and_lose_no_extreme(points: list[tuple[float, float]], most: int) -> None:
    bins = binned(points, most)
    values = [y for _, y in points]
    assert len(bins) <= most or len(points) <= most
    assert min(item.low for item in bins) == min(values)
    assert max(item.high for item in bins) == max(values)
    assert [item.x for item in bins] == sorted(item.x for item in bins)
    slack = 1e-6 * max(1.0, *(abs(y) for y in values))
    assert all(item.low - slack <= item.mean <= item.high + slack for item in bins)


def test_a_bin_is_the_mean_of_its_points() -> None:
    points = [(float(x), float(x % 10)) for x in range(1000)]
    bins = binned(points, 100)
    assert len(bins) == 100
    assert {(item.mean, item.low, item.high) for item in bins[:-1]} == {(4.5, 0.0, 9.0)}


def test_an_empty_curve_has_no_bins() -> None:
    assert binned([], 10) == []


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 8))
def test_ticks_are_round_few_and_inside(low: float, width: float, wanted: int) -> None:
    high = low + width
    found = markup.ticks(low, high, wanted)
    assert 1 <= len(found) <= wanted + 1
    slack = 1e-6 * max(abs(low), abs(high), width)
    assert all(low - slack <= value <= high + slack for value in found)


@given(st.floats(1e-6, 1e3), st.floats(3.1, 1e12))
def test_log_ticks_are_inside_and_not_crowded(low: float, ratio: float) -> None:
    found = markup.log_ticks(low, low * ratio)
    assert 1 <= len(found) <= 12
    assert all(low * 0.99 <= value <= low * ratio * 1.01 for value in found)
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (markup.compact(2_416_640), "2.42M"),
        (markup.compact(999_900), "1M"),
        (markup.compact(12), "12"),
        (markup.plain(1234567), "1,234,567"),
        (markup.plain(0.12345), "0.1235"),
        (markup.scientific(0.003), "3e-3"),
        (markup.scientific(0), "0"),
        (markup.percent(0.98345), "98.3%"),
        (markup.in_bytes(812_000_000), "812 MB"),
        (markup.in_bytes(12), "12 B"),
        (markup.duration(4.25), "4.2 s"),
        (markup.duration(59.7), "1 min 00 s"),
        (markup.duration(3661), "1 h 01 min"),
        (markup.duration(200_000), "2 d 7 h"),
        (plan_label("tokens_per_s"), "tokens per second"),
        (plan_label("horizon.train_s"), "horizon train time"),
        (unit_format("tokens_per_s")(12345), "12.3k"),
        (unit_format("mfu")(0.41), "41.0%"),
        (unit_format("horizon.steps")(590), "590"),
    ],
)
def test_numbers_as_a_person_reads_them(shown: str, wanted: str) -> None:
    assert shown == wanted


@given(st.text())
def test_text_is_escaped_and_markup_is_not_escaped_twice(text: str) -> None:
    once = esc(text)
    assert esc(once) is once
    assert "<" not in once
    element = tag("p", text, data_x=text)
    assert element.count("<") == 2
    assert isinstance(element, Markup)


@given(st.integers(1, 300), st.integers(2, 12))
def test_a_spread_keeps_the_first_and_the_last(count: int, most: int) -> None:
    items = list(range(count))
    found = spread(items, most)
    assert found[0] == 0
    assert found[-1] == count - 1
    assert len(found) <= most or count <= most
    assert found == sorted(set(found))


def drawing(points: list[tuple[float, float]], **more: object) -> str:
    curve = Curve(label="a < b", points=points)
    chart = Chart(title="T", description="D", curves=[curve], y_label="y", **more)  # type: ignore[arg-type]
    return draw(chart)


@example([(5e-324, 0.0)], False, False)
@given(POINTS, st.booleans(), st.booleans())
def test_everything_is_drawn_inside_the_frame(
    points: list[tuple[float, float]], log: bool, from_zero: bool
) -> None:
    text = drawing(points, log=log, from_zero=from_zero)
    line = re.search(r'<polyline points="([^"]+)"', text)
    assert line
    for place in line[1].split():
        x, y = map(float, place.split(","))
        assert math.isfinite(x)
        assert math.isfinite(y)
        assert 0 <= x <= 480
        assert 0 <= y <= 230


def test_a_level_widens_the_frame_and_is_named() -> None:
    text = drawing([(0.0, 5.0), (10.0, 6.0)], levels=[Level(label="floor 1", value=1.0)])
    assert 'class="level"' in text
    assert "floor 1" in text
    assert "a &lt; b" in text
    assert "a < b" not in text


def test_a_chart_without_points_says_so() -> None:
    assert "Nothing was recorded." in drawing([])
