"""The doctor's checks of a target: disk, data, checkpoints, a trial step."""

from pathlib import Path

import pytest

from foundling.checkpoint.folders import list_checkpoints, step_of
from foundling.checkpoint.remote import open_folder
from foundling.config.run import EvalConfig, RunConfig
from foundling.doctor import short_run, storage
from foundling.doctor.checks import CheckResult, Notes, asked_about
from foundling.profiling.step_runner import Timed
from foundling.runtime.run_dir import RunDir
from foundling.train.loop import train

NO_NOTES = Notes(asked_about(None), lambda _: None, "test")


class TestDisk:
    def test_a_disk_that_is_too_small_is_told_before_the_third_night(
        self, tiny: RunConfig, tmp_path: Path
    ) -> None:
        home = tmp_path / "run" / "checkpoints"
        needed, count, each = storage.needed_bytes(tiny, home)
        assert count == tiny.checkpoint.keep + 1
        assert needed == count * each
        line = storage.room_line(tiny, home, lambda _: needed - 1)
        assert line.level == "fail"
        assert "lower checkpoint.keep" in line.text
        assert storage.room_line(tiny, home, lambda _: needed + 1).level == "warn"
        assert storage.room_line(tiny, home, lambda _: 2 * needed).level == "pass"

    def test_every_rule_that_keeps_is_counted(self, tiny: RunConfig, tmp_path: Path) -> None:
        keeping = tiny.checkpoint.replace(keep=3, keep_best=2, keep_every=2)
        config = tiny.replace(checkpoint=keeping)
        _, count, _ = storage.needed_bytes(config, tmp_path)
        assert count == 3 + 2 + 1 + 8 // 2
        for number in range(4):
            (tmp_path / f"step-{number:08d}").mkdir()
        needed, _, each = storage.needed_bytes(config, tmp_path)
        assert needed == (count - 4) * each, "those that are there take no more room"

    def test_a_disk_slower_than_the_ranks_wait_is_told(self) -> None:
        slow = storage.rate_line("1 MB a second", 1e6, 700_000_000)
        assert slow.level == "warn"
        assert "set checkpoint.folder to a faster disk" in slow.text
        assert storage.rate_line("1 MB a second", 1e6, 500_000_000).level == "pass"

    def test_the_rate_is_of_bytes_on_disk_and_leaves_none(self, tmp_path: Path) -> None:
        assert storage.write_rate(tmp_path, most=4 << 20) > 0
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_while_it_is_measured_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(_: Path) -> float:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(storage, "write_rate", full)
        *_, line = storage.check_disk(asked_about(None, tmp_path), NO_NOTES)
        assert line.level == "fail"
        assert "No space left on device" in line.text

    def test_a_remote_folder_is_written_to_and_cleaned(self, tiny: RunConfig) -> None:
        config = tiny.replace(checkpoint={"folder": "memory://doctor"})
        [line] = storage.check_disk(asked_about(config, Path("runs/mine")), NO_NOTES)
        assert line.level == "pass", line.text
        assert not list(open_folder("memory://doctor/mine").iterdir())


class TestStored:
    @pytest.fixture
    def run(self, tiny: RunConfig, tmp_path: Path) -> RunDir:
        run = RunDir(tmp_path / "run")
        train(tiny.replace(eval=EvalConfig(every=0)), run)
        assert len(list_checkpoints(run.checkpoints)) == 2
        return run

    def damage(self, folder: Path) -> None:
        file = max(folder.iterdir(), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    def lines(self, config: RunConfig, run: RunDir) -> list[CheckResult]:
        found = storage.check_stored(asked_about(config, run.path), NO_NOTES)
        return [line for line in found if line.check == "checkpoints"]

    def test_a_flipped_bit_in_the_newest_is_told_and_in_all_is_a_failure(
        self, tiny: RunConfig, run: RunDir
    ) -> None:
        [line] = self.lines(tiny, run)
        assert "step 8" in line.text
        assert "every byte agrees" in line.text
        older, newest = list_checkpoints(run.checkpoints)
        self.damage(newest)
        [damaged, good] = self.lines(tiny, run)
        assert damaged.level == "warn"
        assert f"Training would go on from step {step_of(older)}" in damaged.text
        assert "fails its checksum" in damaged.text
        assert good.level == "pass"
        self.damage(older)
        [line] = self.lines(tiny, run)
        assert line.level == "fail"
        assert "none of the 2" in line.text

    def test_a_checkpoint_too_large_to_hash_now_is_not_called_whole(self, run: RunDir) -> None:
        [line] = storage.checkpoint_lines(run.checkpoints, 10)
        assert "--thorough hashes" in line.text

    def test_data_that_is_missing_or_not_enough_is_refused(
        self, tiny: RunConfig, tmp_path: Path
    ) -> None:
        [one, enough] = storage.data_lines(tiny, thorough=True)
        assert "every checksum right" in one.text
        assert "enough for 8 steps" in enough.text
        long = tiny.replace(train={"horizon": 100_000})
        *_, line = storage.data_lines(long, thorough=False)
        assert line.level == "fail"
        assert "allow_repeat" in line.text
        gone = tiny.replace(data={"sources": {str(tmp_path / "no"): 1.0}})
        [line] = storage.data_lines(gone, thorough=False)
        assert line.level == "fail"

    def test_a_parent_that_is_not_there_is_refused(self, run: RunDir, tmp_path: Path) -> None:
        assert storage.parent_line(f"{run.path}@8").level == "pass"
        assert storage.parent_line(f"{run.path}@7").level == "fail"
        assert storage.parent_line(str(tmp_path / "nobody")).level == "fail"


class TestTrial:
    @pytest.fixture(autouse=True)
    def alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("RANK", raising=False)

    def test_the_target_steps_and_pays_what_it_must(self, tiny: RunConfig) -> None:
        many = tiny.replace(parallel={"shard": 8})
        [line] = short_run.check(asked_about(many), NO_NOTES)
        assert line.level == "pass", line.text
        assert abs(line.facts["loss"] - line.facts["planned"]) < 0.1

    def test_a_model_that_is_too_large_is_not_even_tried(self, tiny: RunConfig) -> None:
        wide = tiny.model.replace(dim=16384, ffn_dim=65536, layers=200, heads=64)
        [line] = short_run.check(asked_about(tiny.replace(model=wide)), NO_NOTES)
        assert line.level == "warn"
        assert "not taken: a process would hold" in line.text
        [line] = short_run.check(asked_about(tiny, limit_s=1e-9), NO_NOTES)
        assert "raise --limit" in line.text

    def test_a_loss_that_is_not_the_planned_one_is_a_failure(self, tiny: RunConfig) -> None:
        config = tiny.replace(model={"vocab_size": 400})

        def line(first: float, later: float) -> CheckResult:
            steps = (Timed(step_s=[1.0], losses=[first]), Timed(step_s=[0.1], losses=[later]))
            return short_run.step_line(*steps, config, 1)

        assert line(6.06, 6.0).level == "pass"
        assert "0.100 s a step (the first 1.0 s)" in line(6.06, 6.0).text
        assert "was planned" in line(6.4, 6.0).text
        assert "not finite" in line(6.06, float("nan")).text
