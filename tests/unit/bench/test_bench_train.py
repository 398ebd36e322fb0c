"""`bench train`: the trainer's own steps, a check that catches what does not learn, figures."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foundling.bench import train
from foundling.bench.baselines import held_to, line_of, read_figures, record, recorded
from foundling.bench.batch_size import alone, cap_memory, try_sizes
from foundling.bench.bench_rows import DataRows, text_rows
from foundling.bench.loss_check import (
    Check,
    Course,
    Portion,
    course,
    gaps,
    kept_reference,
    plain,
    reference_course,
)
from foundling.bench.train import BenchOptions, TrainBench, bench_train, describe_train
from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError, DataError, RunError
from foundling.config.load import dump_yaml
from foundling.config.run import RunConfig
from foundling.model.loss import _HeadLoss
from foundling.plan.params import flops_per_token
from foundling.profiling.step_runner import BenchRows, RandomRows, StepRunner
from foundling.runtime.device import choose_device
from tests.village import Village

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench(small: RunConfig) -> TrainBench:
    return bench_train(small, BenchOptions(steps=3, check_steps=6, check_rows=2, micro_steps=2))


def test_what_is_told_follows_from_what_was_measured(bench: TrainBench, small: RunConfig) -> None:
    ours = bench.ours
    assert ours.tokens_per_s == pytest.approx(2 * 4 * 32 / ours.step_s)
    flops = flops_per_token(small.model, 32)
    assert ours.mfu is None, "a CPU has no data sheet"
    assert "mfu" not in json.dumps([bench.figure(), bench.to_json()["results"]])
    assert ours.matmul_share == pytest.approx(ours.tokens_per_s * flops / bench.matmul_flops)
    assert ours.first_step_s > ours.step_s
    assert ours.reserved >= ours.allocated > 0
    text = "\n".join(describe_train(bench))
    assert f"{flops:,} FLOP a token at T 32" in text
    assert "(6 N + 12 L D T)" in text
    assert "4 x 2" in text
    assert json.loads(json.dumps(bench.to_json()))["check"]["problems"] == []


def test_the_trainer_and_its_reference_agree(bench: TrainBench) -> None:
    check = bench.check
    assert check is not None
    assert check.problems == []
    assert check.rows == (Portion(2, 4), Portion(2, 1))
    assert len(check.ours.losses) == len(check.reference.losses) == 6
    assert check.ours.losses == pytest.approx(check.reference.losses, rel=1e-5)
    assert check.ours.groups.keys() == {"embedding", "norm", "matrix"}
    assert len(set(check.ours.losses)) == 6, "the weights move"


def checked(config: RunConfig, rows: BenchRows) -> Check:
    portions = [Portion(2, 2), *[Portion(1, 2)] * 7]
    ours = course(StepRunner(config, choose_device("cpu", "fp32")), rows, portions)
    loss_gap, grad_gap = gaps(config, torch.float32, None)
    return Check(
        text="text",
        rows=(portions[0], portions[-1]),
        ours=ours,
        reference=reference_course(config, rows, portions),
        loss_gap=loss_gap,
        grad_gap=grad_gap,
    )


@pytest.mark.parametrize("share", [0.0, 2.0])
def test_gradients_that_are_wrong_are_not_believed(
    small: RunConfig, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """The trap: a loss whose gradients had become zeros ran 12% faster."""
    right = _HeadLoss.backward

    def wrong(ctx: Any, grad: torch.Tensor) -> Any:
        return right(ctx, grad * share)

    monkeypatch.setattr(_HeadLoss, "backward", staticmethod(wrong))
    problems = checked(small, text_rows(small, None, 40)).problems
    assert any("gradient norm of all" in problem for problem in problems)
    if not share:
        assert any("after 8 steps the loss is" in problem for problem in problems)


def test_a_gradient_that_is_missing_in_one_group_is_named() -> None:
    good = Course([5.0, 4.0], 1.0, {"matrix": 0.8, "norm": 0.01})
    bad = Course([5.0, 4.0], 1.0, {"matrix": 0.8, "norm": 0.0})
    same = {"text": "", "rows": (Portion(1, 1),) * 2, "loss_gap": 0.01, "grad_gap": 0.05}
    assert Check(ours=good, reference=good, **same).problems == []  # type: ignore[arg-type]
    found = Check(ours=bad, reference=good, **same).problems  # type: ignore[arg-type]
    assert len(found) == 1
    assert "norm of norm is 0" in found[0]
    # A group whose gradient is nothing but rounding, as scalars of the depth recipe at first.
    for norm, problems in ((3e-5, 0), (1e-3, 1)):
        ours, plain = (Course([5.0, 4.0], 1.0, {"scalar": size}) for size in (norm, 2e-9))
        assert len(Check(ours=ours, reference=plain, **same).problems) == problems  # type: ignore[arg-type]
    broken = Course([5.0, float("nan")], float("nan"), good.groups)
    assert Check(ours=broken, reference=good, **same).problems  # type: ignore[arg-type]
    lost = Course([5.0, float("nan")], good.grad_norm, good.groups)
    assert Check(ours=good, reference=lost, **same).problems  # type: ignore[arg-type]


def test_the_reference_is_built_for_one_row(
    small: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are launched at a run's rows when it is built: all scores of eight long ones are more
    than a GPU holds."""
    built: list[RunConfig] = []

    def note(config: RunConfig, _: object) -> None:
        built.append(config)
        raise RuntimeError

    monkeypatch.setattr("foundling.bench.loss_check.StepRunner", note)
    many = small.replace(train={"batch_size": 8})
    with pytest.raises(RuntimeError):
        reference_course(many, RandomRows(64, 16, 1), [Portion(1, 8)])
    assert [config.train.batch_size for config in built] == [1]


