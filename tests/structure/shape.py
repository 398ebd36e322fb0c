"""How large the package is and how it is divided: the figures that `make shape` prints.

test_shape.py holds each to a limit. Statements and public names stand beside lines, so that joining
lines wins nothing.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "foundling"
SHORT, LONG = 60, 600


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    """Its path below the package, without .py: train/loop."""
    lines: int
    tree: ast.Module

    @property
    def room(self) -> str:
        """The folder directly below the package, or "" for the package's own files."""
        return self.name.partition("/")[0] if "/" in self.name else ""

    @property
    def is_init(self) -> bool:
        return Path(self.name).name == "__init__"


@cache
def modules(package: Path = PACKAGE) -> tuple[Module, ...]:
    """Every file of the package, parsed."""
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        name = str(path.relative_to(package).with_suffix(""))
        found.append(Module(name, len(text.splitlines()), ast.parse(text)))
    return tuple(found)


def figures(found: tuple[Module, ...]) -> dict[str, int]:
    """The counts that have a limit."""
    folders = modules_by_folder(found)
    return {
        "lines": sum(module.lines for module in found),
        "files": len(found),
        "logical statements": sum(statements(module) for module in found),
        "public names": sum(len(public_names(module)) for module in found),
        "modules in the fullest folder": max(folders.values(), default=0),
        "folders of fewer than 3 modules": sum(count < 3 for count in folders.values()),
        f"files under {SHORT} lines": len(short_files(found)),
        f"files over {LONG} lines": len(long_files(found)),
        "class names with two owners": len(repeated_classes(found)),
        "verbs": verb_count(),
        "settings": setting_count(),
        "modules that take the whole RunConfig outside its rooms": len(takers_of_config(found)),
        "private names of other packages": len(foreign_private_names(found)),
        "__init__ files that import": len(inits_that_import(found)),
        "first docstring lines of four words or fewer": len(thin_docstrings(found)),
        "pairs of siblings that import each other": len(sibling_cycles(found)),
    }


def modules_by_folder(found: tuple[Module, ...]) -> Counter[str]:
    """Modules in each folder below the package, `__init__` not counted."""
    return Counter(
        str(Path(module.name).parent)
        for module in found
        if not module.is_init and "/" in module.name
    )


def short_files(found: tuple[Module, ...]) -> list[str]:
    """Files so short that a reader opens them for little."""
    return [m.name for m in found if not m.is_init and m.lines < SHORT]


def long_files(found: tuple[Module, ...]) -> list[str]:
    """Files longer than a concept."""
    return [m.name for m in found if m.lines > LONG]


def statements(module: Module) -> int:
    """Statements, docstrings left out: splitting or joining lines does not change them."""
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(module.tree)
    )


def public_names(module: Module) -> list[str]:
    """Functions, classes and constants of a module, and public methods, that others may use."""
    names = []
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        if isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
        if isinstance(node, ast.ClassDef):
            names += [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
    return [name for name in names if not name.startswith("_")]


def repeated_classes(found: tuple[Module, ...]) -> dict[str, list[str]]:
    """Class names that more than one file defines at its top level."""
    owners: dict[str, list[str]] = {}
    for module in found:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name, []).append(module.name)
    return {name: files for name, files in owners.items() if len(files) > 1}


def verb_count() -> int:
    """What `foundling --help` lists."""
    from foundling.cli.main import VERBS

    return len(VERBS)


def setting_count() -> int:
    """Fields that a config file may hold."""
    from foundling.config.load import NAMES

    return sum(map(len, NAMES.values()))


TAKES_CONFIG = (
    "config/", "plan/", "doctor/", "bench/", "profiling/", "launch/", "cli/",
    "checkpoint/bundle", "report/", "__init__",
    "train/loop", "train/setup", "train/start_point", "train/autotune/present_machine",
    "runtime/run_reader",  # which reads config.yaml with the rest, and looks at none of it
)  # fmt: skip
"""Who may be given every setting at once; all others get a section or plain values."""


def takers_of_config(found: tuple[Module, ...]) -> list[str]:
    """Modules elsewhere with a parameter, field or result of the type RunConfig."""
    return [
        module.name
        for module in found
        if not module.name.startswith(TAKES_CONFIG)
        and any("RunConfig" in names_in(hint) for hint in annotations(module.tree))
    ]


