"""Fixtures of the data room's tests."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from unique_data import write_data

from foundling.data.dataset import DataSet

MakeData = Callable[..., DataSet]


@pytest.fixture
def make_data(tmp_path: Path) -> MakeData:
    """write_data into a fresh folder each time."""
    made = 0

    def make(train: Sequence[Sequence[int]], **options: object) -> DataSet:
        nonlocal made
        made += 1
        return write_data(tmp_path / str(made), train, **options)  # type: ignore[arg-type]

    return make