def test_the_reference_has_nothing_clever(small: RunConfig) -> None:
    fast = small.replace(
        train={"compile": "blocks", "dtype": "bf16", "kernels": {"loss": "fused"}},
        parallel={"recompute": "all"},
    )
    simple = plain(fast)
    assert (simple.train.compile, simple.train.dtype) == ("off", "fp32")
    assert (simple.train.kernels.loss, simple.parallel.recompute) == ("plain", "none")
    long = fast.replace(train={"seq_len": 8192})
    assert plain(long).parallel.recompute == "all"
    assert simple.model == fast.model
    assert simple.train.seed == fast.train.seed


def test_a_row_is_its_number_whatever_the_micro_batch(small: RunConfig, village: Village) -> None:
    data = small.replace(model={"vocab_size": 400})
    for rows in (
        RandomRows(300, 32, 1),
        text_rows(small, None, 20),
        DataRows(village.text, data),
    ):
        whole, halves = rows.batch(5, 4), [rows.batch(5, 2), rows.batch(7, 2)]
        assert whole.inputs.shape == (4, 32)
        np.testing.assert_array_equal(
            whole.inputs, np.concatenate([half.inputs for half in halves])
        )
        counted = whole.targets[:, :-1] >= 0
        assert counted.mean() > 0.9
        np.testing.assert_array_equal(whole.inputs[:, 1:][counted], whole.targets[:, :-1][counted])
        assert whole.counts.targets == (whole.targets >= 0).sum()
        assert not np.array_equal(rows.batch(0, 1).inputs, rows.batch(1, 1).inputs)


def test_a_data_set_with_more_tokens_than_the_model_is_refused(
    small: RunConfig, village: Village
) -> None:
    with pytest.raises(DataError, match="vocabulary of 4"):
        DataRows(village.text, small)


def test_a_size_that_does_not_fit_is_passed_over(small: RunConfig) -> None:
    class Stepper(StepRunner):
        recovered = 0

        def timed(self, rows: Any, count: int, *, size: int, **how: Any) -> Any:
            if size > 8:
                raise torch.OutOfMemoryError("no room")
            return super().timed(rows, 1, size=size, warmup=0)

        def recover(self) -> None:
            self.recovered += 1
            super().recover()

    stepper = Stepper(small, choose_device("cpu", "fp32"))
    told: list[str] = []
    tried, age = try_sizes(stepper, RandomRows(300, 32, 1), lambda _: 1, told.append)
    assert tried.keys() == {8, 12, 16}
    assert (tried[12], tried[16]) == (None, None)
    assert stepper.recovered == 3, "before each try"
    assert age > 0
    assert told[1] == "16 rows do not fit"


