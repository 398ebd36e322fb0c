"""Memory that runs out is known by name or by words, and comes out by one name."""

from pathlib import Path

import pytest
import torch

from foundling.bench.batch_size import try_sizes
from foundling.config.errors import RunError
from foundling.config.load import load_config
from foundling.config.run import RunConfig
from foundling.profiling.step_runner import RandomRows, StepRunner
from foundling.runtime.device import choose_device, is_out_of_memory, translate_out_of_memory
from foundling.train.oom import (
    OutOfMemoryLaterError,
    mark_oom_after_success,
    refuse_on_oom,
    snapshot_on_oom,
)

CPU = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError(CPU)]
)
def test_it_comes_out_by_one_name(error: BaseException) -> None:
    assert is_out_of_memory(error)
    with pytest.raises(torch.OutOfMemoryError), translate_out_of_memory():
        raise error


@pytest.mark.parametrize("fitted", [True, False])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError(CPU), torch.OutOfMemoryError("x")])
def test_a_run_that_had_fitted_may_be_started_again(
    error: BaseException, fitted: bool, tmp_path: Path
) -> None:
    """As cli.py and the loop nest them: what had fitted is a crash, what never did a refusal."""
    config = load_config("hamlet")
    kind: type[BaseException] = OutOfMemoryLaterError if fitted else RunError
    with pytest.raises(kind), refuse_on_oom(config.train), snapshot_on_oom(tmp_path):  # noqa: SIM117
        with mark_oom_after_success(lambda: fitted):
            raise error


def test_other_trouble_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="boom") as caught, translate_out_of_memory():
        raise RuntimeError("boom")
    assert not isinstance(caught.value, torch.OutOfMemoryError)


def test_a_batch_that_is_too_large_for_a_cpu_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the best batch goes on below it."""
    small = {"model.dim": "32", "model.layers": "1", "model.heads": "2", "model.ffn-dim": "64"}
    small |= {"model.vocab-size": "64", "train.seq-len": "16", "train.compile": "off"}
    config: RunConfig = load_config("hamlet", small)
    real = StepRunner.step

    def step(self: StepRunner, batches: list[object], *args: object, **how: object) -> object:
        if len(batches[0].inputs) > 4:  # type: ignore[attr-defined]
            raise RuntimeError(CPU)
        return real(self, batches, *args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(StepRunner, "step", step)
    runner, told = StepRunner(config, choose_device("cpu", "fp32")), list[str]()
    tried, _ = try_sizes(runner, RandomRows(64, 16, 1), lambda _: 1, told.append)
    assert "8 rows do not fit" in told
    assert max(size for size, speed in tried.items() if speed) == 4
