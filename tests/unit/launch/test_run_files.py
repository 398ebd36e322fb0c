"""Copying runs over a stand-in for ssh: broken off, gone on, damaged on the way, verified."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from foundling.checkpoint.writer import save
from foundling.config.errors import CheckpointError, ConfigError, RunError
from foundling.launch.run_files import Remote, copy_run, parse_remote, pull, push
from foundling.runtime.run_dir import LineFile, RunDir

# Every machine is this one. `limit` cuts the connection after so many bytes; what the other
# machine's rsync says is kept in `came`.
SSH = """#!/bin/bash
while [[ "$1" == -* ]]; do [ "$1" = -l ] && shift; shift; done
shift
if [ -n "$NO_RSYNC" ] && [[ "$*" == "command -v rsync" ]]; then exit 1; fi
if [[ "$*" != rsync* ]]; then exec bash -c "$*"; fi
bash -c "$*" | "$PYTHON" "$FAKE/pump.py"
exit "${PIPESTATUS[1]}"
"""
PUMP = """
import os, select, sys, time
home = os.environ["FAKE"]
cut = os.path.exists(f"{home}/limit")
left = int(open(f"{home}/limit").read()) if cut else 1 << 40
with open(f"{home}/came", "ab") as came:
    while left and (block := os.read(0, min(left, 65536))):
        left -= len(block)
        came.write(block)
        while block:  # rsync's end of the pipe does not block
            select.select([], [1], [])
            block = block[os.write(1, block) :]