def test_figures_are_kept_and_held_to(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "performance.json"
    line = line_of("llama-1.24b", {"train.seq-len": "8192"}, batch="best", device="H200")
    same = line_of("llama-1.24b", {"train.seq_len": "8192"}, batch="best", device="H200")
    assert str(line) == "llama-1.24b --train.seq_len 8192 --batch best on H200"
    other = line_of("llama-1.24b", {}, batch="best", device="H200")
    with pytest.raises(DataError, match="does not exist"):
        recorded(file, line)
    record(file, line, {"tokens_per_s": 900.0})
    record(file, other, {"tokens_per_s": 1.0})
    record(file, same, {"tokens_per_s": 1000.0, "commit": "abc", "torch": "2.11"})
    assert len(read_figures(file)) == 2, "the same line is replaced"
    assert held_to(971, recorded(file, line)).is_reached
    short = held_to(969, recorded(file, line))
    assert not short.is_reached
    assert "96.9%" in short.sentence
    assert "(commit abc, torch 2.11)" in short.sentence
    (entry,) = (e for e in json.loads(file.read_text())["figures"] if e["settings"])
    assert entry["target"] == "llama-1.24b"
    assert (entry["batch"], entry["device"], entry["tokens_per_s"]) == ("best", "H200", 1000.0)


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ({"target": "depth-12"}, "depth-12 --batch 32 --micro-steps 8 on H200"),
        ({"device": "A100"}, "clm-60m --batch 8 on H200"),
        ({"memory": 24.0}, "clm-60m --batch 8 on H200"),
        ({"settings": {"train.float8": "rowwise"}}, "clm-60m --batch 8 on H200"),
    ],
)
def test_a_line_without_a_figure_is_told_the_nearest(
    tmp_path: Path, asked: dict[str, Any], nearest: str
) -> None:
    file = tmp_path / "performance.json"
    for line in (
        line_of("clm-60m", {}, batch="8", device="H200"),
        line_of("clm-60m", {"train.float8": "tensorwise"}, batch="8", device="H200"),
        line_of("depth-12", {}, batch="32", micro_steps=8, device="H200"),
    ):
        record(file, line, {"tokens_per_s": 1.0})
    line = line_of(**{"target": "clm-60m", "settings": {}, "batch": "8", "device": "H200", **asked})
    with pytest.raises(DataError) as told:
        recorded(file, line)
    assert f"no figure for `{line}`" in str(told.value)
    assert f"nearer than `{nearest}`" in str(told.value)


@pytest.mark.parametrize("text", ["[]", "{", '{"schema": 1, "figures": {}}', '{"schema": 2}'])
def test_a_file_that_holds_no_figures_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "performance.json"
    file.write_text(text)
    with pytest.raises(DataError, match="no figures of schema 2"):
        read_figures(file)


