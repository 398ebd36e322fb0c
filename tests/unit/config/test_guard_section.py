"""Guard settings that cannot work, or would have no effect, are refused by name."""

import pytest

from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.config.run import GuardConfig

LEAST = {"window": 8, "nonfinite": 1, "limit_steps": 1}


@pytest.mark.parametrize("name", GuardConfig.model_fields)
def test_a_value_out_of_range_is_named(name: str) -> None:
    for value in (LEAST.get(name, 0) - 1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=rf"^guard\.{name} (must be|cannot be|is at least)"):
            GuardConfig(**{name: value})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hang_s": 700.0, "hang_slow_s": 600.0}, "guard.hang_slow_s is 600"),
        ({"spike_loss": 0, "spike_norm": 0, "window": 64}, "guard.window has no effect"),
        ({"limit": 0, "limit_steps": 5}, "guard.limit_steps has no effect"),
        ({"hang_s": 0, "hang_slow_s": 900.0}, "guard.hang_slow_s has no effect"),
    ],
)
def test_what_contradicts_itself_is_named(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        GuardConfig(**settings)  # type: ignore[arg-type]


def test_it_is_a_section_like_the_others() -> None:
    config = load_config("hamlet", {"guard.spike-loss": "7.5", "guard.hang-s": "30"})
    assert (config.guard.spike_loss, config.guard.hang_s) == (7.5, 30.0)
    with pytest.raises(ConfigError, match=r"guard\.nonfinite"):
        load_config("hamlet", {"guard.nonfinite": "0"})
