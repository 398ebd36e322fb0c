"""tests/chaos/armed kills a program it knows nothing of, where it is told to and once."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
from foundling.runtime import files
for number in range(3):
    print(number, flush=True)
    files.failpoint("write")
    files.failpoint("rename")
"""


def run(**orders: str) -> tuple[int, list[str]]:
    """Exit code and how far it came."""
    path = f"{Path(__file__).parent / 'armed'}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path, **orders},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout.split()


def test_a_program_dies_where_it_is_told_to_and_not_twice(tmp_path: Path) -> None:
    token = tmp_path / "died"
    orders = {"TEST_DIE_AT": "rename:2:rank1", "TEST_DIE_ONCE": str(token)}
    assert run(**orders, RANK="0") == (0, ["0", "1", "2"])
    assert not token.exists()
    assert run(**orders, RANK="1") == (-9, ["0", "1"])
    assert token.exists()
    assert run(**orders, RANK="1") == (0, ["0", "1", "2"])


def test_nothing_that_ships_can_be_armed_without_it() -> None:
    """The hook is one empty function, and nothing in the package replaces it or reads an order."""
    for path in (ROOT / "foundling").rglob("*.py"):
        text = path.read_text()
        assert "TEST_DIE" not in text, path
        is_home = path == ROOT / "foundling" / "runtime" / "files.py"
        assert is_home or not re.search(r"\.failpoint\s*=[^=]", text), path
