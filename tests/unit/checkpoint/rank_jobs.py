"""Jobs of several gloo ranks that save and load, run as a program: FOLDER JOB...

torch is imported once and every rank is a fork, so that a job of four costs a fraction of a second
and not four imports. A job that fails prints its traceback, and the program ends with 1.
"""

import contextlib
import datetime
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from foundling.checkpoint import manifest, writer
from foundling.checkpoint.folders import list_checkpoints
from foundling.checkpoint.manager import CheckpointManager
from foundling.checkpoint.manifest import load_meta, verify
from foundling.checkpoint.reader import load_tensors
from foundling.checkpoint.retention import latest, latest_together
from foundling.checkpoint.writer import save
from foundling.config.errors import CheckpointError
from foundling.config.run import CheckpointConfig
from foundling.runtime import files
from foundling.runtime.dist import World

WHOLE = {
    "model.uneven": (torch.arange(35.0).view(5, 7), [Shard(0)]),
    "model.wide": (torch.arange(24.0).view(4, 6) * 3, [Shard(1)]),
    "model.scalar": (torch.tensor(2.5), [Replicate()]),
    "model.few": (torch.arange(6.0).view(2, 3) + 100, [Shard(0)]),
    "optim.plain": (torch.arange(400.0), None),
    "optim.other": (torch.arange(300.0) - 7, None),
    "optim.half": (torch.arange(64.0).bfloat16(), [Replicate()]),
}


def laid_out(scale: float) -> dict[str, torch.Tensor]:
    """The tensors under the layout of this many ranks: sharded, replicated and plain ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: (whole * scale)
        if placements is None
        else distribute_tensor(whole * scale, mesh, placements)
        for name, (whole, placements) in WHOLE.items()
    }


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def saver(folder: Path, timeout_s: float = 30, **fields: object) -> CheckpointManager:
    config = CheckpointConfig(**{"keep": 9, **fields})  # type: ignore[arg-type]
    return CheckpointManager(folder / "run" / "checkpoints", config, me(), timeout_s)


def me() -> World:
    return World(dist.get_rank(), dist.get_world_size())


@contextlib.contextmanager
def at_point(action: Callable[[str], None]) -> Iterator[None]:
    plain, files.failpoint = files.failpoint, action
    yield
    files.failpoint = plain


def save_two(folder: Path) -> None:
    """Saves of steps 1 and 2, changed right after; each rank copies only what it writes."""
    with saver(folder) as mine:
        for step in (1, 2):
            tensors = laid_out(step)
            mine.save(step, tensors, {"step": step})
            for tensor in tensors.values():
                tensor.fill_(-1)
        path = mine.finish()
        assert path == folder / "run" / "checkpoints" / "step-00000002", path
        held = sum(whole.nbytes for whole, _ in WHOLE.values())
        assert sum(part.nbytes for part in mine._stage.fill(parts_of(mine)).values()) < 0.75 * held


def parts_of(mine: CheckpointManager) -> dict[int, torch.Tensor]:
    sizes = [writer.item_bytes(item) for item in mine._planner.agreed.items]
    return {number: torch.zeros(size, dtype=torch.uint8) for number, size in enumerate(sizes)}


def load_two(folder: Path) -> None:
    """Step 2 under this layout, whatever it was saved under."""
    hashed: list[str] = []
    plain = manifest._sha256
    manifest._sha256 = lambda path: hashed.append(path.name) or plain(path)  # type: ignore[func-returns-value]
    path = latest_together(folder / "run" / "checkpoints")
    assert path is not None
    counts: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(counts, hashed)
    everything = sorted(name for names in counts for name in names)
    assert everything == sorted(verify(path).files), "each file is hashed once in the job"
    into = laid_out(0)
    load_tensors(path, into, check=False)
    for name, (whole, _) in WHOLE.items():
        assert torch.equal(whole_of(into[name]), whole * 2), name
    assert load_meta(path) == {"step": 2}


def full_disk(folder: Path) -> None:
    """One rank's disk is full: every rank hears it, nothing is left behind, the next save works."""

    def no_room(point: str) -> None:
        if point == "write" and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")

    home = folder / "run" / "checkpoints"
    with saver(folder) as mine:
        with at_point(no_room):
            mine.save(3, laid_out(3), {}, wait=True)
        (result,) = mine.poll()
        assert "step 3 could not be written" in result.error, result
        assert "No space left" in result.error
        assert result.path is None
        dist.barrier()
        assert not [path for path in home.iterdir() if "tmp" in path.name]
        expect("No space left", mine.finish)
        mine.save(4, laid_out(4), {})
        assert mine.finish() == home / "step-00000004"


def no_memory(folder: Path) -> None:
    """One rank cannot stage: the others are told and do not wait for it."""

    def no_room(point: str) -> None:
        if point == "stage" and dist.get_rank() == 1:
            raise RuntimeError("can't allocate memory")

    with saver(folder) as mine:
        with at_point(no_room):
            mine.save(5, laid_out(5), {}, wait=True)
        (result,) = mine.poll()
        assert "can't allocate memory" in result.error, result
        mine.save(5, laid_out(5), {}, wait=True)
        assert mine.poll()[0].error == ""


