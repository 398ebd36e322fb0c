"""The run directory's files, the lock, and devices chosen with a reason."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from foundling.config.errors import ConfigError, RunError
from foundling.runtime import device
from foundling.runtime.console import say, warn
from foundling.runtime.device import choose_device, set_deterministic, set_threads
from foundling.runtime.dist import world_from_environment
from foundling.runtime.files import replace_folder, sha256_file, write_text_atomic
from foundling.runtime.lock import RunLock, is_locked
from foundling.runtime.run_dir import RunDir, cut_lines, each_line, read_lines

HOLD = """
import sys, time
from pathlib import Path
from foundling.runtime.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_holder_is_refused_by_name_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(RunError, match=f"process {child.pid} on"), RunLock(tmp_path):
        pass
    assert is_locked(tmp_path)
    child.kill()
    child.wait()
    child.stdout.close()
    assert not is_locked(tmp_path)
    with RunLock(tmp_path):
        assert is_locked(tmp_path)


def test_an_unlocked_folder_gets_no_lock_file_from_asking(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_lines_survive_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    cut_lines(path, 1)
    assert path.read_text() == '{"step": 1}\n'
    assert read_lines(tmp_path / "none.jsonl") == []


def test_damaged_lines_are_counted_and_stay(tmp_path: Path) -> None:
    path, deep = tmp_path / "metrics.jsonl", b"[" * 100_000
    path.write_bytes(b'{"step": 1}\n\xff\n' + deep + b'\n7\n{"step": 2}\n{"step": 3}\n{"st')
    lines = list(each_line(path))
    assert [line and line["step"] for line in lines] == [1, None, None, None, 2, 3]
    cut_lines(path, 2)
    assert path.read_bytes() == b'{"step": 1}\n\xff\n' + deep + b'\n7\n{"step": 2}\n'


def test_info_round_trip_and_refusals(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with pytest.raises(RunError, match="does not exist"):
        run.read_info()
    run.write_info({"status": "running"})
    run.update_info(status="finished")
    assert run.read_info()["status"] == "finished"
    run.info_path.write_text('{"schema": 99}')
    with pytest.raises(RunError, match="schema 99"):
        run.read_info()
    run.event("begun", step=0)
    before = time.time()
    line = read_lines(run.events_path)[0]
    assert line["event"] == "begun"
    assert abs(line["time"] - before) < 60


def test_atomic_text_and_folder(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_text_atomic(path, "one")
    write_text_atomic(path, "two")
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]
    assert sha256_file(path) == "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3"
    (tmp_path / "a").mkdir()
    replace_folder(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").is_dir()


def test_device_and_dtype_have_reasons() -> None:
    choice = choose_device("cpu", "auto")
    assert choice.device == torch.device("cpu")
    assert choice.dtype == torch.float32
    assert "asked for" in choice.reason
    if not torch.cuda.is_available():
        assert "no CUDA device" in choose_device("auto", "auto").reason
        with pytest.raises(ConfigError, match="cuda"):
            choose_device("cuda", "auto")
        with pytest.raises(ConfigError, match="mps"):
            choose_device("mps", "auto")


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "died of SIGILL"),
        ("raise ValueError('no such product')", "no such product"),
        ("", ""),
    ],
)
def test_bf16_on_a_cpu_is_tried_in_a_child(
    program: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "BF16_TRIAL", program)
    device.bf16_failure.cache_clear()
    try:
        if told:
            with pytest.raises(ConfigError, match=told):
                choose_device("cpu", "bf16")
        else:
            assert choose_device("cpu", "bf16").name == "bf16"
    finally:
        device.bf16_failure.cache_clear()


def test_threads_and_determinism() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(1) == 1 == torch.get_num_threads()
        assert set_threads(0) == len(os.sched_getaffinity(0))
        set_deterministic(False)
        assert not torch.are_deterministic_algorithms_enabled()
        set_deterministic(True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)


def test_segments_grow_unless_the_user_has_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    choose_device("cpu", "fp32")
    assert os.environ.pop("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True"
    for name in names:
        monkeypatch.setenv(name, "backend:cudaMallocAsync")
        choose_device("cpu", "fp32")
        assert [os.environ.get(one, "") for one in names].count("backend:cudaMallocAsync") == 1
        assert "expandable" not in "".join(os.environ.get(one, "") for one in names)
        monkeypatch.delenv(name)


def test_more_threads_than_cores_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    before, many = torch.get_num_threads(), 2 * len(os.sched_getaffinity(0)) + 1
    try:
        assert set_threads(many) == many
    finally:
        torch.set_num_threads(before)
    assert f"train.threads is {many}" in capsys.readouterr().err


def test_the_world_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert world_from_environment().size == 1
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    world = world_from_environment()
    assert (world.rank, world.size, world.local_rank, world.is_main) == (3, 4, 1, False)


def test_only_rank_zero_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from foundling.runtime import console

    console.console.cache_clear()
    monkeypatch.setenv("RANK", "1")
    say("hidden")
    monkeypatch.setenv("RANK", "0")
    say("told [not markup]")
    warn("careful")
    console.console.cache_clear()
    captured = capsys.readouterr()
    assert captured.out == "told [not markup]\n"
    assert captured.err == "warning: careful\n"
