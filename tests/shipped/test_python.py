"""The Python API: ten names, nothing loaded by the import, and the example of docs/python.md."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import foundling
from foundling.config.errors import ConfigError, RunError, UserError
from foundling.config.run import RunConfig
from foundling.data.open_source import training_texts
from tests.village import Village

GUIDE = Path(__file__).parents[2] / "docs" / "python.md"
NAMES = [
    "RunConfig", "__version__", "build_data", "convert", "evaluate",
    "load", "load_config", "plan", "read_run", "train",
]  # fmt: skip


def test_ten_names_are_public_and_each_is_documented() -> None:
    assert foundling.__all__ == dir(foundling) == NAMES
    for name in NAMES:
        assert name == "__version__" or getattr(foundling, name).__doc__
        assert f"`{name}" in GUIDE.read_text()
    with pytest.raises(AttributeError, match="score"):
        foundling.score  # noqa: B018


def test_the_import_loads_neither_torch_nor_a_room() -> None:
    code = (
        "import sys, foundling\n"
        "print(*[m for m in sys.modules if m == 'torch' or m.startswith('foundling.')])\n"
        "foundling.RunConfig, foundling.__version__, foundling.load_config('hamlet')\n"
        "foundling.plan('hamlet')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["", "False"], done.stderr


def test_a_folder_does_not_take_the_place_of_the_function_of_its_name() -> None:
    from foundling.plan import resolve
    from foundling.train import loop

    assert callable(foundling.train)
    assert callable(foundling.plan)
    assert (resolve.__name__, loop.__name__) == ("foundling.plan.resolve", "foundling.train.loop")


def test_the_example_of_the_guide_runs(
    village: Village,
    tiny: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(village.tokenizer, "work/tokenizer")
    example = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(example) == 1
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(example[0], str(GUIDE), "exec"), names)
    assert "finished" in capsys.readouterr().out
    run, model = foundling.read_run("runs/first"), foundling.load("runs/first", device="cpu")
    assert run.steps == len(run.metrics["loss"]) == 6
    once = [model.generate("Osbert lives at", max_tokens=4, seed=2) for _ in range(2)]
    assert once[0] == once[1]
    assert len(once[0]) == 1
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        model.generate("Osbert", max_tokens=0)
    with pytest.raises(ConfigError, match="rows of 64"):
        model.chat([{"role": "user", "content": "Where does Osbert live? " * 40}])
    compared = foundling.convert("runs/first", "torch", "first.pt")
    assert compared.agrees
    assert Path("first.pt").is_file()


def test_the_example_of_the_docstring_runs(
    village: Village,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(village.tokenizer, "work/tokenizer")
    texts = training_texts(["hamlet"], max_bytes=10_000)
    Path("books.txt").write_text("\n\n".join(texts))
    lines = re.findall(r"^    ( *\S.*)$", foundling.__doc__ or "", re.M)
    assert lines[0] == "import foundling"
    exec("\n".join(lines), {})
    said = capsys.readouterr().out
    assert "horizon  1 epoch: " in said
    assert foundling.read_run("runs/a").status == "finished"
    assert said.splitlines()[-1].startswith("[")


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda: foundling.load_config("hamlte"), ConfigError, "hamlet"),
        (lambda: foundling.load_config("hamlet", train={"stepz": 3}), ConfigError, "train.horizon"),
        (lambda: foundling.load_config("hamlet", train=3), ConfigError, "train={...}"),
        (lambda: foundling.train("hamlet", "x"), UserError, "data.sources"),
        (
            lambda: foundling.train(RunConfig(), "x", train={"horizon": 3}),
            ConfigError,
            "load_config",
        ),
        (lambda: foundling.plan("hamlet", price=3), ConfigError, "--gpu"),
        (lambda: foundling.plan("hamlet", optim={"name": "sgd"}), ConfigError, "sgd"),
        (lambda: foundling.evaluate("nowhere", "cor"), UserError, "did you mean core"),
        (lambda: foundling.evaluate("nowhere", "bpb"), UserError, "nowhere"),
        (lambda: foundling.build_data("hamlet", "x", "nowhere"), ConfigError, "--tokens"),
        (lambda: foundling.build_data("a.txt", "x"), ConfigError, "--tokenizer"),
        (lambda: foundling.convert("nowhere", "gguf", "x"), ConfigError, "native, hf"),
        (lambda: foundling.load("nowhere"), RunError, "nowhere"),
        (lambda: foundling.read_run("nowhere"), RunError, "nowhere"),
    ],
)
def test_a_mistake_raises_the_sentence_of_the_command_line(
    call: object,
    error: type[Exception],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=re.escape(named)):
        call()  # type: ignore[operator]
    assert not list(tmp_path.iterdir())
