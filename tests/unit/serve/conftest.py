"""Servers of tiny trained models, which the tests of a process share."""

from collections.abc import Iterator

import pytest

from tests.quick import measure_peak_once
from tests.serving import Family, Running, raise_family, served
from tests.village import Village

KEY = "a-key-of-the-tests-0123456789"


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory, village: Village) -> Family:
    """Trained once."""
    with pytest.MonkeyPatch.context() as patch:
        measure_peak_once(patch)
        return raise_family(tmp_path_factory.mktemp("family"), village)


@pytest.fixture(scope="session")
def server(family: Family) -> Iterator[Running]:
    """Of a model that chats and one that does not."""
    with served(family.chat, family.base) as running:
        yield running


@pytest.fixture(scope="session")
def guarded(family: Family) -> Iterator[Running]:
    """With keys, a model that calls tools, and small limits."""
    options = ("--max-waiting", "4", "--max-body-mb", "0.1", "--timeout", "20")
    options += ("--max-length", "600")
    options += ("--allow-origin", "https://page.example", "--allow-host", "models.example")
    with served(family.tools, options=options, env={"FOUNDLING_API_KEYS": KEY}) as running:
        yield running
