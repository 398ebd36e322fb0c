"""What many tests share: a small built village, and a config that trains on it in a second."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foundling.config.load import load_config
from foundling.config.run import RunConfig
from tests.quick import measure_peak_once, stay_frozen
from tests.village import TINY, Village, build_village

# Threads that wait for one another must not keep the cores from the other workers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
gc.disable()  # until everything is imported: nothing of that is garbage

TOGETHER = {
    "test_data_ranks.py": "worlds",
    "test_engine_ranks.py": "worlds",
    "test_task_ranks.py": "worlds",
    "test_layout_matrix.py": "worlds",
    "test_optim_ranks.py": "worlds",
    "test_vocab_loss_ranks.py": "worlds",
    "test_manager_ranks.py": "ranks that save",
    "test_launcher_ends.py": "launchers",
    "test_verbs.py": "a demo",
    "test_server.py": "servers",
    "test_server_docs.py": "servers",
    "test_server_fuzz.py": "servers",
    "test_server_ends.py": "servers",
    "test_server_guards.py": "servers",
    "test_server_hostile.py": "servers",
    "test_server_lm_eval.py": "servers",
    "test_server_page.py": "servers",
    "test_watchdog.py": "a watched run",
    "test_page_chat.py": "a browser",
    "test_page_conversations.py": "a browser",
    "test_page_looks.py": "a browser",
    "test_page_models.py": "a browser",
    "test_page_source.py": "a browser",
}
"""Files whose fixtures cost seconds: the tests of one name run in one process of the suite."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist load`, but for `TOGETHER`. (xdist's own groups do nothing under pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER.get(Path(nodeid.partition("::")[0]).name, nodeid)

    return Together(config, log)


def pytest_collection_finish() -> None:
    """Imports are over."""
    gc.collect()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def quick_garbage() -> Iterator[None]:
    """Modules and tests are no garbage."""
    with pytest.MonkeyPatch.context() as patch:
        stay_frozen(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was measured on this machine before decides no test, and none leaves any."""
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent  # one for all workers, so that each thing is measured once
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOUNDLING_HOME", str(folder / "foundling-home"))
        yield


@pytest.fixture(scope="session")
def village(tmp_path_factory: pytest.TempPathFactory) -> Village:
    """Hamlet, small, built once a process."""
    return build_village(tmp_path_factory.mktemp("village"))


@pytest.fixture(scope="session")
def village_config(village: Village) -> Iterator[RunConfig]:
    """A pretraining run of eight steps."""
    config = load_config("hamlet", TINY)
    with pytest.MonkeyPatch.context() as patch:
        measure_peak_once(patch)
        yield config.replace(data={"sources": {str(village.text): 1.0}})


@pytest.fixture
def tiny(village_config: RunConfig) -> RunConfig:
    """The same, for one test."""
    return village_config
