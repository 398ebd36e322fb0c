"""Copying runs over a stand-in for ssh: broken off, gone on, damaged on the way, verified."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from foundling.checkpoint.writer import save
from foundling.config.errors import CheckpointError, ConfigError, RunError
from foundling.launch import run_files
from foundling.launch.run_files import Remote, copy_run, parse_remote, pull, push
from foundling.runtime.run_dir import RunDir

# Every machine is this one. LIMIT cuts the connection after so many bytes, FLIP damages a byte.
SSH = """#!/bin/bash
while [[ "$1" == -* ]]; do shift; done
shift
echo "$*" >> "$FAKE/ssh.log"
if [ -n "$NO_RSYNC" ] && [[ "$*" == *rsync* ]]; then exit 1; fi
if [ -f "$FAKE/limit" ] && [[ "$*" == tail* ]]; then
  bash -c "$*" | head -c "$(cat "$FAKE/limit")"; rm "$FAKE/limit"; exit 255
fi
if [ -f "$FAKE/flip" ] && [[ "$*" == tail*distcp* ]]; then
  rm "$FAKE/flip"; bash -c "$*" | tr '\\000' '\\001'; exit 0
fi
exec bash -c "$*"
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somewhere else, reached as `far`, without rsync."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ssh").write_text(SSH)
    (tools / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setenv("NO_RSYNC", "1")
    (tmp_path / "far").mkdir()
    return tmp_path


def make_run(path: Path) -> Path:
    run = RunDir(path)
    run.write_info({"stage": "pretrain", "status": "running", "parent": None})
    (path / "lock").write_text("someone there")
    for step in (1, 2):
        save(run.checkpoints, step, {"w": torch.arange(3000.0) * step}, {"step": step})
        run.append(run.metrics_path, {"step": step})
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
    (machine / "limit").write_text("5")
    with pytest.raises(RunError, match="goes on from there"):
        pull(Remote("far", str(far)), machine / "here")
    [part] = (machine / "here").rglob("*.part")
    assert part.stat().st_size == 5
    assert not list((machine / "here").rglob("checkpoints/*/manifest.json"))
    (machine / "ssh.log").unlink()
    here = pull(Remote("far", str(far)), machine / "here")
    assert files(here) == files(far)
    assert "tail -c +6" in (machine / "ssh.log").read_text(), "what had come was fetched again"


def test_a_byte_that_changed_on_the_way_is_fetched_again(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = make_run(machine / "far" / "mine")
    (machine / "flip").touch()
    here = pull(Remote("far", str(far)), machine / "here")
    assert "differs from its manifest" in capsys.readouterr().err
    assert files(here) == files(far)


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
    with pytest.raises(CheckpointError, match=r"step-00000002\S* is damaged here already"):
        push(run, Remote("far", str(machine / "far")))
    assert (machine / "far" / "mine" / "checkpoints" / "step-00000001" / "manifest.json").is_file()


def test_what_has_come_is_not_fetched_twice(machine: Path) -> None:
    far = make_run(machine / "far" / "mine")
    pull(Remote("far", str(far)), machine / "here")
    (machine / "ssh.log").unlink()
    RunDir(far).append(far / "metrics.jsonl", {"step": 3})
    here = pull(Remote("far", str(far)), machine / "here")
    fetched = [line for line in (machine / "ssh.log").read_text().splitlines() if "tail -c" in line]
    assert not any("checkpoints" in line for line in fetched)
    assert files(here) == files(far)


@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_rsync_is_used_where_it_is(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_RSYNC")
    far = make_run(machine / "far" / "mine")
    here = pull(Remote("far", str(far)), machine / "here")
    assert files(here) == files(far)
    assert "tail -c" not in (machine / "ssh.log").read_text()
    victim = next(here.rglob("step-00000002/*.distcp"))
    times = victim.stat()
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    os.utime(victim, (times.st_atime, times.st_mtime))  # nothing that rsync would notice
    assert files(pull(Remote("far", str(far)), machine / "here")) == files(far)
    there = copy_run(str(here), f"far:{machine / 'far' / 'copies'}")
    assert isinstance(there, Remote)
    assert files(Path(there.path)) == files(far)
    odd = make_run(machine / "a:b")
    with pytest.raises(ConfigError, match="both on this machine"):
        copy_run(str(odd), str(machine))
    with pytest.raises(ConfigError, match="both on other machines"):
        copy_run("far:a", "near:b")


def test_rsync_brings_manifests_last(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = machine / "rsync.log"
    (machine / "bin" / "rsync").write_text(f'#!/bin/bash\necho "$*" >> {calls}\nexit 0\n')
    (machine / "bin" / "rsync").chmod(0o755)
    monkeypatch.delenv("NO_RSYNC")
    far = make_run(machine / "far" / "mine")
    shutil.copytree(far, machine / "here" / "mine")
    pull(Remote("far", str(far)), machine / "here")
    first, second = calls.read_text().splitlines()
    assert "--exclude=checkpoints/*/manifest.json" in first
    assert "manifest.json" not in second
    assert all("--exclude=lock" in line for line in (first, second))
    (machine / "bin" / "rsync").write_text("#!/bin/bash\nexit 12\n")
    with pytest.raises(RunError, match="code 12"):
        pull(Remote("far", str(far)), machine / "here")


def test_places_are_written_as_scp_writes_them(machine: Path) -> None:
    assert parse_remote("user@host:a/b/") == Remote("user@host", "a/b")
    for wrong in ("nowhere", "a/b:c", ":x", "host:", "-oProxyCommand=x:y"):
        with pytest.raises(ConfigError, match="HOST:PATH"):
            parse_remote(wrong)
    with pytest.raises(RunError, match="not a run"):
        pull(Remote("far", str(machine / "far")), machine / "here")
    assert run_files.has_rsync("far") is False