def slow_rank(folder: Path) -> None:
    """A rank that is slower than the limit: the save fails on all, the group is made anew."""

    def sleep(point: str) -> None:
        if point == "write" and dist.get_rank() == 1:
            files.failpoint = lambda _: None
            time.sleep(3.2)

    with saver(folder, timeout_s=2) as mine:
        files.failpoint = sleep
        mine.save(6, laid_out(6), {})
        while not (results := mine.poll()):
            time.sleep(0.02)
        assert "could not talk" in results[0].error, results
        files.failpoint = lambda _: None
        mine.save(7, laid_out(7), {})
        path = mine.finish()
        assert path is not None
        assert path.name == "step-00000007"


def stuck_disk(folder: Path) -> None:
    """A write that never ends: the next save is left out on all ranks, and told; then it works."""
    gate = threading.Event()

    def hang(point: str) -> None:
        if point == "write" and dist.get_rank() == 1:
            gate.wait(20)

    with saver(folder, timeout_s=2) as mine, at_point(hang):
        mine.save(8, laid_out(8), {})
        stall = mine.save(9, laid_out(9), {})
        assert 1.9 < stall < 12, stall
        errors = [result.error for result in mine.poll()]
        assert any("step 9 was not saved" in error for error in errors), errors
        gate.set()
        mine.save(10, laid_out(10), {}, wait=True)
        assert [r.error for r in mine.poll() if r.step == 10] == [""]


def killed_rank(folder: Path) -> None:
    """Rank 1 is killed while it writes: rank 0 is told within the limit and has its old ones."""
    with saver(folder, timeout_s=5) as mine:

        def die(point: str) -> None:
            if point == "write" and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        files.failpoint = die
        mine.save(11, laid_out(11), {}, wait=True)
        (result,) = mine.poll()
        assert "could not talk" in result.error, result
        newest = latest(folder / "run" / "checkpoints")
        assert newest is not None
        assert newest.name == "step-00000010"
        os._exit(0)  # the group has lost a rank; there is nothing to say goodbye to


def damaged(folder: Path) -> None:
    """The newest is damaged in one file: all ranks take the one before."""
    home = folder / "run" / "checkpoints"
    # Step 8's write was let go after the limit: it may have been given up by then, or not.
    before = [path for path in list_checkpoints(home) if path.name != "step-00000010"][-1]
    assert before.name in ("step-00000007", "step-00000008"), before
    dist.barrier()
    if dist.get_rank() == 0:
        file = sorted((home / "step-00000010").glob("*.distcp"))[-1]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    dist.barrier()
    found = latest_together(home)
    assert found == before, found


def plain_save(folder: Path) -> None:
    """`save` without a CheckpointManager: a full disk or a failing rename is everyone's."""
    tensors = {f"model.{i}": torch.full((50, 3), float(i)) for i in range(6)}
    path = save(folder / "plain", 4, tensors, {"step": 4})
    assert path.name == "step-00000004", path
    assert save(folder / "plain", 4, tensors, {"step": 4}) == path

    for who, where in ((1, "write"), (0, "rename")):

        def fail(point: str, who: int = who, where: str = where) -> None:
            if point == where and dist.get_rank() == who:
                raise OSError(28, "No space left on device")

        with at_point(fail):
            expect("No space left", lambda: save(folder / "plain", 5, tensors, {}))


def expect(words: str, action: Callable[[], object]) -> None:
    """The action fails in a sentence with these words."""
    try:
        action()
    except CheckpointError as error:
        if words in str(error):
            return
        raise
    raise AssertionError(f"nothing was said of {words}")


JOBS: dict[str, tuple[int, Callable[[Path], None]]] = {
    "plain save": (2, plain_save),
    "save": (2, save_two),
    "load 1": (1, load_two),
    "load 3": (3, load_two),
    "load 4": (4, load_two),
    "full disk": (2, full_disk),
    "no memory": (2, no_memory),
    "slow rank": (2, slow_rank),
    "stuck disk": (2, stuck_disk),
    "killed rank": (2, killed_rank),
    "damaged": (3, damaged),
}


def run_job(name: str, folder: Path) -> list[int]:
    """Fork the ranks of a job; their exit codes, negative for a signal."""
    world, job = JOBS[name]
    meeting = folder / f"meeting-{name.replace(' ', '-')}"
    ranks = []
    for rank in range(world):
        if (child := os.fork()) == 0:
            code = 1
            try:
                warnings.simplefilter("error")
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{meeting}",
                    rank=rank,
                    world_size=world,
                    timeout=datetime.timedelta(seconds=60),
                )
                job(folder)
                dist.barrier()
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        ranks.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]


if __name__ == "__main__":
    import torch._dynamo  # DTensors load it when first used: once here, and not in every fork

    torch.set_num_threads(1)
    for word in sys.argv[2:]:
        began = time.perf_counter()
        codes = run_job(word, Path(sys.argv[1]))
        print(f"{word}: {codes} in {time.perf_counter() - began:.1f} s", flush=True)
