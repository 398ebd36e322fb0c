"""Guard settings that cannot work, or would have no effect, are refused by name."""

import pytest

from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.config.run import GuardConfig

LEAST = {"nonfinite": 1}


@pytest.mark.parametrize("name", GuardConfig.model_fields)
def test_a_value_out_of_range_is_named(name: str) -> None:
    for value in (LEAST.get(name, 0) - 1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=rf"^guard\.{name} (must be|cannot be|is at least)"):
            GuardConfig(**{name: value})


def test_it_is_a_section_like_the_others() -> None:
    config = load_config("hamlet", {"guard.spike-loss": "7.5", "guard.hang-s": "30"})
    assert (config.guard.spike_loss, config.guard.hang_s) == (7.5, 30.0)
    with pytest.raises(ConfigError, match=r"guard\.nonfinite"):
        load_config("hamlet", {"guard.nonfinite": "0"})
