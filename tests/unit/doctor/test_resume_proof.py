"""`rehearse --only resume`: passes on a run that resumes, sees others, and leaves nothing."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundling.cli.main import run_verb
from foundling.config.data import PhaseConfig
from foundling.config.errors import ConfigError
from foundling.config.load import dump_yaml
from foundling.config.run import EvalConfig, RunConfig
from foundling.data.batch_reader import BatchReader
from foundling.doctor.resume_proof import compare_runs, data_findings, rehearsal
from foundling.runtime import console
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.train.loop import train


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: str) -> str:
        console.console.cache_clear()
        capsys.readouterr()
        run_verb(words)
        console.console.cache_clear()
        told = capsys.readouterr()
        return told.err + told.out

    return run


@pytest.fixture
def file(tiny: RunConfig, tmp_path: Path) -> Path:
    """A config whose rows grow half way, and whose clocks a rehearsal must shorten."""
    config = tiny.replace(
        data={"phases": (PhaseConfig(at=30, seq_len=128),)},
        train={"horizon": 60},
        optim={"warmup": 20},
        checkpoint={"every": 1000},
        log={"tensorboard": True},
    )
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml(config))
    return path


@pytest.mark.timeout(300)
def test_a_run_that_resumes_passes_and_nothing_is_left(
    file: Path, tmp_path: Path, said: Callable[..., str]
) -> None:
    home = tmp_path / "scratch"
    home.mkdir()
    words = ("rehearse", str(file), "--only", "resume", "--steps", "40", "--folder", str(home))
    out = said(*words, "--optim.lr", "0.01")
    assert "killed (SIGKILL) after step" in out
    assert re.search("going on from the checkpoint of step [123]0", out), out
    assert "go          resume: losses of 40 steps, bit for bit" in out
    assert "go          resume: steps and what they read, 40 lines" in out
    assert "go          resume: data order, 2 segments" in out
    assert "weights and moments, bit for bit" in out
    assert out.rstrip().endswith("GO: all 4 points are proved")
    assert list(home.iterdir()) == []


def test_only_clocks_are_shortened(tiny: RunConfig) -> None:
    config = tiny.replace(
        parallel={"replicate": 3},
        data={"phases": (PhaseConfig(at=6, seq_len=128),)},
        optim={"warmup": 8},
    )
    short = rehearsal(config, 4)
    assert short.train == tiny.train.replace(horizon=4, global_batch_tokens=3 * 4 * 64)
    assert short.data.phases == (PhaseConfig(at=0.75, seq_len=128),)
    assert (short.checkpoint.every, short.optim.warmup) == (1, 4)
    assert short.model == config.model
    with pytest.raises(ConfigError, match="--steps 3"):
        rehearsal(config, 3)
    tokens = config.replace(train={"horizon": "10000 tokens"})
    with pytest.raises(ConfigError, match="phase at step 6"):
        rehearsal(tokens, 8)


def test_a_refusal_is_passed_on_in_its_own_words(file: Path, tmp_path: Path) -> None:
    from foundling.config.errors import RunError

    with pytest.raises(RunError, match=r"could not train: .*allow_repeat"):
        run_verb(["rehearse", str(file), "--only", "resume", "--steps", "4000"])


class TestComparison:
    @pytest.fixture
    def pair(self, tiny: RunConfig, tmp_path: Path) -> tuple[RunDir, RunDir]:
        runs = RunDir(tmp_path / "one"), RunDir(tmp_path / "other")
        for run in runs:
            train(tiny.replace(eval={"every": 0, "tokens": EvalConfig().tokens}), run)
        return runs

    def test_the_same_run_is_the_same(self, pair: tuple[RunDir, RunDir]) -> None:
        assert all(finding.same for finding in compare_runs(*pair, exact=True))

    def test_one_bit_of_a_loss_is_seen(self, pair: tuple[RunDir, RunDir]) -> None:
        lines = read_lines(pair[1].metrics_path)
        lines[3]["loss"] = float(np.nextafter(lines[3]["loss"], 0))
        rewrite(pair[1].metrics_path, lines)
        [losses, *others] = compare_runs(*pair, exact=True)
        assert not losses.same
        assert "loss of step 4" in losses.detail
        assert all(finding.same for finding in others)
        [tolerant, *_] = compare_runs(*pair, exact=False)
        assert tolerant.same
        assert "0.02 is tolerated" in tolerant.detail

    def test_a_unit_in_another_step_is_seen(self, pair: tuple[RunDir, RunDir]) -> None:
        lines = read_lines(pair[1].metrics_path)
        next(iter(lines[5]["sources"].values()))["units"] += 1
        rewrite(pair[1].metrics_path, lines)
        wrong = [f.what for f in compare_runs(*pair, exact=False) if not f.same]
        assert wrong == ["steps and what they read"]

    def test_other_weights_are_seen(
        self, pair: tuple[RunDir, RunDir], tiny: RunConfig, tmp_path: Path
    ) -> None:
        other = RunDir(tmp_path / "third")
        config = tiny.replace(optim={"lr": tiny.optim.lr * 2})
        train(config, other)
        for exact in (True, False):
            wrong = [f for f in compare_runs(pair[0], other, exact=exact) if not f.same]
            assert wrong[-1].what.endswith("weights and moments")


def rewrite(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


class TestStream:
    @pytest.mark.parametrize("packing", ["bestfit", "concat", "pad", "bucket"])
    def test_every_world_size_reads_the_same(self, packing: Any, tiny: RunConfig) -> None:
        phases = (PhaseConfig(at=0.5, seq_len=128),)
        buckets = {"buckets": (32, 64), "bucket_tokens": 128} if packing == "bucket" else {}
        config = tiny.replace(
            train={"global_batch_tokens": 7 * 128},
            data={"packing": packing, "phases": phases, **buckets},
        )
        found = data_findings(config, worlds=(2, 3, 5), steps=4)
        assert [finding.what for finding in found][2:] == [
            f"stream at world size {world}" for world in (2, 3, 5)
        ]
        assert all(finding.same for finding in found), [str(f) for f in found]

    def test_a_rank_that_reads_another_row_is_seen(
        self, tiny: RunConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = BatchReader.step

        def shifted(self: BatchReader, step: int) -> Any:
            return real(self, step + (self._world == 3 and self._rank == 1))

        monkeypatch.setattr(BatchReader, "step", shifted)
        found = data_findings(tiny, worlds=(2, 3), steps=4)
        assert [f.what for f in found if not f.same] == ["stream at world size 3"]

    def test_the_command_exits_with_one(
        self,
        tiny: RunConfig,
        tmp_path: Path,
        said: Callable[..., str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text(dump_yaml(tiny))
        words = ("rehearse", str(path), "--only", "data", "--worlds", "2,4", "--steps", "4")
        assert "go          data: stream at world size 4, " in said(*words)
        monkeypatch.setattr(
            "foundling.doctor.resume_proof.row_sums", lambda batch: [str(id(batch))]
        )
        with pytest.raises(SystemExit) as ended:
            said(*words)
        assert ended.value.code == 1
        assert "NO-GO: data (stream resumed)" in capsys.readouterr().out
        console.console.cache_clear()
