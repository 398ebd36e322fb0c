"""The commands of README.md and docs/*.md: all are taken as they stand, and run in their order.

At the sizes and with the files of commands.py; what is left out there is only parsed. CI runs
README's first block and the documents whose commands are done in a second or two; `make test-full`
runs every document, each in a world of its own, after README's first block or what it leaves.
"""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foundling.cli import main
from foundling.cli.options import Options
from foundling.config.presets import find_preset
from foundling.config.run import RunConfig
from tests.shipped import commands as commands_module
from tests.shipped.commands import DOCUMENTS, LEFT_OUT, PLACES, ROOT, words_of

FIRST = "foundling chat work/tuned"
"""The last command of README's first block."""
QUICK = ["docs/checkpoints.md", "docs/tokenizer.md", "docs/trust.md"]
ALL = [(name, command) for name in DOCUMENTS for command in commands_module.commands(name)]


def run(folder: Path, commands: list[str]) -> None:
    """Each after those before it; a folder that a synopsis names is a new one each time."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FOUNDLING_HOME": str(folder / "home")}
    for number, command in enumerate(commands):
        if commands_module.why_not(command):
            continue
        words = [f"out{number}" if word == "out" else word for word in words_of(command)]
        done = subprocess.run(
            [sys.executable, *(["-m", "foundling"] if words[0] != "-m" else []), *words],
            cwd=folder,
            env=environment,
            input="Hello!\n",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{words}\n{done.stdout[-900:]}\n{done.stderr}"


@pytest.fixture
def world(home: Path, tiny: RunConfig, tmp_path: Path) -> Path:
    """Where a reader begins."""
    commands_module.make_world(tmp_path, home, tiny)
    return tmp_path


def test_the_documents_are_read() -> None:
    by_program = [command.split()[0] for _, command in ALL]
    assert by_program.count("foundling") > 70
    assert {"torchrun", "srun", "lm_eval"} <= set(by_program)
    text = "\n".join((ROOT / name).read_text() for name in DOCUMENTS)
    stale = [word for word in (*PLACES, *LEFT_OUT) if word not in text and word != "-o DIR"]
    assert [word for word in stale if not any(word in command for _, command in ALL)] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_is_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verb, options and settings are there, and settings fit the preset that is named."""
    from foundling.config.load import check_keys, load_config, unflatten

    taken = []

    def take(options: Options) -> None:
        taken.append(options)
        check_keys(unflatten(options.settings))
        if find_preset(str(getattr(options, "target", None))):
            load_config(options.target, options.settings)

    for verb in list(main.VERBS):
        monkeypatch.setitem(main.VERBS, verb, replace(main.VERBS[verb], run=take))
    ours = [c for _, c in ALL if _ == name and c.startswith(("foundling", "python"))]
    for command in ours:
        words = words_of(command)
        if words[0] == "-m":
            program = importlib.import_module(words[1]).PROGRAM
            main.run_one(words[1], replace(program, run=take), words[2:])
        else:
            main.run_verb(words)
    assert len(taken) == len(ours)


def test_the_readmes_own_words_work(world: Path) -> None:
    """The block under `Raise your own`, on a small book and a few conversations."""
    block = list(commands_module.commands("README.md"))
    run(world, block[: block.index(FIRST) + 1])
    assert (world / "work" / "run" / "report.html").is_file()
    assert (world / "work" / "tuned" / "run.json").is_file()


@pytest.mark.parametrize("name", QUICK)
def test_the_commands_of_a_short_document_run_in_order(name: str, world: Path, home: Path) -> None:
    commands_module.make_workshop(world, home)
    run(world, list(commands_module.commands(name)))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name not in QUICK])
def test_the_commands_of_a_document_run_in_order(name: str, world: Path, home: Path) -> None:
    commands_module.make_models(world, home)
    if name != "README.md":
        commands_module.make_workshop(world, home)
    run(world, list(commands_module.commands(name)))
