"""What is refused before anything is timed, and commands whose failure shows in their exit code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foundling.bench import train
from foundling.bench.loss_check import Portion, kept_reference
from foundling.bench.train import BenchOptions, bench_train
from foundling.cli.main import run_verb
from foundling.config.errors import DataError, UserError
from foundling.config.load import dump_yaml
from foundling.config.run import RunConfig
from foundling.profiling.step_runner import RandomRows

Command = Callable[..., int]


@pytest.fixture
def command(small: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`foundling bench KIND` of the small model, which fails where a model is built."""
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(small))

    def built(*_: Any, **__: Any) -> None:
        raise AssertionError("too late: a model was built")

    for room in ("train", "profile"):
        monkeypatch.setattr(f"foundling.bench.{room}.StepRunner", built)
    return lambda kind, *words: run_verb(["bench", kind, str(file), *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "kernels --only attention:math,attention:foo",
            "--only foo is unknown here; there are torch, math",
        ),
        ("kernels --only loss:foo", "--only foo is unknown here; there are plain, fused"),
        (
            "kernels --only attention,optimizer:foo",
            "--only foo is unknown here; there are adamw loop,",
        ),
        (
            "kernels --only attention --train.kernels.attention math",
            "--train.kernels.attention has no effect where every",
        ),
        (
            "kernels --only loss --train.kernels.loss plain",
            "--train.kernels.loss has no effect where every loss",
        ),
        (
            "kernels --only attention --train.batch-size auto",
            "train.batch_size is left to the plan",
        ),
        ("kernels --only loss --train.batch-size auto", "train.batch_size is left to the plan"),
        ("kernels --only loss --model.vocab-size 0", "model.vocab_size is 0 and no data says it"),
        (
            "kernels --only optimizer --model.vocab-size 0",
            "model.vocab_size is 0 and no data says it",
        ),
        (
            "kernels --only attention --parallel.tensor 2",
            "parallel.tensor is 2 and this bench measures",
        ),
        (
            "kernels --only optimizer --parallel.shard 2",
            "parallel.shard is 2 and this bench measures one",
        ),
        ("kernels --only optimizer --batch 4", "--batch has no effect on an optimizer"),
        ("kernels --only mlp", "--only mlp is unknown here; there are attention, loss, opt"),
        ("kernels --only loss:", "--only loss: is unknown here"),
        ("train --profile --memory", "--memory has no effect with --profile; leave one"),
        ("train --profile --against x", "--against has no effect with --profile"),
        ("train --memory --steps 3", "--steps has no effect with --memory"),
        ("train --layouts all --batch 3", "--batch has no effect with --layouts"),
        ("train --profile --batch best", "--batch best has no effect with --profile"),
        ("train --trace x", "--trace has no effect without --profile"),
        ("train --batch -3", "--batch -3 is below zero"),
        ("train --steps 1e3000", "--steps 1e3000 is not a whole number"),
        ("train --memory --snapshot x.pickle", "--snapshot is of CUDA's allocator"),
        ("train --record run.yaml/x.json", "--record run.yaml/x.json cannot be written"),
        ("train --reference run.yaml/x", "--reference run.yaml/x cannot be written"),
        ("train --reference run.yaml", "run.yaml is no reference"),
        ("train --check-data nowhere", "nowhere"),
        ("train --profile --trace run.yaml/x", "--trace run.yaml/x cannot be written"),
        ("train --profile --trace .", r"--trace \. cannot be written"),
        *(
            (f"train --check-steps 0 {option}", f"{option.split()[0]} has no effect with --check-s")
            for option in (
                "--check-data x",
                "--reference x",
                "--tolerance 0.1",
                "--check-rows 4",
            )
        ),
    ],
)
def test_a_mistake_is_named_before_anything_is_built(
    command: Command,
    words: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        command(*words.split())
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"], "nothing is left behind"


@pytest.mark.parametrize("best", [True, False])
def test_anothers_reference_is_refused_first(
    small: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: bool
) -> None:
    file = tmp_path / "reference.json"
    kept_reference(file, small, RandomRows(300, 32, 1), [Portion(1, 1)])
    monkeypatch.setattr(train, "StepRunner", None)
    other = small.replace(optim={"lr": 0.5})
    with pytest.raises(DataError, match="reference of another model"):
        bench_train(other, BenchOptions(best=best, reference=file))
    if not best:  # the same model, on another text
        with pytest.raises(DataError, match="reference of another model"):
            bench_train(small, BenchOptions(check_steps=1, reference=file))


@pytest.mark.parametrize(
    "course",
    [[], {}, {"foo": 1}, *({"losses": bad, "grad_norm": 1.0, "groups": {}} for bad in ([], ["a"]))],
)
def test_a_damaged_reference_is_refused_first(
    small: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, course: Any
) -> None:
    file = tmp_path / "reference.json"
    file.write_text(json.dumps({"key": "", "model": "", "device": "", "course": course}))
    monkeypatch.setattr(train, "StepRunner", None)
    with pytest.raises(DataError, match="is no reference; give another --reference"):
        bench_train(small, BenchOptions(check_steps=1, reference=file))


def test_a_loss_that_nobody_can_compute_fails(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command("kernels", "--only", "loss:torch", "--train.z-loss", "0.1")
    assert ended.value.code == 1
    assert "no loss could be measured; the lines above say why" in capsys.readouterr().err
