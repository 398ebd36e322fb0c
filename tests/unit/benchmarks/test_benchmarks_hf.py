"""`benchmarks.train_hf`: transformers' trainer takes the steps that ours has taken."""

from typing import Any

import pytest
import torch

from benchmarks import with_transformers
from benchmarks.train_hf import compare, describe
from benchmarks.with_transformers import HfTrainer
from foundling.bench import batch_size
from foundling.bench.bench_rows import text_rows
from foundling.bench.loss_check import course_lr
from foundling.bench.train import BenchOptions
from foundling.config.errors import RunError
from foundling.config.run import RunConfig
from foundling.profiling.step_runner import WARM_UP, random_rows
from foundling.runtime.device import choose_device
from tests.unit.bench.changed import set_in


def test_the_contender_says_that_it_has_no_mask(small: RunConfig) -> None:
    pytest.importorskip("transformers")
    choice = choose_device("cpu", "fp32")
    masked = set_in(small, "data", document_mask=True)
    assert "causal over whole rows" in HfTrainer("hf", masked, choice).how
    assert "causal over whole rows" not in HfTrainer("hf", small, choice).how


def test_a_contender_clips_as_it_says(small: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    tight = set_in(small, "optim", clip=1e-3)
    other = HfTrainer("hf", tight, choose_device("cpu", "fp32"))
    norms: list[float] = []

    def step(*_: Any) -> None:
        grads = [param.grad for param in other.model.parameters()]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))

    monkeypatch.setattr(other.optimizer, "step", step)
    other.timed(random_rows(tight), 1, size=2, warmup=0)
    assert "gradients clipped" in other.how
    assert norms == [pytest.approx(1e-3, rel=1e-3)]


@pytest.mark.parametrize("check_steps", [0, 3])
def test_a_contender_is_timed_on_weights_that_have_learnt_as_much(
    check_steps: int, small: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    seen: list[tuple[int, float, Any]] = []
    right = HfTrainer._step

    def step(self: HfTrainer, batches: Any, lr: float) -> Any:
        (inputs, _), *others = batches
        assert not others
        loss = right(self, batches, lr)
        seen.append((len(inputs), self.optimizer.param_groups[0]["lr"], inputs))
        return loss

    monkeypatch.setattr(HfTrainer, "_step", step)
    asked = BenchOptions(steps=2, check_steps=check_steps, check_rows=2)
    bench = compare(("hf",), 3, small, asked, lambda _: None)
    assert [(one.who, one.rows) for one in bench.results] == [("foundling", 4), ("hf", 3)]
    ratio = bench.ours.tokens_per_s / bench.results[1].tokens_per_s
    assert f"foundling is {ratio:.3f} times as fast as hf" in describe(bench)
    first, *learning = seen[: 1 + check_steps]
    timed = seen[1 + check_steps :]
    assert len(timed) == WARM_UP + 2
    lr = small.optim.lr / 10
    assert {(rows, rate) for rows, rate, _ in (first, *timed)} == {(3, lr)}
    assert [rows for rows, _, _ in learning] == [3, 2, 2][:check_steps]
    assert [rate for _, rate, _ in learning] == [course_lr(small, n) for n in range(check_steps)]
    text = text_rows(small, None, 7)
    for start, (rows, _, inputs) in zip((0, 3, 5), learning, strict=False):
        assert (inputs.numpy() == text.batch(start, rows).inputs).all()


class Full:
    """A contender that fits nowhere."""

    how = "somehow"

    def __init__(self, name: str, *_: Any) -> None:
        if name == "hf-bf16":
            raise torch.OutOfMemoryError("no room for the weights")

    def timed(self, *_: Any, size: int, **__: Any) -> None:
        if size < 1:
            raise ValueError("need at least one array to stack")
        raise torch.OutOfMemoryError("no room")

    def recover(self) -> None:
        """Nothing is left."""


@pytest.mark.parametrize("name", ["hf", "hf-plain", "hf-bf16"])
@pytest.mark.parametrize("best", [True, False])
def test_a_contender_that_fits_nowhere_ends_in_a_sentence(
    small: RunConfig, monkeypatch: pytest.MonkeyPatch, name: str, best: bool
) -> None:
    monkeypatch.setattr(with_transformers, "HfTrainer", Full)
    monkeypatch.setattr(with_transformers, "refuse_contender", lambda *_: None)
    monkeypatch.setattr(
        batch_size, "best_batch", lambda measure: {rows: measure(rows) for rows in (1, 2)}
    )
    asked = BenchOptions(best=best, steps=1, check_steps=0)
    with pytest.raises(RunError, match=f"{name} does not fit at"):
        compare((name,), 0, small, asked, lambda _: None)