def test_a_kept_reference_is_of_the_same_model_and_text(
    small: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, rows = tmp_path / "reference.json", RandomRows(300, 32, 1)
    portions = [Portion(1, 2), Portion(1, 1)]
    made, source = kept_reference(file, small, rows, portions)
    assert source == ""
    monkeypatch.setattr("foundling.bench.loss_check.reference_course", None)
    fast = small.replace(train={"compile": "blocks", "batch_size": 2})
    read, source = kept_reference(file, fast, rows, [Portion(2, 1), Portion(1, 1)])
    assert read == made
    assert str(file) in source
    other = small.replace(optim={"lr": 0.5})
    masked = small.replace(data={"document_mask": True})
    pulled = small.replace(train={"z_loss": 0.01})
    for config, text, steps in (
        (other, rows, portions),
        (masked, rows, portions),
        (pulled, rows, portions),
        (small, RandomRows(300, 32, 2), portions),
        (small, rows, [*portions, Portion(1, 1)]),
    ):
        with pytest.raises(DataError, match="another --reference"):
            kept_reference(file, config, text, steps)


def test_the_command_fails_below_the_recorded_figure(
    small: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = tmp_path / "run.yaml", tmp_path / "performance.json"
    run.write_text(dump_yaml(small))
    words = ["bench", "train", str(run), "--steps", "1", "--check-steps", "2"]
    run_verb([*words, "--record", str(file)])
    assert "recorded in" in capsys.readouterr().err
    ((line, figure),) = read_figures(file).items()
    assert figure["checked_steps"] == 2
    assert figure["checked_rows"] == str(min(4, small.train.batch_size))
    assert figure["torch"] == torch.__version__
    assert figure["commit"]
    record(file, line, {**figure, "tokens_per_s": figure["tokens_per_s"] / 100})
    run_verb([*words, "--against", str(file)])
    assert re.search(r"tokens/s are [\d.]+% of the recorded", capsys.readouterr().out)
    with pytest.raises(DataError, match="after a check of 2 steps, which is not alike"):
        run_verb([*words[:-1], "0", "--against", str(file)])
    record(file, line, {**figure, "tokens_per_s": figure["tokens_per_s"] * 100})
    with pytest.raises(SystemExit) as ended:
        run_verb([*words, "--against", str(file)])
    assert ended.value.code == 1
    with pytest.raises(DataError, match="has none nearer than"):
        run_verb([*words, "--micro-steps", "2", "--against", str(file)])


def test_dropout_is_timed_and_not_compared(small: RunConfig) -> None:
    dropped = small.replace(model={"dropout": 0.3})
    bench = bench_train(dropped, BenchOptions(steps=1, check_steps=3, check_rows=2))
    assert bench.check is not None
    assert bench.check.problems == []
    assert bench.check.text == "hamlet, without dropout"
    assert plain(dropped).model.dropout == 0
    # What the timed steps ran has it: the same tokens give another loss without.
    assert bench.ours.loss != bench_train(small, BenchOptions(steps=1, check_steps=0)).ours.loss


def test_the_check_may_read_a_data_set_and_the_clock_random_tokens(
    small: RunConfig, village: Village
) -> None:
    config = small.replace(model={"vocab_size": 400})
    asked = BenchOptions(steps=1, check_steps=3, check_rows=2, check_data=village.text)
    bench = bench_train(config, asked)
    assert bench.check is not None
    assert (bench.check.text, bench.data) == (str(village.text), "random tokens")
    assert bench.check.problems == []
    hamlet = bench_train(config, replace(asked, check_data=None)).check
    assert hamlet is not None
    assert hamlet.ours.losses != bench.check.ours.losses


def test_the_reference_is_not_held_to_a_small_cards_memory(
    small: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(train, "cap_memory", lambda _, gigabytes: told.append(f"{gigabytes:g} GB"))
    monkeypatch.setattr(train, "lift_cap", lambda _: told.append("all"))

    def reference(*_: Any) -> Any:
        told.append("reference")
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(train, "kept_reference", reference)
    with pytest.raises(RunError, match="give a --reference FILE"):
        bench_train(small, BenchOptions(steps=1, check_steps=1, memory=24))
    assert told == ["24 GB", "all", "reference", "24 GB"]


def test_mistakes_are_named(small: RunConfig) -> None:
    with pytest.raises(ConfigError, match="--limit-gb caps a GPU"):
        cap_memory(CPU, 24)
    cap_memory(CPU, 0)
    for section, changes, said in (
        ("parallel", {"shard": 2}, r"parallel\.shard is 2"),
        ("train", {"batch_size": 0}, "--batch best"),
        ("model", {"vocab_size": 0}, "--model.vocab-size"),
    ):
        wrong = small.replace(**{section: getattr(small, section).replace(**changes)})
        with pytest.raises(ConfigError, match=said):
            alone(wrong)
