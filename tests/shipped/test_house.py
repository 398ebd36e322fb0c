"""The house stands as the plan says: instant verbs, rooms without torch, short files, few needs."""

import ast
import io
import json
import os
import re
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest

from foundling.cli.main import VERBS, main, run_verb
from foundling.config.presets import PRESETS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "foundling"
NO_TORCH = (
    "config", "hamlet", "plan", "tokenizer", "tasks", "launch", "report", "cli", "runtime",
    "data", "data/build", "data/readers", "data/hub",
)  # fmt: skip
"""Folders whose files load no torch, but for those of `NEED_TORCH`."""
NEED_TORCH = ("runtime/device", "runtime/dist")


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "foundling", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has its imports behind it."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["foundling", *arguments])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit) as end:
            main()
    return subprocess.CompletedProcess(arguments, end.value.code, out.getvalue(), err.getvalue())


BY_A_PROCESS = (
    ["trian"],
    ["plan", "hamlet", "--jsno"],
    ["train", "hamlet"],
    ["train", "hamlet", "--nproc", "2"],
    ["train", "hamlet", "--detach"],
    ["data", "verify", "nowhere"],
    ["runs", "show", "nowhere"],
    ["generate", "nowhere", "x", "--device", "gpu"],
)


@pytest.mark.parametrize("room", NO_TORCH)
def test_a_room_without_torch_loads_none(room: str) -> None:
    paths = sorted((PACKAGE / room).glob("*.py"))
    files = [path.relative_to(PACKAGE).with_suffix("").as_posix() for path in paths]
    names = ["foundling." + file.replace("/", ".") for file in files if file not in NEED_TORCH]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["plan", "llama3-8b"]])
