"""Bytecode is kept where Python keeps none, and nothing is changed where it does."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parents[3]
LOOK = """
import os, sys
from foundling.runtime import bytecode
bytecode.FEWEST_CORES = {fewest}
bytecode.keep_bytecode()
import torch.part
from importlib.util import cache_from_source
print(sys.pycache_prefix, sys.dont_write_bytecode, os.environ.get("PYTHONPYCACHEPREFIX"),
      "PYTHONDONTWRITEBYTECODE" in os.environ)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages with a torch whose bytecode is not there."""
    package = tmp_path / "site" / "torch"
    (package / "tests").mkdir(parents=True)
    (tmp_path / "site" / "torch-9.9.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n"
    (tmp_path / "site" / "torch-9.9.dist-info" / "METADATA").write_text(metadata)
    for name in ("__init__", "part", "never_imported", "tests/test_it"):
        (package / f"{name}.py").write_text("x = 1\n")
    return tmp_path / "site"


def look(site: Path, *, fewest: int = 1000, **changed: str | None) -> list[str]:
    """What a process sees after it has imported torch; cores below `fewest` are too few."""
    given = {"PYTHONPATH": f"{site}:{HERE}", "FOUNDLING_HOME": str(site.parent / "home")}
    wanted = {**os.environ, **given, "PYTHONDONTWRITEBYTECODE": "1", **changed}
    environ = {name: value for name, value in wanted.items() if value is not None}
    script = LOOK.format(fewest=fewest)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def kept(site: Path) -> set[str]:
    """Files of torch that have bytecode in our folder."""
    home = site.parent / "home" / "bytecode"
    return {f.name.partition(".")[0] for f in home.rglob("*.pyc") if site.name in f.parts}


def test_kept_in_a_folder_of_ours_and_not_beside_the_sources(site: Path) -> None:
    folder = str(site.parent / "home" / "bytecode")
    assert look(site) == [folder, "False", folder, "False"]
    assert kept(site) == {"__init__", "part"}
    assert not list(site.rglob("__pycache__"))


def test_the_first_process_has_it_made_ahead(site: Path) -> None:
    look(site, fewest=1)
    ends = time.monotonic() + 60
    while "never_imported" not in kept(site) and time.monotonic() < ends:
        time.sleep(0.05)
    assert kept(site) == {"__init__", "part", "never_imported"}
    for file in (site.parent / "home").rglob("never_imported*.pyc"):
        file.unlink()
    look(site, fewest=1)
    time.sleep(0.5)
    assert "never_imported" not in kept(site), "once, by the first"


def test_left_alone_where_python_keeps_it(site: Path) -> None:
    assert look(site, PYTHONDONTWRITEBYTECODE=None) == ["None", "False", "None", "False"]
    assert list(site.rglob("__pycache__"))
    assert look(site) == ["None", "True", "None", "True"], "it is there already"
    assert not kept(site)


def test_left_alone_where_the_user_says_where(site: Path) -> None:
    mine = str(site.parent / "mine")
    assert look(site, PYTHONPYCACHEPREFIX=mine) == [mine, "True", mine, "True"]


def test_left_alone_where_nothing_can_be_written(site: Path) -> None:
    (site.parent / "home").write_text("a file")
    assert look(site) == ["None", "True", "None", "True"]
