"""A sample of the damages of the full suite: each is noticed, and the one before is used."""

import random
from pathlib import Path

import pytest
from checkpoint_checks import DAMAGES, damage_template, expect_passed_over


@pytest.mark.parametrize("kind", DAMAGES)
def test_five_of_each_kind_of_damage(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = damage_template(tmp_path / "template")
    chance = random.Random(kind)
    for _ in range(5):
        expect_passed_over(kind, template, tmp_path / "folder", chance)
        assert "step-00000002" in capsys.readouterr().err, "the damaged one is named"
