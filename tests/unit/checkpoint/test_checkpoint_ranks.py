"""Several ranks write one checkpoint, and a failure on one is the failure of all."""

import subprocess
import sys
from pathlib import Path

import torch

from foundling.checkpoint import latest, load_meta, load_tensors, verify

SCRIPT = """
import sys, os, warnings, datetime
from pathlib import Path
warnings.simplefilter("error")
import torch, torch.distributed as dist
from foundling.checkpoint import load_tensors, save, store, tensor_files
from foundling.config import CheckpointError
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
tensors = {f"model.{i}": torch.full((50, 3), float(i)) for i in range(6)}
path = save(folder / "c", 4, tensors, {"step": 4})
assert path.name == "step-00000004", path
assert save(folder / "c", 4, tensors, {"step": 4}) == path
into = {name: torch.zeros(50, 3) for name in tensors}
load_tensors(path, into)
assert all(torch.equal(into[n], tensors[n]) for n in tensors)

def fail(*_):
    raise OSError(28, "No space left on device")
for who, what in ((1, (tensor_files._SealingStream, "write")), (0, (store, "replace_folder"))):
    kept = getattr(*what)
    if rank == who:
        setattr(*what, fail)
    try:
        save(folder / "c", 5, tensors, {})
    except CheckpointError as error:
        assert "No space left" in str(error), error
    else:
        raise AssertionError("no error on rank %d" % rank)
    setattr(*what, kept)
dist.barrier()
assert sorted(os.listdir(folder / "c")) == ["step-00000004"], os.listdir(folder / "c")
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_write_one_checkpoint(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    path = latest(tmp_path / "c")
    assert path == tmp_path / "c" / "step-00000004"
    verify(path)
    assert len(list(path.glob("*.distcp"))) == 2
    assert load_meta(path) == {"step": 4}
    into = {f"model.{i}": torch.zeros(50, 3) for i in range(6)}
    load_tensors(path, into)
    assert all(torch.equal(into[f"model.{i}"], torch.full((50, 3), float(i))) for i in range(6))
