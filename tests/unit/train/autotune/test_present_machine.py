"""Which kernels a run uses: what the device can, what was asked for, what the run began with."""

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from foundling.config.data import DataConfig, PhaseConfig
from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.run import RunConfig
from foundling.config.train import TrainConfig
from foundling.model.initialization import init_weights
from foundling.model.kernels.attention_backends import (
    KERNELS,
    MaskSpec,
    dense_mask,
    without_gradients,
)
from foundling.model.transformer import Block, Transformer
from foundling.parallel.apply import apply_parallel
from foundling.parallel.mesh import ALONE
from foundling.runtime.device import DeviceChoice, choose_device
from foundling.train.autotune import attention, present_machine
from foundling.train.autotune.attention import (
    AttentionShape,
    attention_error,
    choose_attention_kernels,
    reference,
    shapes_of,
    try_kernel,
)
from foundling.train.autotune.present_machine import autotune, choose_compile

CPU = torch.device("cpu")
MODEL = ModelConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64)
SHAPE = AttentionShape.of(MODEL, rows=2, width=24)
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 9 + [-1] * 5, [0] * 24])
SPECS = {
    "causal": MaskSpec(),
    "documents": MaskSpec(DOCUMENTS),
    "window": MaskSpec(None, 7),
    "both": MaskSpec(DOCUMENTS, 7),
}


@pytest.mark.parametrize("name", ["torch", "math"])
@pytest.mark.parametrize("mask", list(SPECS))
def test_kernels_agree_with_attention_written_out(name: str, mask: str) -> None:
    assert attention_error(KERNELS[name], SHAPE, SPECS[mask], CPU, torch.float32) < 1e-5


@pytest.mark.parametrize("mask", list(SPECS))
def test_a_mask_says_who_may_look_where(mask: str) -> None:
    spec = SPECS[mask]
    found = dense_mask(spec, 24, CPU)
    expected = torch.zeros(2, 24, 24, dtype=torch.bool)
    for row in range(2):
        for t in range(24):
            for s in range(t + 1):
                near = not spec.window or t - s < spec.window
                together = spec.documents is None or bool(DOCUMENTS[row, t] == DOCUMENTS[row, s])
                expected[row, t, s] = near and together
    if found is None:
        assert mask == "causal"
    else:
        assert torch.equal(found.expand(2, 1, 24, 24)[:, 0], expected)


