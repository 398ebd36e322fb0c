"""The folder /benchmarks: what imports it, what it needs, and what its programs refuse."""

import ast
import re
from pathlib import Path

import pytest

from benchmarks import contender, data, ladder, train_hf, with_transformers
from foundling.cli.main import run_one
from foundling.config.errors import ConfigError, UserError
from tests.structure import shape

ROOT = Path(__file__).parents[3]
PROGRAMS = {"data": data.PROGRAM, "ladder": ladder.PROGRAM, "train_hf": train_hf.PROGRAM}


def imported(module: shape.Module) -> set[str]:
    """Packages that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    return found


def test_the_benchmarks_import_the_package_and_never_the_reverse() -> None:
    assert any("foundling" in imported(one) for one in shape.modules(ROOT / "benchmarks"))
    assert [one.name for one in shape.modules() if "benchmarks" in imported(one)] == []


def test_every_file_says_what_it_is() -> None:
    files = shape.modules(ROOT / "benchmarks")
    assert all(ast.get_docstring(one.tree) for one in files)
    assert shape.thin_docstrings(files) == []
    assert max(one.lines for one in files) <= 400


def test_the_requirements_name_what_is_measured() -> None:
    words = (ROOT / "benchmarks" / "requirements.txt").read_text()
    listed = set(re.findall(r"^([\w-]+)", words, re.MULTILINE))
    others = [contender.contender(name) for name in contender.CONTENDERS if name != "foundling"]
    needed = {need.partition(".")[0] for who in others for need in who.NEEDS}
    assert {*needed, "transformers", "liger-kernel"} == listed
    for who in others:
        assert who.SETTINGS
        assert all(callable(getattr(who, task)) for task in ("prepare", "repeat", "open"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(name, "--help")
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: python -m benchmarks.{name} ")
    assert f"python -m benchmarks.{name} " in (ROOT / "benchmarks" / "README.md").read_text()


def run(name: str, *words: str) -> None:
    run_one(f"benchmarks.{name}", PROGRAMS[name], words)


DEBUG = "clm-debug"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("data", "--only", "grian"), "grian; there are foundling, datasets map"),
        (("data", "--train.horizon", "3"), "`python -m benchmarks.data` takes no settings"),
        (("ladder", DEBUG, "--only", "1,9"), "--only 9 is unknown here; there are 1, 2, 3, 4, 5"),
        (("ladder", DEBUG, "--limit-gb", "80"), "--limit-gb caps a GPU's memory and there is none"),
        (("ladder", DEBUG, "--train.float8", "rowwise"), "--train.float8 has no effect on a la"),
        (("ladder", DEBUG, "--optim.name", "muon"), "--optim.name has no effect on a ladder"),
        (("ladder", DEBUG, "--parallel.recompute", "all"), "--parallel.recompute has no effect"),
        (("train_hf", DEBUG, "--compare", ","), "--compare names nobody"),
        (("train_hf", DEBUG, "--compare", "hf,hf"), "--compare names somebody twice"),
        (("train_hf", DEBUG, "--compare", "jax"), "--compare jax is unknown"),
        (("train_hf", DEBUG, "--compare", "hf-bf16"), "hf-bf16 needs train.dtype bf16"),
        (("train_hf", DEBUG, "--model.qk-norm", "true"), r"Llama, and model\.qk_norm"),
        (("train_hf", DEBUG, "--check-steps", "0", "--tolerance", "1"), "--tolerance has no eff"),
    ],
)
def test_a_mistake_is_named_before_anything_is_built(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    for room in ("foundling.bench.train.StepRunner", "benchmarks.ladder.run_child"):
        monkeypatch.setattr(room, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        run(*words, *(("--train.device", "cpu") if words[1] == DEBUG else ()))
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_transformers_that_is_missing_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_transformers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"hf needs transformers; install benchmarks/requirem"):
        run("train_hf", DEBUG, "--train.device", "cpu")
