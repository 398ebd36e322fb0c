"""A rehearsal: which stages there are, what counts as proved, and that nothing is waved through."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foundling.checkpoint.retention import latest
from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError, RunError
from foundling.config.load import load_config
from foundling.config.run import RunConfig
from foundling.doctor import rehearse, resume_proof
from foundling.doctor.rehearse import (
    Point,
    RehearsalMachine,
    cut,
    falling_point,
    first_point,
    memory_point,
    mesh_size,
    stages_of,
    tiny,
    verdict,
)
from foundling.doctor.resume_proof import Finding
from foundling.plan.hardware import find_gpu
from foundling.runtime.run_dir import RunDir

CPU = RehearsalMachine(gpus=0, gpu=find_gpu("cpu"), flops=1e11, memory=8 << 30)
ONE_H200 = RehearsalMachine(gpus=1, gpu=find_gpu("h200"), flops=8e14, memory=139 << 30)
LONG = 1e9


def names(config: RunConfig, bench: RehearsalMachine) -> dict[str, str]:
    return {s.name: s.obstacle or s.same_as for s in stages_of(config, bench, LONG)}


class TestStages:
    def test_a_laptop_rehearses_what_it_can_and_names_the_rest(self, tiny: RunConfig) -> None:
        config = tiny.replace(parallel={"shard": 32, "replicate": 2})
        found = names(config, CPU)
        assert list(found) == ["tiny on a CPU", "one process", "two processes", "the full mesh"]
        assert found["the full mesh"].startswith("it needs 64 processes")
        assert not any(list(found.values())[:3])

    def test_a_config_for_gpus_is_still_tried_as_a_toy(self, tiny: RunConfig) -> None:
        config = tiny.replace(train={"device": "cuda", "dtype": "bf16"})
        first, *others = stages_of(config, CPU, LONG)
        assert first.obstacle == ""
        assert (first.config.train.device, first.config.train.dtype) == ("cpu", "fp32")
        assert {stage.obstacle for stage in others} == {
            "train.device is cuda and torch finds no GPU here"
        }
        auto = tiny.replace(train={"dtype": "bf16"})
        assert stages_of(auto, CPU, LONG)[1].config.train.dtype == "fp32"

    def test_a_run_with_a_parent_has_a_toy_without_and_no_horizon_of_its_own(
        self, tiny: RunConfig
    ) -> None:
        branch = tiny.replace(train={"start": "runs/base@6", "start_with": "everything"})
        toy, one, *_ = stages_of(branch, CPU, LONG)
        assert (toy.config.train.start, toy.config.train.is_branch) == ("", False)
        assert (one.config.train.start, one.config.train.is_branch) == ("runs/base@6", False)

    def test_one_gpu_has_no_pair(self, tiny: RunConfig) -> None:
        config = tiny.replace(train={"device": "auto"})
        found = names(config, ONE_H200)
        assert found["one GPU"] == ""
        assert found["two GPUs"] == "it needs 2 processes and this machine has 1 GPUs"
        assert found["the full mesh"] == "one GPU", "replicate 0 is every GPU, which is one"

    def test_the_pair_is_spread_as_the_run_is(self, tiny: RunConfig) -> None:
        for degrees in ({"shard": 4}, {"tensor": 4}, {"replicate": 4}):
            config = tiny.replace(model={"heads": 4}, parallel=degrees)
            pair, mesh = stages_of(config, CPU, LONG)[2:]
            [name] = degrees
            assert getattr(pair.config.parallel, name) == 2
            assert (pair.processes, mesh.processes) == (2, 4)
        sharded = tiny.parallel.replace(shard=4, reshard=False, param_dtype="bf16")
        [_, one, pair, _] = stages_of(tiny.replace(parallel=sharded), CPU, LONG)
        assert (one.config.parallel.reshard, one.config.parallel.param_dtype) == (True, "fp32")
        assert not pair.config.parallel.reshard
        [*_, mesh] = stages_of(tiny.replace(parallel={"shard": 2}), CPU, LONG)
        assert mesh.same_as == "two processes"

    def test_what_does_not_fit_or_takes_too_long_is_not_run(self, tiny: RunConfig) -> None:
        wide = tiny.model.replace(dim=8192, ffn_dim=32768, layers=80, heads=64)
        stage = stages_of(tiny.replace(model=wide), CPU, LONG)[1]
        assert "a process needs" in stage.obstacle
        slow = replace(CPU, flops=1e3)
        assert "raise --limit" in stages_of(tiny, slow, 600.0)[1].obstacle

    @pytest.mark.parametrize("name", ["llama-1.24b", "depth-12", "tinygpt-524m", "qwen2-0.5b-gpt2"])
    def test_every_kind_of_model_has_a_toy(self, name: str) -> None:
        config = tiny(load_config(name, {"train.batch-size": "4", "train.horizon": "100"}))
        assert config.model.dim <= 64
        assert config.train.device == "cpu"

    def test_the_batch_is_cut_and_never_grown(self, tiny: RunConfig) -> None:
        large = tiny.replace(train={"global_batch_tokens": 1 << 20})
        assert cut(large, 2).train.global_batch_tokens == 2 * 2 * 4 * 64
        assert cut(tiny, 2).train.global_batch_tokens == 2 * 4 * 64
        assert mesh_size(tiny.parallel, replace(ONE_H200, gpus=8)) == 8


class TestPoints:
    def test_the_first_loss_must_be_the_planned_one(self, tiny: RunConfig) -> None:
        config = tiny.replace(model={"vocab_size": 400})
        assert first_point("x", 6.05, config).state == "go"
        assert first_point("x", 6.4, config).state == "no-go"
        child = config.replace(train={"start": "runs/other"})
        assert first_point("x", 6.4, child).state == "not proved"

    def test_the_loss_must_fall(self) -> None:
        assert falling_point("x", [3.0, 2.9, 2.8], is_fresh=True).state == "go"
        assert falling_point("x", [3.0, 3.0, 3.01], is_fresh=True).state == "no-go"
        assert falling_point("x", [3.0, 3.0, 3.01], is_fresh=False).state == "go"
        assert falling_point("x", [3.0, 3.0, 4.0], is_fresh=False).state == "no-go"

    def test_memory_above_the_plan_is_no_go(self) -> None:
        assert memory_point("x", 100e6, 130e6).state == "no-go"
        assert memory_point("x", 100e6, 110e6).state == "go"

    def test_what_was_not_run_is_never_a_pass(self) -> None:
        go, failed = Point("a", "b", "go", ""), Point("c", "d", "no-go", "")
        unproved = Point("e", "everything", "not proved", "not run")
        assert verdict([go], strict=True) == (True, "GO: all 1 points are proved")
        assert verdict([go, failed, unproved], strict=False)[0] is False
        is_go, last = verdict([go, unproved], strict=False)
        assert is_go
        assert "not proved here: e (everything)" in last
        assert verdict([go, unproved], strict=True)[0] is False
        assert verdict([unproved], strict=False)[0] is False, "nothing at all was proved"


class TestCommand:
    @pytest.fixture
    def file(self, tiny: RunConfig, tmp_path: Path) -> str:
        from foundling.config.load import dump_yaml

        path = tmp_path / "mine.yaml"
        path.write_text(dump_yaml(tiny))
        return str(path)

    def test_a_stage_that_fails_ends_with_one(
        self, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuses(*_: Any, **__: Any) -> list[Finding]:
            raise RunError("the rehearsal could not train: the disk is full.")

        monkeypatch.setattr(rehearse, "prove_resume", refuses)
        with pytest.raises(SystemExit) as ended:
            run_verb(["rehearse", file, "--only", "tiny"])
        assert ended.value.code == 1
        out = capsys.readouterr().out
        assert "no-go       tiny on a CPU: training, the rehearsal could not train" in out
        assert "not proved  two processes: everything, not run: not asked for" in out
        assert out.rstrip().endswith("NO-GO: tiny on a CPU (training)")

    def test_mistakes_are_named(self, file: str) -> None:
        with pytest.raises(ConfigError, match="--only three is no stage or proof; there are tiny"):
            run_verb(["rehearse", file, "--only", "three"])
        with pytest.raises(ConfigError, match="--nproc has no effect without --only resume"):
            run_verb(["rehearse", file, "--nproc", "2"])
        with pytest.raises(ConfigError, match="--worlds has no effect without --only data"):
            run_verb(["rehearse", file, "--only", "resume", "--worlds", "2"])
        with pytest.raises(ConfigError, match="--steps 3 is too few"):
            run_verb(["rehearse", file, "--steps", "3"])
        with pytest.raises(ConfigError, match=r"data\.sources is empty"):
            run_verb(["rehearse", "hamlet"])
        with pytest.raises(ConfigError, match="--nproc 99999 is more than"):
            run_verb(["doctor", file, "--nproc", "99999"])
        with pytest.raises(ConfigError, match="--nproc 99999 is more than"):
            run_verb(["bench", "train", file, "--layouts", "all", "--nproc", "99999"])
        with pytest.raises(ConfigError, match="no layout could be measured"):
            run_verb(["bench", "train", file, "--nproc", "1", "--layouts", "ddp"])
        with pytest.raises(ConfigError, match="--node needs --run RUN"):
            run_verb(["doctor", "--node"])
        with pytest.raises(ConfigError, match=r"TARGET \S+ has no effect with --node"):
            run_verb(["doctor", file, "--node", "--run", "x"])
        with pytest.raises(ConfigError, match=r"--train\.horizon has no effect with --node"):
            run_verb(["doctor", "--node", "--run", "x", "--train.horizon", "3"])
        with pytest.raises(ConfigError, match="--gpus has no effect without --node"):
            run_verb(["doctor", file, "--gpus", "1"])
        with pytest.raises(ConfigError, match="settings need a TARGET"):
            run_verb(["doctor", "--train.horizon", "3"])
        with pytest.raises(ConfigError, match="nowhere"):
            run_verb(["doctor", "nowhere"])
        with pytest.raises(ConfigError, match="--layouts zero"):
            run_verb(["bench", "train", file, "--layouts", "zero"])


def test_a_kill_before_the_first_save_proves_nothing_and_is_done_again(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that begins anew is equal to itself: only one that goes on from a save is a proof."""
    trainer = resume_proof._Trainer(tmp_path / "config.yaml", None, None)
    run, kills = RunDir(tmp_path / "run"), 0

    def killed(self: Any, run: RunDir, step: int) -> int:
        nonlocal kills
        kills += 1
        return -9

    monkeypatch.setattr(resume_proof._Trainer, "_killed_after", killed)
    with pytest.raises(RunError, match="could be killed after a save"):
        trainer.kill_in_between(run, tiny)
    assert kills == resume_proof.TRIES
    assert latest(run.checkpoints) is None
