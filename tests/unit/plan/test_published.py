"""Other people's runs as plans: within 25% of what they published, or with the reason."""

import pytest

from tests.unit.plan.published import PUBLISHED, Published, predicted


@pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: one.name)
def test_published_figures_within_a_quarter(one: Published) -> None:
    speed, peak = predicted(one)
    off = abs(speed / one.tokens_per_s - 1)
    assert (off <= 0.25) == (not one.why_not), f"{speed:,.0f} against {one.tokens_per_s:,}"
    if one.peak_gb is not None:
        assert peak == pytest.approx(one.peak_gb, rel=0.25)


def test_the_median_is_much_better() -> None:
    """A tolerance of a quarter would hide a model that is always a fifth too fast."""
    speed = sorted(predicted(one)[0] / one.tokens_per_s - 1 for one in PUBLISHED)
    peak = sorted(predicted(one)[1] / one.peak_gb - 1 for one in PUBLISHED if one.peak_gb)
    assert abs(speed[len(speed) // 2]) < 0.05
    assert abs(peak[len(peak) // 2]) < 0.05
