"""Several ranks write one checkpoint, any number loads it, and one's failure is told to all."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_jobs import JOBS, WHOLE

from foundling.checkpoint.convert.dcp import DcpTensors
from foundling.checkpoint.manifest import load_meta, verify
from foundling.checkpoint.reader import load_tensors
from foundling.checkpoint.retention import latest


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], str]:
    """Every job's line, one after the other in one folder, and what was said on stderr."""
    folder = tmp_path_factory.mktemp("ranks")
    program = Path(__file__).with_name("rank_jobs.py")
    done = subprocess.run(
        [sys.executable, str(program), str(folder), *JOBS],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.partition(":") for line in done.stdout.splitlines()]
    return folder, {name: rest.strip() for name, _, rest in lines}, done.stderr


@pytest.mark.parametrize("job", JOBS)
def test_a_job_of_ranks(job: str, answers: tuple[Path, dict[str, str], str]) -> None:
    _, lines, said = answers
    codes = ["-9" if job == "killed rank" and rank == 1 else "0" for rank in range(JOBS[job][0])]
    assert lines[job].startswith(f"[{', '.join(codes)}]"), f"{JOBS[job][1].__doc__}\n{said}"


def test_one_process_loads_what_two_ranks_wrote(
    answers: tuple[Path, dict[str, str], str],
) -> None:
    path = answers[0] / "run" / "checkpoints" / "step-00000002"
    verify(path)
    assert len(list(path.glob("*.distcp"))) == 2
    into = {name: torch.zeros_like(whole) for name, (whole, _) in WHOLE.items()}
    load_tensors(path, into)
    assert all(torch.equal(into[name], whole * 2) for name, (whole, _) in WHOLE.items())
    assert load_meta(path) == {"step": 2}


def test_tensors_in_pieces_are_filled_by_opening_each_file_once(
    answers: tuple[Path, dict[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = answers[0] / "run" / "checkpoints" / "step-00000002"
    stored = DcpTensors(path, foreign=False)
    names = ("model.uneven", "model.wide", "model.few")
    into = {name: torch.zeros_like(WHOLE[name][0]) for name in names}
    opened: list[str] = []
    plain = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *a, **k: opened.append(self.name) or plain(self, *a, **k)
    )
    stored.fill(into)
    assert sorted(opened) == ["__0_0.distcp", "__1_0.distcp"]
    assert all(torch.equal(into[name], WHOLE[name][0] * 2) for name in names)
    opened.clear()
    both = {name: torch.zeros_like(whole) for name, (whole, _) in WHOLE.items()}
    stored.fill(both)
    assert all(torch.equal(both[name], whole * 2) for name, (whole, _) in WHOLE.items())


def test_a_plain_save_of_two_ranks_is_whole_or_nothing(
    answers: tuple[Path, dict[str, str], str],
) -> None:
    home = answers[0] / "plain"
    path = latest(home)
    assert path == home / "step-00000004"
    assert [entry.name for entry in home.iterdir()] == ["step-00000004"]
    assert len(list(path.glob("*.distcp"))) == 2
