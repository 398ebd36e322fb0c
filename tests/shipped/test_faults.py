"""The list of planted faults stays true: each edit still has its place, each is in the docs."""

from pathlib import Path

import pytest

from tests.full.faults import FAULTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_can_be_planted(fault: object) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1  # type: ignore[attr-defined]
    for test in fault.tests:  # type: ignore[attr-defined]
        assert (ROOT / test).exists()
    assert fault.name in (ROOT / "docs" / "faults.md").read_text()  # type: ignore[attr-defined]


def test_there_are_twenty_and_every_promise_is_among_them() -> None:
    assert len(FAULTS) >= 20
    for number in range(1, 8):
        assert any(fault.about.startswith(f"promise {number}:") for fault in FAULTS)
