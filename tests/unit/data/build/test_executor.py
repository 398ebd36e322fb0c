"""The same bytes from a Ray cluster and from a SLURM array as from this process."""

import importlib.util
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from build_samples import Numbers, files, learn, make, text

from foundling.config.errors import ConfigError, DataError
from foundling.data.build import encode
from foundling.data.build.executor_cluster import run_share
from foundling.data.open_source import Specs
from foundling.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PART_ROWS", 40)


@pytest.fixture
def cluster() -> Iterator[None]:
    """A real Ray cluster of two cores on this machine."""
    ray = pytest.importorskip("ray")
    here = str(Path(__file__).parent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, about its own future
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([here, *sys.path])}},
        )
        yield
        ray.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_a_ray_cluster_writes_the_same_bytes(
    cluster: None, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source = Numbers(count=400)
    make(source, tokenizer, tmp_path / "plain")
    make(source, tokenizer, tmp_path / "ray", engine="ray")
    assert files(tmp_path / "plain") == files(tmp_path / "ray")
    # With a budget, and a source that refuses on the cluster: one sentence, and it goes on later.
    with pytest.raises(DataError, match="the numbers have run out"):
        make(Numbers(trouble=(50, "refuse")), tokenizer, tmp_path / "b", engine="ray")
    make(Numbers(), tokenizer, tmp_path / "b", engine="ray")
    make(Numbers(count=None), tokenizer, tmp_path / "few", engine="ray", max_tokens=5000)
    make(Numbers(), tokenizer, tmp_path / "whole")
    make(Numbers(count=None), tokenizer, tmp_path / "plain few", max_tokens=5000)
    assert files(tmp_path / "b") == files(tmp_path / "whole")
    assert files(tmp_path / "few") == files(tmp_path / "plain few")


SBATCH = """#!{python}
# Stands in for sbatch: runs the array's tasks here, one after another, as SLURM would.
import os, pathlib, subprocess, sys
options, script = sys.argv[1:-1], sys.argv[-1]
assert {{"--wait", "--parsable"}} <= set(options), options
(array,) = [word for word in options if word.startswith("--array=")]
first, last = map(int, array.partition("=")[2].split("-"))
lines = pathlib.Path(script).read_text().splitlines()
(log,) = [line.partition("--output=")[2] for line in lines if "--output=" in line]
print("4711", flush=True)
with open({record!r}, "a") as record:
    record.write(array + "\\n")
worst = 0
for number in range(first, last + 1):
    with open(log.replace("%a", str(number)), "w") as out:
        done = subprocess.run(
            ["sh", script], stdout=out, stderr=out,
            env={{**os.environ, "SLURM_ARRAY_TASK_ID": str(number)}},
        )
    worst = max(worst, done.returncode)
sys.exit(worst)
"""


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch on the path; the file that lists its arrays."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program, record = folder / "sbatch", tmp_path / "arrays.txt"
    program.write_text(SBATCH.format(python=sys.executable, record=str(record)))
    cancel = folder / "scancel"
    cancel.write_text("#!/bin/sh\n")
    for file in (program, cancel):
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("foundling.data.build.executor_cluster.POLL_S", 0.05)
    return record


def write_corpus(folder: Path) -> list[str]:
    for number in range(3):
        lines = [text(n) for n in range(number * 70, number * 70 + 90)]  # the files overlap
        (folder / f"{number}.txt").write_text("\n\n".join(lines) + "\n")
    return [str(folder / f"{number}.txt") for number in range(3)]


def test_a_slurm_array_writes_the_same_bytes(
    sbatch: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    specs = Specs(specs=tuple(write_corpus(tmp_path)), val_share=0.1)
    sources = tuple(specs.open())
    make(sources, tokenizer, tmp_path / "plain")
    make(sources, tokenizer, tmp_path / "slurm", engine="slurm", workers=2)
    assert files(tmp_path / "plain") == files(tmp_path / "slurm")
    assert sbatch.read_text() == "--array=0-1\n"


def test_a_slurm_array_goes_on_until_a_budget_is_reached(
    sbatch: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    specs = Specs(specs=tuple(write_corpus(tmp_path)), val_share=0.1)
    sources = tuple(specs.open())
    one = make(sources, tokenizer, tmp_path / "plain", max_tokens=5000)
    options = {"engine": "slurm", "workers": 1}
    make(sources, tokenizer, tmp_path / "slurm", max_tokens=5000, **options)
    assert files(tmp_path / "plain") == files(tmp_path / "slurm")
    assert one.recipe["result"]["rows"] < 270
    # One piece at first, then twice as many.
    assert sbatch.read_text() == "--array=0-0\n--array=0-0\n"


def test_what_an_array_could_not_do_is_said(
    sbatch: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    short = Numbers(count=100, trouble=(50, "refuse"))
    sentence = r"1 of 1 pieces were not finished .*the numbers have run out.* start again to go on"
    with pytest.raises(DataError, match=sentence):
        make(short, tokenizer, tmp_path / "d", engine="slurm", workers=2)
    make(Numbers(count=100), tokenizer, tmp_path / "d", engine="slurm", workers=2)


def test_a_source_that_changes_meanwhile_is_refused(
    sbatch: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_corpus(tmp_path)[0]
    (source,) = Specs(specs=(path,), val_share=0.1).open()
    real = subprocess.Popen

    def change(*words: Any, **options: Any) -> Any:
        Path(path).write_text("something else\n")
        return real(*words, **options)

    monkeypatch.setattr("foundling.data.build.executor_cluster.subprocess.Popen", change)
    with pytest.raises(DataError, match="is not what it was when the build began"):
        make(source, tokenizer, tmp_path / "d", engine="slurm", workers=2)


def test_an_order_that_another_has_written_is_not_unpickled(tmp_path: Path) -> None:
    (tmp_path / "round.pickle").write_bytes(b"cbuiltins\nprint\n(S'run'\ntR.")
    with pytest.raises(DataError, match=r"round\.pickle is not what the build wrote"):
        run_share(tmp_path / "round.pickle", "0" * 64, 0)


def test_engines_that_are_not_there_are_named(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs sbatch"):
        make(Numbers(), tokenizer, tmp_path / "a", engine="slurm")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"foundling\[ray\]"):
        make(Numbers(), tokenizer, tmp_path / "c", engine="ray")


def test_the_extras_are_pinned_for_ci() -> None:
    """A test that skips for want of Ray on the machine that should have it proves nothing."""
    root = Path(__file__).parents[4]
    pinned = (root / "constraints.txt").read_text()
    for name in ("ray", "datatrove"):
        assert f"\n{name}==" in pinned
        assert name in (root / "Makefile").read_text()
    if os.environ.get("CI"):
        assert importlib.util.find_spec("ray")