def annotations(tree: ast.Module) -> Iterator[ast.expr]:
    """Every annotation of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.returns


def names_in(hint: ast.expr) -> set[str]:
    """Names of an annotation, those inside quotes too."""
    names = set()
    for node in ast.walk(hint):
        if isinstance(node, ast.Name):
            names.add(node.id)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {n.id for n in ast.walk(ast.parse(node.value)) if isinstance(n, ast.Name)}
    return names


def foreign_private_names(found: tuple[Module, ...]) -> dict[str, list[str]]:
    """Names with a leading underscore that belong to another package, and who uses them.

    `torch._dynamo` is known by its import; `parser._actions` by the package nowhere defining it.
    """
    ours = {name for module in found for name in _defined(module.tree)}
    used: dict[str, list[str]] = {}
    for module in found:
        for name in _private_in(module.tree, ours):
            used.setdefault(name, []).append(module.name)
    return used


def _defined(tree: ast.Module) -> set[str]:
    """Private names that a file gives to anything: functions, classes, variables, attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and isinstance(node.value, ast.Name) and node.value.id == "self":
            names.add(node.attr)
    return names


def _private_in(tree: ast.Module, ours: set[str]) -> set[str]:
    private = set()
    bound: dict[str, str] = {}  # what a name of this file stands for: torch, dist, ...
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                first = item.name.partition(".")[0]
                bound[item.asname or first] = item.name if item.asname else first
                if _is_private(item.name) and first != "foundling":
                    private.add(item.name)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for item in node.names:
                whole = f"{node.module}.{item.name}"
                bound[item.asname or item.name] = whole
                if _is_private(whole) and not whole.startswith("foundling"):
                    private.add(whole)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            whole = _dotted(node, bound)
            if whole and not whole.startswith("foundling"):
                private.add(whole)
            elif not whole and node.attr not in ours:
                private.add(f"(object).{node.attr}")
    return private


def _is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def _dotted(node: ast.Attribute, bound: dict[str, str]) -> str:
    parts, inner = [node.attr], node.value
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if not isinstance(inner, ast.Name) or inner.id not in bound:
        return ""
    return ".".join([bound[inner.id], *reversed(parts)])


def inits_that_import(found: tuple[Module, ...]) -> list[str]:
    """`__init__` files that give a name a second path; the package's own is its public API."""
    return [
        m.name
        for m in found
        if m.is_init
        and m.name != "__init__"
        and any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(m.tree))
    ]


def thin_docstrings(found: tuple[Module, ...]) -> list[str]:
    """Files whose first line says too little to be found by."""
    return [
        m.name
        for m in found
        if len((ast.get_docstring(m.tree) or "").partition("\n")[0].split()) <= 4
    ]


def sibling_cycles(found: tuple[Module, ...]) -> list[tuple[str, str]]:
    """Files of one folder that import each other, at module level, directly or through others."""
    known = {module.name for module in found}
    edges = {m.name: {n for n in imports(m.tree) if n in known} for m in found}
    cycles = []
    for module in found:
        folder = Path(module.name).parent
        reached, ahead = set(), [module.name]
        while ahead:
            for after in edges[ahead.pop()]:
                if after not in reached and Path(after).parent == folder:
                    reached.add(after)
                    ahead.append(after)
        if module.name in reached:
            cycles += [(module.name, other) for other in sorted(reached) if other > module.name]
    return cycles


def imports(tree: ast.Module) -> Iterator[str]:
    """Files of the package that a file imports when it is imported itself."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("foundling"):
            home = (node.module or "").replace(".", "/").removeprefix("foundling").lstrip("/")
            yield home
            for item in node.names:
                yield f"{home}/{item.name}".lstrip("/")


def main() -> None:
    """Print the figures, and the names behind those that name something."""
    found = modules()
    for name, value in figures(found).items():
        print(f"{value:>8,}  {name}")
    if "-v" in sys.argv:
        print("\nfolders:", dict(modules_by_folder(found).most_common()))
        print("\nshort:", short_files(found))
        print("\nlong:", long_files(found))
        print("\nclasses with two owners:", repeated_classes(found))
        print("\nRunConfig in:", takers_of_config(found))
        print("\nprivate names:", foreign_private_names(found))
        print("\n__init__ that import:", inits_that_import(found))
        print("\nthin docstrings:", thin_docstrings(found))
        print("\ncycles:", sibling_cycles(found))


if __name__ == "__main__":
    main()
