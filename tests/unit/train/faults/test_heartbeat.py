"""What a process says it is doing, and how it tells its stack."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from foundling.runtime.progress import KEPT, ProgressMarker
from foundling.train.faults.heartbeat import (
    dump_stacks_on_signal,
    dump_threads,
    main_stack,
    process_start,
    process_state,
    request_stacks,
    stack_of,
)


def test_moving_on_ends_the_stall() -> None:
    progress = ProgressMarker()
    progress.moved_at -= 100
    assert progress.stall_s() > 99
    progress.move("step", 7)
    assert progress.stall_s() < 1
    assert (progress.step, progress.phase) == (7, "step")
    with progress.during("save"):
        assert progress.phase == "save"
    assert progress.phase == "step"


def test_only_the_first_step_may_take_long() -> None:
    progress = ProgressMarker()
    phases = []
    for step in range(3):
        progress.next_step(step)
        phases.append(progress.phase)
        with progress.during("save"):
            pass
    assert phases == ["first step", "step", "step"]


def test_collectives_are_numbered_and_the_innermost_is_shown() -> None:
    progress = ProgressMarker()
    progress.move("step", 3)
    with progress.collective("gradients"):
        with progress.collective("norm"):
            assert progress.inside is not None
            assert (progress.inside.name, progress.inside.number, progress.inside.step) == (
                "norm",
                2,
                3,
            )
        assert progress.inside is not None
        assert progress.inside.name == "gradients"
    assert progress.inside is None
    for _ in range(2 * KEPT):
        with progress.collective("sum"):
            pass
    assert len(progress.entered) == KEPT
    assert progress.entered[-1].number == 2 + 2 * KEPT


def test_who_left_a_collective_by_an_error_is_still_shown_there() -> None:
    progress = ProgressMarker()
    with pytest.raises(OSError, match="closed"), progress.collective("sum"):
        raise OSError("closed")
    assert progress.inside is not None
    progress.move("step", 1)
    assert progress.inside is None


def test_other_threads_are_not_counted() -> None:
    progress = ProgressMarker()

    def work() -> None:
        with progress.collective("behind"):
            assert progress.inside is None

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not progress.entered


def test_the_main_threads_stack_is_seen_from_another() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(main_stack()))
    thread.start()
    thread.join()
    assert any("test_the_main_threads_stack" in line for line in found)
    assert found[-1].endswith(("join", "_wait_for_tstate_lock", "wait"))


def test_the_stack_of_an_error_ends_where_it_was_raised() -> None:
    def deep() -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:
        deep()
    assert stack_of(caught.value)[-1].endswith("deep")


def test_every_thread_is_dumped(tmp_path: Path) -> None:
    release = threading.Event()

    def waits_here() -> None:
        release.wait()

    thread = threading.Thread(target=waits_here)
    thread.start()
    dump_threads(tmp_path / "stacks")
    release.set()
    thread.join()
    text = (tmp_path / "stacks").read_text()
    assert "waits_here" in text
    assert "test_every_thread_is_dumped" in text


def test_a_process_that_holds_the_lock_for_ever_still_answers(tmp_path: Path) -> None:
    stacks, ready = tmp_path / "stacks", tmp_path / "ready"
    code = (
        "import ctypes\nfrom pathlib import Path\n"
        "from foundling.train.faults.heartbeat import dump_stacks_on_signal\n"
        "def holds_the_lock():\n"
        "    while True: ctypes.PyDLL(None).sleep(60)\n"  # PyDLL keeps the interpreter's lock
        f"with dump_stacks_on_signal(Path({str(stacks)!r})):\n"
        f"    Path({str(ready)!r}).touch()\n"
        "    holds_the_lock()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 20
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        assert process_state(child.pid) == "S"
        request_stacks(child.pid)
        while "holds_the_lock" not in stacks.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "holds_the_lock" in stacks.read_text()
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_asking_once_more_does_not_kill(tmp_path: Path) -> None:
    with dump_stacks_on_signal(tmp_path / "stacks"):
        os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR2)  # its default would be death
    assert "test_asking_once_more" in (tmp_path / "stacks").read_text()


def test_a_process_is_known_by_its_number_and_its_birth() -> None:
    own = os.getpid()
    assert process_state(own) == "R"
    assert process_start(own) == process_start(own) != ""
    child = subprocess.Popen(["true"])
    while process_state(child.pid) not in ("Z", ""):
        time.sleep(0.01)
    child.wait()
    assert process_state(child.pid) == ""
    assert process_start(1) != process_start(own)