@pytest.mark.parametrize("mask", list(SPECS))
def test_a_long_row_is_checked_by_a_shorter_one(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []

    def watched(spec: MaskSpec, *parts: torch.Tensor) -> torch.Tensor:
        widths.append((parts[0].shape[2], spec.window))
        return reference(spec, *parts)

    monkeypatch.setattr(attention, "MOST_EXACT", 10)
    monkeypatch.setattr(attention, "reference", watched)
    assert attention_error(KERNELS["math"], SHAPE, SPECS[mask], CPU, torch.float32) < 1e-5
    assert widths == [(8, 3 if SPECS[mask].window else 0)]


def test_kernels_are_timed_on_tensors_as_projections_leave_them() -> None:
    drawn = AttentionShape(2, 8, 4, 2, 16, 0.0).random_inputs(torch.device("cpu"), torch.float32)
    assert [tuple(x.shape) for x in drawn] == [(2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)]
    assert all(x.transpose(1, 2).is_contiguous() and x.is_leaf and x.requires_grad for x in drawn)


def test_a_kernel_with_other_bits_each_time_is_refused_where_that_matters() -> None:
    class Restless(type(KERNELS["math"])):  # type: ignore[misc]
        def attend(self, *args: object) -> torch.Tensor:
            out: torch.Tensor = super().attend(*args)
            return out * (1 + 1e-6 * torch.rand(()))

    restless = Restless("restless")
    assert not try_kernel(restless, SHAPE, MaskSpec(), CPU, torch.float32).refusal
    torch.use_deterministic_algorithms(True)
    try:
        tried = try_kernel(restless, SHAPE, MaskSpec(), CPU, torch.float32)
        steady = try_kernel(KERNELS["math"], SHAPE, MaskSpec(), CPU, torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "from one launch to the next" in tried.refusal
    assert not steady.refusal


def test_flex_stands_back_where_nothing_is_compiled() -> None:
    assert without_gradients(KERNELS["flex"], CPU) is KERNELS["flex"]
    with torch.no_grad():
        assert without_gradients(KERNELS["band"], torch.device("cuda")) is KERNELS["flash"]
        assert without_gradients(KERNELS["flex"], CPU) is KERNELS["torch"]
        assert without_gradients(KERNELS["flex"], torch.device("cuda")) is KERNELS["efficient"]
        assert without_gradients(KERNELS["cudnn"], CPU) is KERNELS["cudnn"]


def test_graphs_on_a_cpu_are_refused() -> None:
    config = RunConfig(model=MODEL, train=TrainConfig(compile="graphs", device="cpu"))
    with pytest.raises(ConfigError, match="graphs needs a CUDA device"):
        autotune(config, choose_device("cpu", "fp32"))


@pytest.mark.parametrize(("device", "variable"), [("cpu", "CXX"), ("cuda", "CC")])
def test_a_compiler_that_is_missing_is_named(
    device: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "/nowhere/compiler")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    choice = DeviceChoice(torch.device(device), torch.float32, "fp32")
    asked = RunConfig(model=MODEL, train=TrainConfig(compile="blocks"))
    with pytest.raises(ConfigError, match=r"needs a compiler .*nowhere.*set train\.compile off"):
        choose_compile(asked, choice, 10)
    if device == "cuda":
        mode, why = choose_compile(RunConfig(model=MODEL), choice, 10)
        assert mode == "off"
        assert "WARNING" in why
    monkeypatch.setenv(variable, sys.executable)  # something that is there
    assert choose_compile(asked, choice, 10)[0] == "blocks"


@pytest.mark.parametrize(("compiled", "mode"), [(0.5, "blocks"), (0.99, "off"), (2.0, "off")])
def test_on_a_cpu_the_faster_of_eager_and_compiled_is_taken(
    compiled: float, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1.0, compiled])
    asked = []

    def block_s(block: object, config: RunConfig, dtype: torch.dtype) -> float:
        asked.append(dtype)
        return next(times)

    monkeypatch.setattr(present_machine, "_block_s", block_s)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    choice = DeviceChoice(CPU, torch.bfloat16, "bf16")
    assert choose_compile(RunConfig(model=MODEL), choice, 100_000)[0] == mode
    assert asked == [torch.bfloat16, torch.bfloat16], "in the run's own arithmetic"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_is_timed_in_the_runs_arithmetic(dtype: torch.dtype) -> None:
    config = RunConfig(model=MODEL, train=TrainConfig(batch_size=2, seq_len=16))
    block, seen = Block(MODEL, layer=0), set()
    block.ffn.down.register_forward_hook(lambda _, __, out: seen.add(out.dtype))
    assert present_machine._block_s(block, config, dtype) > 0
    assert seen == {dtype}


def test_tensor_parallel_blocks_are_not_compiled() -> None:
    config = RunConfig(model=MODEL, parallel=ParallelConfig(tensor=2))
    mode, why = choose_compile(
        config, DeviceChoice(torch.device("cuda"), torch.bfloat16, ""), steps=9
    )
    assert mode == "off"
    assert "WARNING" in why
    asked = config.replace(train=TrainConfig(compile="blocks"))
    with pytest.raises(ConfigError, match=r"not built for parallel\.tensor"):
        choose_compile(asked, choose_device("cpu", "fp32"), steps=9)


def test_a_budget_decides_for_the_compiler() -> None:
    config = RunConfig(model=MODEL, parallel=ParallelConfig(recompute="budget-0.5"))
    settled, _ = autotune(config, choose_device("cpu", "fp32"))
    assert settled.train.compile == "blocks"


def test_a_kernel_that_computes_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(type(KERNELS["math"])):  # type: ignore[misc]
        def attend(self, *args: object) -> torch.Tensor:
            out: torch.Tensor = super().attend(*args) * 1.1
            return out

    tried = try_kernel(Wrong("wrong"), SHAPE, MaskSpec(), CPU, torch.float32)
    assert "wrong by" in tried.refusal


def test_every_length_that_phases_and_buckets_bring_is_a_shape() -> None:
    train = TrainConfig(seq_len=64, batch_size=4)
    phases = (PhaseConfig(at=0.5, seq_len=256),)
    data = DataConfig(phases=phases)
    found = shapes_of(MODEL, train, data)
    assert [(one.rows, one.width) for one in found] == [(4, 64), (1, 256)]
    data = DataConfig(packing="bucket", buckets=(16, 32), bucket_tokens=128)
    found = shapes_of(MODEL, train, data)
    assert [(one.rows, one.width) for one in found] == [(2, 64), (4, 32), (8, 16)]


@pytest.mark.parametrize(("rows", "width", "fits"), [(1, 1000, False), (16, 1000, True)])
def test_float8_wants_sides_of_its_own(rows: int, width: int, fits: bool) -> None:
    train = TrainConfig(float8="tensorwise", batch_size=rows, seq_len=width)
    config = RunConfig(model=MODEL, train=train)
    if fits:
        autotune(config, choose_device("cpu", "auto"))
        return
    with pytest.raises(ConfigError, match="one has 1 rows of 1000"):
        autotune(config, choose_device("cpu", "auto"))


@pytest.mark.parametrize(("field", "masks"), [("attention", True), ("attention_masked", False)])
def test_a_named_kernel_that_no_layer_would_use_is_told(
    field: str, masks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: dict[str, Any] = {field: "flash"}
    data = DataConfig(document_mask=masks)
    train = TrainConfig(kernels=named)
    monkeypatch.setattr(attention, "choose_kernel", lambda *_, **__: ("flex", "why"))
    monkeypatch.setattr(attention, "_documents", lambda *_: None)
    found, told = choose_attention_kernels(MODEL, train, data, torch.device("cuda"), torch.bfloat16)
    assert found[field] == "torch"
    assert any(f"WARNING: train.kernels.{field} flash has no effect" in line for line in told)
    assert len(told) == 2


def test_a_mask_is_paid_for_by_all_layers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(type(KERNELS["math"])):  # type: ignore[misc]
        def mask(self, *args: object) -> object:
            time.sleep(0.05)
            return super().mask(*args)

    def seconds(layers: int) -> float:
        spec = MaskSpec(None, 7)
        return try_kernel(Slow("slow"), SHAPE, spec, CPU, torch.float32, layers=layers).seconds

    assert seconds(1) > 0.05
    assert seconds(50) < 0.03


def test_on_a_cpu_everything_is_settled_without_a_launch() -> None:
    config, told = autotune(RunConfig(model=MODEL), choose_device("cpu", "auto"))
    assert (config.train.kernels.attention, config.train.kernels.attention_masked) == (
        "torch",
        "torch",
    )
    assert config.train.compile == "off"
    assert told == ["compile off (not measured)"]
    asked = RunConfig(model=MODEL, train=TrainConfig(kernels={"attention": "cudnn"}))
    with pytest.raises(
        ConfigError, match=r"train.kernels.attention cudnn needs a CUDA device; set it to torch\."
    ):
        autotune(asked, choose_device("cpu", "auto"))


def test_a_resume_keeps_to_what_the_run_began_with() -> None:
    before = RunConfig(
        model=MODEL, train=TrainConfig(compile="blocks", kernels={"attention": "math"})
    )
    config, _ = autotune(
        RunConfig(model=MODEL), choose_device("cpu", "auto"), resumed_config=before
    )
    assert (config.train.compile, config.train.kernels.attention) == ("blocks", "math")
    again = RunConfig(model=MODEL, train=TrainConfig(compile="off"))
    assert (
        autotune(again, choose_device("cpu", "auto"), resumed_config=before)[0].train.compile
        == "off"
    )


@pytest.mark.parametrize("kernel", ["torch", "math"])
def test_a_model_mixes_with_the_kernel_it_is_given(kernel: str) -> None:
    config = MODEL.replace(windows=(5, 0))
    tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))
    losses = []
    for name in ("torch", kernel):
        model = Transformer(config)
        init_weights(model, 1)
        model.use_kernels(KERNELS[name], KERNELS[name])
        module = apply_parallel(model, ParallelConfig(), ALONE)
        losses.append(float(module(tokens, tokens.roll(-1, 1), DOCUMENTS)[0].detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_reference_sees_no_future() -> None:
    q, k, v = SHAPE.random_inputs(CPU, torch.float64)
    before = reference(MaskSpec(), q, k, v)[:, :, :12]
    v = v.detach().clone()
    v[:, :, 12:] = 7.0
    assert torch.equal(reference(MaskSpec(), q, k, v)[:, :, :12], before)


def test_float8_exchanges_the_blocks_products_and_no_name() -> None:
    pytest.importorskip("torchao")
    from foundling.parallel.apply import apply_float8

    plain, eight = Transformer(MODEL), Transformer(MODEL)
    init_weights(plain, 1)
    init_weights(eight, 1)
    train = TrainConfig(float8="tensorwise", float8_skip=("layers.0.attn",))
    names = apply_float8(eight.layers, train, emulate=True)
    assert "layers.0.ffn.up" in names
    assert not any("layers.0.attn" in name for name in names)
    assert list(eight.state_dict()) == list(plain.state_dict())
    tokens = torch.randint(64, (2, 16))
    losses = [float(m.loss(tokens, tokens.roll(-1, 1))[0].detach()) for m in (plain, eight)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    with pytest.raises(ConfigError, match="has no effect"):
        apply_float8(Transformer(MODEL).layers, train.replace(float8_skip=("layers",)))


def test_a_slip_in_float8s_filter_is_refused_where_a_run_begins() -> None:
    """And not where it goes on: what it began with is what it is."""
    train = TrainConfig(float8="tensorwise", float8_skip=("atn",), batch_size=2, seq_len=16)
    config = RunConfig(model=MODEL, train=train)
    with pytest.raises(ConfigError, match="float8_skip atn has no effect"):
        autotune(config, choose_device("cpu", "fp32"))
    autotune(config, choose_device("cpu", "fp32"), resumed_config=config)


def test_float8_on_a_cpu_is_refused(tmp_path: Path) -> None:
    from foundling.parallel.apply import check_float8

    with pytest.raises(ConfigError, match=r"compute capability 8\.9 or newer"):
        check_float8(CPU, torch.bfloat16)


def test_a_fused_feed_forward_is_for_squared_relu_on_new_gpus() -> None:
    config = RunConfig(model=MODEL.replace(activation="relu2"))
    settled, told = autotune(config, choose_device("cpu", "fp32"))
    assert settled.train.kernels.mlp == "plain"
    assert not any("mlp" in line for line in told)
    asked = config.replace(train={"kernels": {"mlp": "fused"}})
    with pytest.raises(ConfigError, match=r"here: cpu is no NVIDIA GPU.*plain"):
        autotune(asked, choose_device("cpu", "fp32"))
    with pytest.raises(ConfigError, match="set it to plain"):  # what a run began with elsewhere
        autotune(config, choose_device("cpu", "fp32"), resumed_config=asked)
    older, _ = autotune(config, choose_device("cpu", "fp32"), resumed_config=config)
    assert older.train.kernels.mlp == "plain"
    odd = asked.replace(model={"ffn_dim": 60})
    with pytest.raises(ConfigError, match="multiples of 8"):
        autotune(odd, choose_device("cpu", "fp32"))
    other = asked.replace(model=MODEL)
    with pytest.raises(ConfigError, match="activation is swiglu and not relu2"):
        autotune(other, choose_device("cpu", "fp32"))