def test_help_and_plan_are_instant_and_torch_free(words: list[str]) -> None:
    code = (
        "import sys, time; began = time.process_time()\n"
        f"sys.argv = ['foundling', *{words!r}]\n"
        "from foundling.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "print('TORCH' if 'torch' in sys.modules else 'NONE', time.process_time() - began)"
    )
    best = float("inf")
    for _ in range(8):  # the machine may be busy; the best of a few is the command's own time
        if best < 0.5:
            break
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        loaded, seconds = done.stdout.splitlines()[-1].split()
        assert loaded == "NONE"
        best = min(best, float(seconds))
    assert best < 0.5


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_plans(name: str) -> None:
    done = run("plan", name, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["params"]["all"] > 0


@pytest.mark.parametrize("words", [["help", "train"], ["--help", "train"], ["train", "--help"]])
def test_help_of_a_verb_is_its_own(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_verb(words)
    assert not end.value.code
    said = capsys.readouterr().out
    assert said.startswith("usage: foundling train")
    assert "(defaults are of no preset; `foundling plan PRESET -o FILE` shows a preset's):" in said


@pytest.mark.parametrize("words", [[], ["--help"], ["-h", "help"]])
def test_the_list_of_verbs_fits_the_screen(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_verb(words)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "`foundling train --help` lists presets and settings" in lines[-1]


def test_every_verbs_help_fits_two_screens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for name, verb in VERBS.items():
        for more in (["all"], []) if verb.takes_settings else ([],):
            with pytest.raises(SystemExit) as end:
                run_verb([*name.split(), "--help", *more])
            assert not end.value.code
            said = capsys.readouterr().out
            assert verb.help in said
            assert ("--model.rope-theta" in said) == bool(more)
        assert ("--optim.lr " in said) == (f"`foundling {name} --help all`" in said)
        # A longer line takes a second one of the screen.
        assert sum(-(-len(line) // 100) or 1 for line in said.splitlines()) <= 96, name


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["trian"], "train"),
        (["data"], "data build"),
        (["plan", "hamlte"], "hamlet"),
        (["plan", "hamlet", "--train.horizn", "3"], "train.horizon"),
        (["plan", "hamlet", "--train.horizon"], "needs a value"),
        (["plan", "hamlet", "--jsno"], "--jsno"),
        (["eval", "nowhere"], "nowhere"),
        (["eval", "nowhere", "cor"], "did you mean core"),
        (["eval", "nowhere", "core", "--bundle", "file.txt"], "no evaluation bundle"),
        (["eval", "nowhere", "gsm8k=missing.jsonl"], "missing.jsonl"),
        (["eval", "nowhere", "mine", "--task-file", "file.txt"], "file.txt"),
        (["eval", "nowhere", "list", "--json"], "--json has no effect on the list of tasks"),
        (["eval", "nowhere", "--limit", "3"], "--limit has no effect without a list of tasks"),
        (["eval", "nowhere", "knowledge"], "nowhere"),
        (["data", "verify", "nowhere", "--against", "spelling"], "nowhere"),
        (
            ["data", "verify", "nowhere", "--bundle", "x"],
            "--bundle has no effect without --against",
        ),
        (
            ["data", "verify", "file.txt", "--against", "spelling", "--source", "x"],
            "not a built data set",
        ),
        (["compare", "nowhere"], "nowhere is one"),
        (["compare", "nowhere", "a", "b"], "nowhere is no run directory"),
        (["runs", "show", "nowhere"], "nowhere"),
        (["runs", "list", "nowhere"], "nowhere"),
        (["chat", "nowhere", "--train.horizon", "3"], "takes no settings"),
        (["train", "hamlet"], "data.sources"),
        (["train", "hamlet", "--run", "file.txt", "--data.sources", "x"], "is a file"),
        (["train", "hamlet", "--data.sources", "nowhere"], "nowhere"),
        (["data", "inspect", "nowhere"], "nowhere"),
        (["data", "verify", "nowhere"], "nowhere"),
        (["data", "inspect", "nowhere", "--stats"], "nowhere"),
        (["data", "inspect", "nowhere", "--stats", "--first", "0"], "--first has no effect"),
        (["data", "inspect", "nowhere", "--json"], "--json has no effect without --stats"),
        (["data", "inspect", "file.txt", "--tokenizer", "nowhere"], "nowhere"),
        (["bench", "train", "hamlet", "--batch", "some"], "--batch"),
        (["bench", "train", "clm-debug", "--against", "nowhere.json"], "nowhere.json"),
        (["bench", "train", "clm-debug", "--profile", "--parallel.shard", "2"], "--layouts all"),
        (["bench", "parallel", "clm-debug"], "unknown verb bench parallel; "),
        (["tokenizer", "inspect", "nowhere", "--encode", "text"], "nowhere"),
        (["data", "build", "nowhere.txt", "--tokenizer", "nowhere", "-o", "x"], "nowhere"),
        (["plan", "hamlet", "--train.seq-len="], "train.seq_len"),
        (["plan", "hamlet", "--train.horizon", "10Q tokens"], "20B"),
        (["plan", "hamlet", "--train.seq-len", "64", "--train.seq_len", "64"], "twice"),
        (["plan", "hamlet", "--lr", "3"], "--optim.lr"),
        (["plan", "hamlet", "--data.sources", '{"x": 0}'], "positive"),
        (["plan", "hamlet", "--parallel.replicate", "-1"], "parallel.replicate"),
        (["plan", "null.yaml"], "train.horizon has no value"),
        (["plan", "twice.yaml"], "twice"),
        (["plan", "tabs.yaml"], "line 2"),
        (["plan", "keys.yaml"], "a key must be a word"),
        (["plan", "preset.yaml"], "preset"),
        (["plan", "hamlet", "-o", "file.txt"], "file.txt"),
        (["config", "hamlet"], "unknown verb config; "),
        (["plan", "hamlet", "-o", "file.txt/x.yaml"], "file.txt"),
        (["train", "hamlet", "--dev", "0", "--data.sources", "x"], "--dev"),
        (["generate", "nowhere", "x", "--device", "gpu"], "--device"),
        (["generate", "nowhere", "x", "--max-tokens", "0"], "above zero"),
        (["tokenizer", "train", "empty.txt", "-o", "x"], "empty.txt holds no text"),
        (["data", "build", "file.txt", "--tokenizer", "x", "-o", "y", "--val-share", "2"], "2"),
        (["report", "nowhere"], "does not exist"),
        (["train"], "--from RUN@STEP"),
        (["train", "--from", "nowhere"], "names no step"),
        (["train", "--from", "nowhere@3"], "nowhere"),
        (["train", "hamlet", "--nproc", "2"], "data.sources"),
        (["train", "hamlet", "--detach"], "data.sources"),
        (["runs", "logs", "nowhere", "--follow"], "nowhere does not exist"),
        (["runs", "stop", "nowhere"], "nowhere"),
        (["runs", "logs", "nowhere"], "nowhere does not exist"),
        (["runs", "rm", "nowhere"], "nowhere"),
        (["runs", "rm", "--restore", "nowhere"], "not in the trash"),
        (["runs", "copy", "nowhere", "there"], "both on this machine"),
        (["runs", "copy", "nowhere", "host:x"], "nowhere"),
        (["runs", "compare", "a", "b"], "unknown verb runs compare; "),
        (["launch"], "launch slurm"),
        (["runs", "attach", "a"], "unknown verb runs attach; there are runs list, runs show"),
        (["runs", "tree"], "unknown verb runs tree; "),
        (["runs", "lits", "a"], "unknown verb runs lits; did you mean `foundling runs list`?"),
        (["checkpoint", "verify", "a"], "or `foundling runs verify`?"),
        (["hamlet"], "hamlet is a preset, not a verb; try `foundling train hamlet` or"),
        (["plan", "depth-100"], "depth-100 is no preset; depth-N goes up to 99."),
        (["plan", "folder"], "folder is a data set; TARGET is a preset, YAML file or run"),
        (["plan", "tok"], "tok is a tokenizer; TARGET is"),
        (["plan", "step-3"], "step-3 is a checkpoint; TARGET is"),
        (["plan", "hamlet", "--train.horizon", "1", "epoch"], '--train.horizon "1 epoch".'),
        (["plan", "hamlet", "--model.dim="], "model.dim is empty; give a whole number"),
        (["train", "hamlet", "--run", ""], "--run is empty"),
        (["convert", "x", "--to", "gguf", "-o", "y"], "--to must be one of native, hf, llama"),
        (["generate", "x"], "foundling generate needs PROMPT; see `foundling generate --help`"),
        (["tokenizer", "inspect", "nowhere"], "hf://openai-community/gpt2"),
        (["tokenizer", "inspect", "file.txt"], "file.txt is no tokenizer file; give the folder"),
        (["plan", "hamlet", "--optim.betas", "0.9"], "must be 2 numbers such as 0.9,0.95, not"),
        (["plan", "hamlet", "--optim.betas", "1,2,3"], "must be 2 numbers such as 0.9,0.95, not"),
        (
            ["plan", "hamlet", "--data.sources", "work/data,work/chat"],
            "written as --data.sources '{work/data: 1, work/chat: 1}'.",
        ),
        (["plan", "hamlet", "--data.sources", "{a/b 1}"], "a colon and a blank: {a/b: 1}."),
        (["plan", "hamlet", "--data.sources", "{a/b:1}"], "a colon and a blank: {a/b: 1}."),
        (["plan", "hamlet", "--train.kernels.attn", "x"], "did you mean train.kernels.attention?"),
        (["plan", "hamlet", "--data", "x"], "it is --data.sources here"),
        (["plan", "hamlet", "--no_compile", "true"], "write train.compile off"),
        (["trian"], "unknown verb trian; did you mean `foundling train`?"),
        (["launch", "slurm", "hamlet", "--nodes", "2"], "--time"),
        (["launch", "slurm"], "needs TARGET and --nodes and --time too"),
        (["launch", "profiles"], "unknown verb launch profiles; there are launch slurm."),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file.txt").write_text("a file")
    for name in ("folder/manifest.json", "step-3/manifest.json", "tok/tokenizer.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "null.yaml").write_text("train:\n  horizon:\n")
    (tmp_path / "twice.yaml").write_text("train: {seq-len: 3, seq_len: 4}\n")
    (tmp_path / "tabs.yaml").write_text("train:\n\thorizon: 3\n")
    (tmp_path / "keys.yaml").write_text("[a, b]: 3\n")
    (tmp_path / "preset.yaml").write_text("preset: [a]\n")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.chdir(tmp_path)
    done = run(*words, cwd=tmp_path) if words in BY_A_PROCESS else run_here(*words)
    assert sorted(tmp_path.rglob("*")) == before, "a refused command left something behind"
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    # On a busy machine it may have said before that it takes a while.
    lasts = tuple(f"{' '.join(words[:count])}: " for count in (1, 2))
    told = [line for line in done.stderr.splitlines() if not line.startswith(lasts)]
    assert len(told) == 1, done.stderr
    assert named in done.stderr


def test_no_file_of_tests_is_longer_than_400_lines() -> None:
    """Those of the package have their limits in tests/structure."""
    long = {
        str(path): count
        for path in (ROOT / "tests").rglob("*.py")
        if (count := len(path.read_text().splitlines())) > 400
    }
    assert not long


def test_no_folder_of_tests_is_left_out(request: pytest.FixtureRequest) -> None:
    """pytest goes into no folder of certain names unless it is told to, and says nothing."""
    passed_over = request.config.getini("norecursedirs")
    for file in (ROOT / "tests").rglob("test_*.py"):
        for name in file.relative_to(ROOT).parts[:-1]:
            found = [pattern for pattern in passed_over if fnmatch(name, pattern)]
            assert not found, f"{file} is never run: norecursedirs has {found}"


def test_every_file_says_what_it_is_for() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_three_calls_from_the_command_line_to_the_optimizer() -> None:
    """cli/train.py calls train(), loop.py calls train_step(), step.py calls optimizer.step()."""
    for file, call in [
        ("cli/train.py", r"\n +train\(config"),
        ("train/loop.py", r"train_step\("),
        ("train/step.py", r"optimizer\.step\(\)"),
    ]:
        assert re.search(call, (PACKAGE / file).read_text()), (file, call)
    assert "def train(" in (PACKAGE / "train/loop.py").read_text()
    assert "def train_step(" in (PACKAGE / "train/step.py").read_text()


def test_start_is_quick_enough_to_be_pleasant() -> None:
    began = time.perf_counter()
    assert run("--version").returncode == 0
    assert time.perf_counter() - began < 5
