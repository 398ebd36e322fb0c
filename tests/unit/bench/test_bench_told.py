"""What a bench times and says: micro-batches, documents, kernels that were chosen, arithmetic."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foundling.bench import batch_size
from foundling.bench.baselines import line_of, recorded
from foundling.bench.bench_rows import text_rows
from foundling.bench.loss_check import Portion
from foundling.bench.profile import bench_memory, bench_profile
from foundling.bench.train import BenchOptions, bench_train, describe_train, how_it_ran
from foundling.config.load import load_config
from foundling.config.run import RunConfig
from foundling.data.batch import IGNORE
from foundling.plan.hardware import TABLE
from foundling.plan.layout import MeshLayout
from foundling.plan.params import flops_per_token
from foundling.plan.speed import plan_speed
from foundling.plan.workload import works_of
from foundling.profiling import step_runner
from foundling.profiling.step_runner import StepRunner, random_rows, tell_chosen
from foundling.runtime.device import DeviceChoice
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.train.autotune import harness
from foundling.train.loop import train
from tests.unit.bench.changed import set_in

CPU = torch.device("cpu")
TF32 = DeviceChoice(CPU, torch.float32, "", "tf32")


@pytest.fixture
def masked(small: RunConfig) -> RunConfig:
    return set_in(small, "data", document_mask=True)


@pytest.fixture
def eaten(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Rows of every micro-batch of every step that we take."""
    found: list[list[int]] = []
    right = StepRunner.step

    def take(self: StepRunner, batches: Any, *args: Any, **how: Any) -> Any:
        if self.config.train.kernels.loss == "fused":  # the reference's is plain
            found.append([len(batch.inputs) for batch in batches])
        return right(self, batches, *args, **how)

    monkeypatch.setattr(StepRunner, "step", take)
    return found


def test_the_check_accumulates_where_the_timed_steps_do(
    small: RunConfig, eaten: list[list[int]]
) -> None:
    bench = bench_train(small, BenchOptions(steps=1, micro_steps=3, check_steps=3))
    assert eaten[:3] == [[4, 4], [2, 2], [2, 2]]
    assert eaten[3:] == [[4, 4, 4]] * 4
    assert bench.check is not None
    assert bench.check.problems == []
    assert "step 1 of 2 x 4 rows and 2 of 2 x 2," in "\n".join(describe_train(bench))


