"""Bytecode is kept where Python keeps none, and nothing is changed where it does."""

import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from foundling.runtime import bytecode

HERE = Path(__file__).parents[3]
LOOK = """
import os, sys
before = dict(os.environ, OMP_WAIT_POLICY="PASSIVE")
from foundling import cli
from foundling.runtime import bytecode
bytecode.PACKAGES = ("torch",)
for name, value in {changed}.items():
    setattr(bytecode, name, value)
sys.argv = ["foundling"]
try:
    cli.main()
except SystemExit:
    pass
import torch.part
assert bytecode.elsewhere(os.environ) == before
print("END", sys.pycache_prefix, sys.dont_write_bytecode,
      os.environ.get("PYTHONPYCACHEPREFIX"), "PYTHONDONTWRITEBYTECODE" in os.environ)
"""
UNCHANGED = ["None", "True", "None", "True"]


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


def look(site: Path, around: dict[str, str | None] | None = None, **changed: int) -> list[str]:
    """What `foundling` leaves behind for the imports after it, with another environment and with
    values of the module changed."""
    given = {"PYTHONPATH": f"{site}:{HERE}", "FOUNDLING_HOME": str(site.parent / "home")}
    usual = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": None}
    wanted = {**os.environ, **given, **usual, **(around or {})}
    script = LOOK.format(changed={"FEWEST_CORES": 1000, **changed})
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={name: value for name, value in wanted.items() if value is not None},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    return done.stdout.partition("END ")[2].split()


def kept(site: Path) -> set[str]:
    """Files of torch that have bytecode in our folder."""
    found = (site.parent / "home").rglob("*.pyc")
    return {file.name.partition(".")[0] for file in found if str(site) in str(file)}


def test_kept_in_a_folder_of_ours_and_not_beside_the_sources(site: Path) -> None:
    place, may_not, told, is_forbidden = look(site)
    assert place == told
    assert Path(place).parent == site.parent / "home" / "bytecode"
    assert "-torch-9.9-" in place
    assert (may_not, is_forbidden) == ("False", "False")
    assert kept(site) == {"__init__", "part"}
    assert not list(site.rglob("__pycache__"))


def test_the_first_process_has_it_made_ahead(site: Path) -> None:
    look(site, FEWEST_CORES=1)
    ends = time.monotonic() + 60
    while "never_imported" not in kept(site) and time.monotonic() < ends:
        time.sleep(0.05)
    assert kept(site) == {"__init__", "part", "never_imported"}, "and no tests"
    for file in (site.parent / "home").rglob("never_imported*.pyc"):
        file.unlink()
    look(site, FEWEST_CORES=1)
    time.sleep(0.5)
    assert "never_imported" not in kept(site), "once, by the first"


def test_left_alone_where_python_keeps_it(site: Path) -> None:
    may_write: dict[str, str | None] = {"PYTHONDONTWRITEBYTECODE": None}
    assert look(site, may_write) == ["None", "False", "None", "False"]
    assert list(site.rglob("__pycache__"))
    assert look(site) == UNCHANGED, "it is there already"
    assert not kept(site)


def test_left_alone_where_the_user_says_where(site: Path) -> None:
    mine = str(site.parent / "mine")
    assert look(site, {"PYTHONPYCACHEPREFIX": mine}) == [mine, "True", mine, "True"]


def test_left_alone_where_nothing_can_be_kept(site: Path) -> None:
    assert look(site, LEAST_ROOM=10**30) == UNCHANGED, "a full disk"
    folder = Path(look(site)[0])
    folder.rename(folder.with_name("away"))
    folder.write_text("a file")
    assert look(site) == UNCHANGED
    (site.parent / "other").write_text("a file")
    assert look(site, {"FOUNDLING_HOME": str(site.parent / "other")}) == UNCHANGED


@pytest.mark.parametrize("error", [PackageNotFoundError("torch"), RuntimeError("no home")])
def test_nothing_that_stands_in_the_way_is_an_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(torch: object) -> Path:
        raise error

    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(bytecode, "_is_missing", lambda torch: True)
    monkeypatch.setattr(bytecode, "_folder_of", refuse)
    bytecode.keep_bytecode()
    assert sys.pycache_prefix is None
