"""What the tests of several ranks share: worlds that are started once."""

from collections.abc import Iterator

import pytest
from worlds import World, worlds


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, World]]:
    """Worlds of one to four ranks. Who asks for them is in `TOGETHER` of tests/conftest.py, so that
    one process of the suite has them and not both."""
    with worlds((1, 2, 3, 4), tmp_path_factory.mktemp("worlds")) as found:
        yield found