def test_accumulation_that_loses_a_micro_batch_is_caught(
    small: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a gradient in a graph's memory that the next launch overwrites."""
    right = StepRunner.step

    def take(self: StepRunner, batches: Any, *args: Any, **how: Any) -> Any:
        ours = self.config.train.kernels.loss == "fused"
        return right(self, batches[-1:] if ours else batches, *args, **how)

    monkeypatch.setattr(StepRunner, "step", take)
    assert bench_train(small, BenchOptions(steps=1, check_steps=3)).check.problems == []  # type: ignore[union-attr]
    found = bench_train(small, BenchOptions(steps=1, check_steps=3, micro_steps=8)).check
    assert found is not None
    assert any("gradient norm" in problem for problem in found.problems)


@pytest.mark.parametrize(
    ("rows", "micro_steps", "check_rows", "first", "later"),
    [
        (32, 1, 4, (1, 32), (1, 4)),
        (32, 8, 4, (2, 32), (2, 2)),
        (32, 8, 1, (2, 32), (2, 1)),
        (1, 8, 4, (2, 1), (2, 1)),
        (32, 2, 0, (2, 32), (2, 32)),
    ],
)
def test_portions_of_the_check(
    rows: int, micro_steps: int, check_rows: int, first: Any, later: Any
) -> None:
    found = BenchOptions(check_steps=3, check_rows=check_rows).portions(rows, micro_steps)
    assert found == [Portion(*first), Portion(*later), Portion(*later)]
    assert BenchOptions(check_steps=0).portions(rows, micro_steps) == []


def test_micro_steps_of_the_global_batch_follow_the_size_that_is_tried(
    small: RunConfig, eaten: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = set_in(small, "train", global_batch_tokens=24 * 32, batch_size=8)
    monkeypatch.setattr(batch_size, "best_batch", lambda measure: {n: measure(n) for n in (24, 12)})
    bench = bench_train(config, BenchOptions(best=True, micro_steps=0, steps=1, check_steps=0))
    assert [24] in eaten
    assert [12, 12] in eaten
    assert not any(len(step) == 3 for step in eaten), "those of eight rows"
    assert bench.ours.rows * bench.ours.micro_steps == 24


@pytest.mark.parametrize("rows", [random_rows, lambda config: text_rows(config, None, 20)])
def test_masked_rows_have_several_documents(
    small: RunConfig, masked: RunConfig, rows: Callable[[RunConfig], Any]
) -> None:
    assert rows(small).batch(0, 4).documents.max() == 0
    made = rows(masked)
    batch, halves = made.batch(4, 4), [made.batch(4, 2), made.batch(6, 2)]
    assert "in documents of an eighth to a half of a row" in made.name
    np.testing.assert_array_equal(
        batch.documents, np.concatenate([half.documents for half in halves])
    )
    for row, targets in zip(batch.documents, batch.targets, strict=True):
        lengths = np.bincount(row)
        assert 2 <= len(lengths) <= 8
        assert 4 <= lengths[:-1].min() <= lengths.max() <= 16
        ends = np.flatnonzero(row[1:] != row[:-1])
        assert (targets[ends] == IGNORE).all()
        assert (targets == IGNORE).sum() == len(ends)
    assert batch.counts.targets == (batch.targets != IGNORE).sum()


def test_a_masked_config_is_timed_and_checked_with_its_mask(masked: RunConfig) -> None:
    bench = bench_train(masked, BenchOptions(steps=1, check_steps=3))
    assert bench.check is not None
    assert bench.check.problems == []
    assert "in documents" in bench.check.text
    text = "\n".join(describe_train(bench))
    assert "random tokens in documents" in text
    assert "masked attention torch" in text


def test_chosen_kernels_are_told_and_a_fallback_is_a_warning(
    small: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = ["attention by flash (launched)", "masked attention by math (WARNING: slow)"]
    right = step_runner.autotune
    monkeypatch.setattr(step_runner, "autotune", lambda *given: (right(*given)[0], lines))
    once = BenchOptions(steps=1, check_steps=0)
    for bench in (
        lambda tell: bench_train(small, once, tell),
        lambda tell: bench_profile(small, tmp_path / "trace", steps=1, quick=True, tell=tell),
        lambda tell: bench_memory(small, None, tell),
        lambda tell: tell_chosen(lines, tell),
    ):
        told: list[str] = []
        bench(told.append)
        assert "chosen: attention by flash (launched)" in told
        assert not any("WARNING" in line for line in told)
        warned = capsys.readouterr().err
        assert warned.count("warning: masked attention by math (WARNING: slow)") == 1


def test_what_ran_is_named() -> None:
    config = set_in(
        load_config("depth-12", {}),
        "train",
        kernels={"attention": "flash", "attention_masked": "flex"},
    )
    for compiled, said in (("graphs", "CUDA graphs"), ("blocks", "blocks compiled,")):
        how = how_it_ran(set_in(config, "train", compile=compiled), TF32)
        assert said in how
        assert "fp32 weights, tf32 products" in how
    assert ("CUDA graphs" in how) is False
    plain = load_config("llama-1.24b", {"train.compile": "off", "train.kernels.attention": "flash"})
    how = how_it_ran(plain, DeviceChoice(CPU, torch.bfloat16, "", "bf16"))
    assert how.startswith("fp32 weights, bf16 products, eager,")
    assert "attention flash" in how
    assert "masked" not in how
    windowed = set_in(config, "model", windows=(64, 64, 64, 0))
    assert "masked attention flex" in how_it_ran(set_in(windowed, "train", compile="off"), TF32)
    assert "was not measured" in how_it_ran(plain, TF32, ["compile off (not measured)"])


def test_a_cpus_compile_mode_that_was_not_measured_is_said_so(small: RunConfig) -> None:
    auto = set_in(small, "train", compile="auto")
    bench = bench_train(auto, BenchOptions(steps=1, check_steps=0))
    assert "compile auto was not measured" in bench.ours.how
    named = bench_train(set_in(small, "train", compile="off"), BenchOptions(steps=1, check_steps=0))
    assert "not measured" not in named.ours.how


@pytest.mark.parametrize(
    ("gpu", "dtype", "peak"),
    [
        ("NVIDIA H200", "tf32", 494.7e12),
        ("NVIDIA H200", "fp32", 66.9e12),
        ("NVIDIA H200", "bf16", 989.4e12),
        ("Tesla T4", "fp16", 65e12),
        ("Tesla T4", "tf32", 8.1e12),
    ],
)
def test_mfu_is_over_the_peak_of_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch, gpu: str, dtype: str, peak: float
) -> None:
    monkeypatch.setattr(harness, "device_name", lambda _: gpu)
    widths = {"bf16": torch.bfloat16, "fp16": torch.float16}
    choice = DeviceChoice(torch.device("cuda"), widths.get(dtype, torch.float32), "", dtype)
    assert (harness.sheet_peak(choice) or (0, ""))[0] == pytest.approx(peak)


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_a_run_a_bench_and_a_plan_mean_one_thing_by_mfu(
    name: str, tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time taken out of it, a position of the same model is worth the same share of an H200 in
    all three; without a data sheet none of them has any, and `matmul_share` is there."""
    named = {"h200": "NVIDIA H200", "cpu": "Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz"}
    monkeypatch.setattr(harness, "device_name", lambda _: named[name])
    config = set_in(tiny, "train", device="cpu", dtype="fp32", horizon=1, compile="off")
    config = set_in(set_in(config, "eval", every=0, tokens=65536), "model", vocab_size=400)
    run, positions = RunDir(tmp_path / "run"), 4 * 64
    train(config, run)
    (line,) = read_lines(run.metrics_path)
    assert line["positions"] == positions
    ours = bench_train(config, BenchOptions(steps=1, check_steps=0)).ours
    gpu = TABLE[name]
    speed = plan_speed(works_of(config, MeshLayout(), gpu)[0], gpu)
    shares = [line.get("mfu"), ours.mfu, speed.mfu]
    assert line["matmul_share"] > 0
    assert ours.matmul_share > 0
    if name == "cpu":
        assert shares == [None] * 3
        assert "mfu" not in speed.to_json() | line
        return
    worth = flops_per_token(config.model, 64) / 66.9e12
    rates = [positions / line["step_s"], ours.tokens_per_s, speed.tokens_per_s]
    assert shares == [pytest.approx(rate * worth, rel=2e-3) for rate in rates]


def test_the_docs_example_has_a_figure_to_be_held_to() -> None:
    docs = Path(__file__).parents[3] / "docs"
    held = [
        line.split()[3:]
        for line in (docs / "bench.md").read_text().splitlines()
        if line.startswith("    foundling bench train")
        and "--against docs/performance.json" in line
    ]
    assert held
    for target, *words in held:
        given = dict(zip(words[::2], words[1::2], strict=True))
        line = line_of(target, {}, batch=given["--batch"], device="NVIDIA H200")
        assert recorded(docs / "performance.json", line)["tokens_per_s"] > 0
