"""The package keeps its shape: each figure of `make shape` has a limit.

A limit is what the package has today; work that brings a figure down lowers its limit with it.
"""

import ast
from pathlib import Path

import pytest

from tests.structure import shape

LIMITS = {
    "lines": 66_300,
    "files": 294,
    "logical statements": 34_950,
    "public names": 3_620,
    "modules in the fullest folder": 14,
    "folders of fewer than 3 modules": 0,
    "files under 60 lines": 6,
    "files over 600 lines": 0,
    "class names with two owners": 0,
    "verbs": 31,
    "settings": 97,
    "modules that take the whole RunConfig outside its rooms": 0,
    "private names of other packages": 37,
    "__init__ files that import": 0,
    "first docstring lines of four words or fewer": 0,
    "pairs of siblings that import each other": 0,
}


@pytest.fixture(scope="module")
def today() -> dict[str, int]:
    return shape.figures(shape.modules())


@pytest.mark.parametrize("name", LIMITS)
def test_a_figure_stays_within_its_limit(name: str, today: dict[str, int]) -> None:
    assert today[name] <= LIMITS[name], f"see `make shape`; {name} may be {LIMITS[name]:,} at most"


def test_every_figure_has_a_limit(today: dict[str, int]) -> None:
    assert set(today) == set(LIMITS)


def _planted(tmp_path: Path, files: dict[str, str]) -> tuple[shape.Module, ...]:
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return shape.modules(tmp_path)


HEAD = '"""A file of the package that says what it is for."""\n'
PLANTED = {
    "modules in the fullest folder": {f"room/m{n}": HEAD for n in range(17)},
    "folders of fewer than 3 modules": {"room/alone": HEAD},
    "files under 60 lines": {"room/stub": HEAD},
    "files over 600 lines": {"room/long": HEAD + "x = 1\n" * 600},
    "class names with two owners": {
        "room/one": HEAD + "class Row: ...\n",
        "other/two": HEAD + "class Row: ...\n",
    },
    "modules that take the whole RunConfig outside its rooms": {
        "data/build": HEAD + "def build(config: 'RunConfig | None') -> None: ...\n"
    },
    "private names of other packages": {
        "room/inner": HEAD + "import torch\ntorch._C._nothing()\n",
        "room/parser": HEAD + "def flags(parser):\n    return parser._actions\n",
    },
    "__init__ files that import": {"room/__init__": HEAD + "from foundling.room.a import b\n"},
    "first docstring lines of four words or fewer": {"room/terse": '"""What we need."""\n'},
    "pairs of siblings that import each other": {
        "room/a": HEAD + "from foundling.room.b import x\n",
        "room/b": HEAD + "from foundling.room import c\n",
        "room/c": HEAD + "from foundling.room.a import y\n",
    },
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_breaks_a_rule_is_counted(name: str, tmp_path: Path) -> None:
    found = _planted(tmp_path, PLANTED[name])
    least = {"modules in the fullest folder": 17, "private names of other packages": 2}
    assert shape.figures(found)[name] >= least.get(name, 1)


def test_joined_lines_count_as_the_statements_they_are() -> None:
    apart = shape.Module("a", 3, ast.parse("x = 1\ny = 2\nz = 3\n"))
    joined = shape.Module("a", 1, ast.parse("x = 1; y = 2; z = 3\n"))
    assert shape.statements(apart) == shape.statements(joined) == 3
