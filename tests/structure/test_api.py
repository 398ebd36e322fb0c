"""Nobody inside the package imports its Python API, which would tie every room to every other."""

import ast

import pytest

from tests.structure import shape


def imports_the_api(tree: ast.Module) -> bool:
    """Whether a file imports `foundling` itself, anywhere, or a name out of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(item.name == "foundling" for item in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "foundling":
            return True
        if isinstance(node, ast.ImportFrom) and node.level:  # `from .. import load`
            return True
    return False


def test_no_file_of_the_package_imports_the_api() -> None:
    assert not [module.name for module in shape.modules() if imports_the_api(module.tree)]


@pytest.mark.parametrize(
    "line",
    [
        "import foundling",
        "import foundling as f",
        "from foundling import load",
        "from .. import load",
    ],
)
def test_an_import_of_the_api_is_seen(line: str) -> None:
    assert imports_the_api(ast.parse(f"def room():\n    {line}\n"))
    assert not imports_the_api(ast.parse("from foundling.train.loop import train\n"))
