"""Which attention kernel a run takes: the fastest that works, or the one that was named."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.config.train import TrainConfig
from foundling.model.kernels import attention_backends
from foundling.model.kernels.attention_backends import KERNELS, MaskSpec
from foundling.runtime.device import choose_device
from foundling.train.autotune import attention, present_machine
from foundling.train.autotune.attention import (
    AttentionShape,
    Candidate,
    choose_kernel,
    worth_installing,
)
from foundling.train.autotune.present_machine import choose_compile

CPU = torch.device("cpu")
MODEL = ModelConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64)
SHAPE = AttentionShape.of(MODEL, rows=2, width=24)
PLAIN = [(SHAPE, MaskSpec())]


def failing(words: str) -> Any:
    """cuDNN's kernel, where its launch ends in these words."""

    class Failing(type(KERNELS["math"])):  # type: ignore[misc]
        def attend(self, *_: object) -> torch.Tensor:
            raise RuntimeError(words)

    return Failing("cudnn")


def test_a_named_kernel_that_cannot_run_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="flash3 was asked for, now or when the run began, and cannot be used"
    ):
        choose_kernel("flash3", PLAIN, CPU, torch.float32)


def test_auto_takes_the_fastest_that_works() -> None:
    name, why = choose_kernel("auto", PLAIN, CPU, torch.float32)
    assert name == "flash"  # the only one but math that a CPU has
    assert "launched: flash" in why


def test_a_faster_kernel_that_is_not_installed_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the GPU could launch it, and only there."""
    monkeypatch.setattr(attention_backends, "_is_installed", lambda _: False)
    missing = KERNELS["flash4"].refusal(MaskSpec(), 0.0) or ""
    found = [Candidate("flash4", 0.0, missing), Candidate("cudnn", 1.0)]
    for capability, dtype, told in (
        ((9, 0), torch.bfloat16, True),
        ((8, 0), torch.bfloat16, False),
        ((9, 0), torch.float32, False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        lines = worth_installing(found, torch.device("cuda"), dtype)
        assert bool(lines) == told
        assert all("flash4" in line and "foundling[flash4]" in line for line in lines)
    assert worth_installing(found, CPU, torch.bfloat16) == []
    for name, window, dropout in (("band", 0, 0.0), ("band", 8, 0.1), ("flash4", 0, 0.1)):
        refusal = KERNELS[name].refusal(MaskSpec(None, window), dropout) or ""
        assert "pip install" not in refusal, "no package makes it do that"


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_kernel_that_is_there_and_fails_is_a_warning(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KERNELS, "cudnn", failing("no kernel image"))
    monkeypatch.setitem(KERNELS, "efficient", type(KERNELS["math"])("efficient"))
    torch.use_deterministic_algorithms(deterministic)
    try:
        name, why = choose_kernel("auto", PLAIN, CPU, torch.bfloat16)
        fine = choose_kernel("auto", PLAIN, CPU, torch.float32)  # which cuDNN never takes
    finally:
        torch.use_deterministic_algorithms(False)
    assert name in ("flash", "efficient")
    assert "WARNING: without what is there and failed, cudnn (no kernel image)" in why
    assert "flash3" not in why, "what is not installed is no fallback"
    assert "WARNING" not in fine[1]


def test_what_torch_cannot_repeat_is_left_out_of_a_deterministic_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuDNN's attention, which torch will not ask then: no fallback, and told by its reason."""
    declined = failing("No available kernel. Aborting execution.")
    monkeypatch.setitem(KERNELS, "cudnn", declined)
    monkeypatch.setitem(KERNELS, "efficient", type(KERNELS["math"])("efficient"))
    assert "WARNING" in choose_kernel("auto", PLAIN, CPU, torch.bfloat16)[1]
    torch.use_deterministic_algorithms(True)
    try:
        name, why = choose_kernel("auto", PLAIN, CPU, torch.bfloat16)
        with pytest.raises(ConfigError, match=r"cudnn .* no way to repeat it .*deterministic"):
            choose_kernel("cudnn", PLAIN, CPU, torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)
    assert name == "flash"
    assert "WARNING" not in why


def test_a_deterministic_run_is_not_chosen_by_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other work the clock names another kernel each time, and two equal runs differ."""
    monkeypatch.setitem(KERNELS, "efficient", type(KERNELS["math"])("efficient"))
    clock = {"flash": 2.0, "efficient": 1.0}
    monkeypatch.setattr(attention, "_seconds", lambda kernel, *_, **__: clock[kernel.name])
    assert choose_kernel("auto", PLAIN, CPU, torch.float32)[0] == "efficient"
    torch.use_deterministic_algorithms(True)
    try:
        name, why = choose_kernel("auto", PLAIN, CPU, torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert name == "flash"
    assert "not chosen by a clock" in why
    same = RunConfig(model=MODEL, train=TrainConfig(deterministic=True))
    monkeypatch.setattr(present_machine, "_by_time", lambda *_: pytest.fail("a clock was asked"))
    assert choose_compile(same, choose_device("cpu", "auto"), 10)[0] == "off"


def test_a_kernel_must_work_at_every_shape_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(type(KERNELS["math"])):  # type: ignore[misc]
        def attend(self, q: torch.Tensor, *args: object) -> torch.Tensor:
            if q.shape[2] > 24:
                raise RuntimeError("too long for me")
            out: torch.Tensor = super().attend(q, *args)
            return out

    monkeypatch.setitem(KERNELS, "efficient", Short("efficient"))
    clock = {"flash": 2.0, "efficient": 1.0}
    monkeypatch.setattr(attention, "_seconds", lambda kernel, *_, **__: clock[kernel.name])
    long = [*PLAIN, (replace(SHAPE, width=48), MaskSpec())]
    name, why = choose_kernel("auto", long, CPU, torch.float32)
    assert name == "flash"
    assert "first would have been efficient, which cannot be used: at 2 rows of 48" in why
    assert "WARNING" in why
    with pytest.raises(ConfigError, match="at 2 rows of 48: too long for me"):
        choose_kernel("efficient", long, CPU, torch.float32)


def test_where_nothing_fast_works_every_score_is_kept_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("flash", "flex"):
        monkeypatch.setitem(KERNELS, name, KERNELS["flash3"])
    name, why = choose_kernel("auto", PLAIN, CPU, torch.float32)
    assert name == "math"
    assert "WARNING" in why
    assert "not installed" in why


@pytest.mark.parametrize(
    ("dropout", "told"), [(0.0, "broken (wrong by nan"), (0.1, "broken (no such dropout)")]
)
def test_a_deterministic_run_is_told_of_a_kernel_that_is_wrong_and_tries_its_own_dropout(
    dropout: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(type(KERNELS["math"])):  # type: ignore[misc]
        def attend(self, *args: Any) -> torch.Tensor:
            if args[-1]:
                raise RuntimeError("no such dropout")
            out: torch.Tensor = super().attend(*args)
            return out if dropout else out * torch.nan

    monkeypatch.setitem(KERNELS, "broken", Broken("broken"))
    monkeypatch.setitem(KERNELS, "efficient", type(KERNELS["math"])("efficient"))
    shape = replace(SHAPE, dropout=dropout)
    torch.use_deterministic_algorithms(True)
    try:
        name, why = choose_kernel("auto", [(shape, MaskSpec())], CPU, torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert name in ("flash", "efficient")
    assert "WARNING" in why
    assert told in why