if cut:
    os.unlink(f"{home}/limit")
    time.sleep(0.3)  # so that what was said is heard
    sys.exit(255)
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somewhere else, reached as `far`."""
    if not shutil.which("rsync"):
        pytest.skip("rsync is not installed")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ssh").write_text(SSH)
    (tools / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setenv("PYTHON", sys.executable)
    (tmp_path / "pump.py").write_text(PUMP)
    (tmp_path / "far").mkdir()
    return tmp_path


def make_run(path: Path) -> Path:
    run = RunDir(path)
    run.write_info({"chat": False, "status": "running", "parent": None})
    (path / "lock").write_text("someone there")
    for step in (1, 2):
        save(run.checkpoints, step, {"w": torch.arange(3000.0) * step}, {"step": step})
        with LineFile(run.metrics_path) as file:
            file.append({"step": step})
    (run.checkpoints / "step-00000003.tmp-77").mkdir()
    (run.checkpoints / "step-00000003.tmp-77" / "half").write_text("half")
    return path


def files(path: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    return {name: text for name, text in found.items() if name != "lock" and "tmp-" not in name}


def test_a_run_is_pulled_and_pushed_whole(machine: Path) -> None:
    far = make_run(machine / "far" / "mine")
    here = machine / "here" / "mine"
    assert copy_run(f"far:{far}", str(machine / "here")) == here
    assert files(here) == files(far)
    assert not (here / "lock").exists()
    there = copy_run(str(here), f"far:{machine / 'far' / 'copies'}")
    assert isinstance(there, Remote)
    assert files(Path(there.path)) == files(far)
    odd = make_run(machine / "a:b")
    with pytest.raises(ConfigError, match="both on this machine"):
        copy_run(str(odd), str(machine))
    with pytest.raises(ConfigError, match="both on other machines"):
        copy_run("far:a", "near:b")
    assert not list(machine.rglob("*.part"))


def test_a_pull_that_broke_off_goes_on(machine: Path) -> None:
    far = make_run(machine / "far" / "mine")
    (far / "long.log").write_bytes(os.urandom(1_000_000))
    (machine / "limit").write_text("600000")
    with pytest.raises(RunError, match="goes on from there"):
        pull(Remote("far", str(far)), machine / "here")
    assert (machine / "here" / "mine" / "long.log").stat().st_size > 100_000
    assert not list((machine / "here").rglob("checkpoints/*/manifest.json"))
    (machine / "came").unlink()
    here = pull(Remote("far", str(far)), machine / "here")
    assert files(here) == files(far)
    assert came(machine) < 900_000, "what had come was fetched again"


def came(machine: Path) -> int:
    """Bytes that the other machine has sent since this was last deleted."""
    return (machine / "came").stat().st_size


def test_a_byte_that_differs_is_fetched_again(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = make_run(machine / "far" / "mine")
    here = pull(Remote("far", str(far)), machine / "here")
    victim = next(here.rglob("step-00000002/*.distcp"))
    times = victim.stat()
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    os.utime(victim, (times.st_atime, times.st_mtime))  # nothing that rsync would notice
    assert files(pull(Remote("far", str(far)), machine / "here")) == files(far)
    assert "what differs from its manifest is copied again" in capsys.readouterr().err


def test_damage_that_stays_is_refused_by_name(machine: Path) -> None:
    far = make_run(machine / "far" / "mine")
    victim = next(far.rglob("step-00000002/*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="checksum"):
        pull(Remote("far", str(far)), machine / "here")
    with pytest.raises(CheckpointError, match=victim.name):
        push(far, Remote("far", str(machine / "far" / "copies")))


@pytest.mark.parametrize("damage", ["no manifest", "another byte"])
def test_what_is_damaged_here_is_not_called_verified_there(damage: str, machine: Path) -> None:
    run = make_run(machine / "mine")
    newest = run / "checkpoints" / "step-00000002"
    if damage == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        [part] = newest.glob("*.distcp")
        part.write_bytes(part.read_bytes().replace(b"\0", b"\1", 1))
    with pytest.raises(CheckpointError, match=r"step-00000002.*It is damaged here already"):
        push(run, Remote("far", str(machine / "far")))
    assert (machine / "far" / "mine" / "checkpoints" / "step-00000001" / "manifest.json").is_file()


def test_what_has_come_is_not_fetched_twice(machine: Path) -> None:
    far = make_run(machine / "far" / "mine")
    pull(Remote("far", str(far)), machine / "here")
    first = came(machine)
    with LineFile(far / "metrics.jsonl") as file:
        file.append({"step": 3})
    (machine / "came").unlink()
    here = pull(Remote("far", str(far)), machine / "here")
    assert files(here) == files(far)
    assert came(machine) < first / 3


def test_rsync_brings_manifests_last(machine: Path) -> None:
    calls = machine / "rsync.log"
    (machine / "bin" / "rsync").write_text(f'#!/bin/bash\necho "$*" >> {calls}\nexit 0\n')
    (machine / "bin" / "rsync").chmod(0o755)
    far = make_run(machine / "far" / "mine")
    shutil.copytree(far, machine / "here" / "mine")
    pull(Remote("far", str(far)), machine / "here")
    first, second = calls.read_text().splitlines()
    assert "--exclude=step-*/manifest.json" in first
    assert "manifest.json" not in second
    assert all("--exclude=lock" in line for line in (first, second))
    (machine / "bin" / "rsync").write_text("#!/bin/bash\nexit 12\n")
    with pytest.raises(RunError, match="code 12"):
        pull(Remote("far", str(far)), machine / "here")


def test_a_byte_that_changed_there_is_copied_again_and_one_that_stays_wrong_is_named(
    machine: Path,
) -> None:
    run = make_run(machine / "mine")
    there = Path(push(run, Remote("far", str(machine / "far"))).path)
    victim = next(there.rglob("step-00000002/*.distcp"))
    times = victim.stat()
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    os.utime(victim, (times.st_atime, times.st_mtime))  # nothing that rsync would notice
    push(run, Remote("far", str(machine / "far")))
    assert files(there) == files(run)
    rsync = shutil.which("rsync")
    line = f"<fc........ step-00000002/{victim.name}"
    (machine / "bin" / "rsync").write_text(
        f'#!/bin/bash\n[[ "$*" == *--dry-run* ]] && echo "{line}"\nexec {rsync} "$@"\n'
    )
    (machine / "bin" / "rsync").chmod(0o755)
    with pytest.raises(CheckpointError, match=rf"{victim.name} differs from its source"):
        push(run, Remote("far", str(machine / "far")))


def test_places_are_written_as_scp_writes_them(machine: Path) -> None:
    assert parse_remote("user@host:a/b/") == Remote("user@host", "a/b")
    for wrong in ("nowhere", "a/b:c", ":x", "host:", "-oProxyCommand=x:y"):
        with pytest.raises(ConfigError, match="HOST:PATH"):
            parse_remote(wrong)
    with pytest.raises(RunError, match="not a run"):
        pull(Remote("far", str(machine / "far")), machine / "here")


def test_without_rsync_on_either_side_nothing_is_copied(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = make_run(machine / "far" / "mine")
    monkeypatch.setenv("NO_RSYNC", "1")
    with pytest.raises(RunError, match="not on the PATH of far; install it there"):
        pull(Remote("far", str(far)), machine / "here")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(RunError, match="not on the PATH of this machine; install it"):
        push(far, Remote("far", str(machine / "far" / "copies")))
    assert not (machine / "here").exists()
