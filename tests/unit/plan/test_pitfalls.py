"""What does not fit: the layout that does, the least of all, what is missing, and no hours."""

import pytest
from asking import OPEN, plan

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.config.parallel import check_tensor, tensor_parallel_problem
from foundling.config.presets import find_preset
from foundling.plan.hardware import TABLE
from foundling.plan.layout import Machine, MeshLayout, layouts_of
from foundling.plan.speed import all_reduce_s, ring_s


@pytest.mark.parametrize(
    ("target", "degree", "named"),
    [
        ("qwen2-0.5b", "4", r"model\.heads is 14"),
        ("qwen2-0.5b", "7", r"model\.kv_heads is 2"),
        ("clm-400m", "2", r"model\.heads is 15"),
        ("tinygpt-524m", "2", "model.positions 2048 is not built"),
        ("depth-12", "2", "value_embeds"),
    ],
)
def test_a_degree_that_does_not_divide_the_model_is_refused(
    target: str, degree: str, named: str
) -> None:
    for more in ("", " -o run.yaml"):
        with pytest.raises(ConfigError, match=named):
            run_verb(f"plan {target}{more} --gpu h100 --parallel.tensor {degree}".split())
    preset = find_preset(target)
    assert preset is not None
    with pytest.raises(ConfigError, match=named):
        check_tensor(preset.model, int(degree))


def test_auto_never_takes_such_a_degree() -> None:
    machine = Machine(gpu=TABLE["rtx4090"], per_node=8, nodes=1)
    for target in ("qwen2-0.5b", "clm-400m", "depth-20", "tinygpt-524m", "llama3-8b"):
        model = load_config(target).model
        for degree in (1, 2, 4, 8):
            layouts = list(layouts_of(model, machine, degree))
            assert bool(layouts) == (not tensor_parallel_problem(model, degree))
    assert MeshLayout(tensor=8) in layouts, "pure tensor parallelism is one of them"


def test_nothing_fits_and_the_least_is_told_with_what_is_missing() -> None:
    found = plan("llama3.1-405b", "h100", OPEN, gpus=8)
    assert not found.fits
    assert found.choice.layout == MeshLayout(shard=8)
    assert found.choice.memory.needed == pytest.approx(1049e9, rel=0.001)
    assert "nothing fits on 8 GPUs" in " ".join(found.choice.reasons)
    assert "128 GPUs would do" in found.warnings[0]
    assert plan("llama3.1-405b", "h100", OPEN, nodes=16).fits
    assert not plan("llama3.1-405b", "h100", OPEN, nodes=8).fits


def test_a_layout_that_nobody_named_is_one_that_fits() -> None:
    """001's batch does not fit into plain replicas, and its preset says how it recomputed."""
    for nodes in (8, 64, 640):
        found = plan("llama3.1-8b", "mi250x", nodes=nodes)
        assert found.config.parallel.recompute == "all"
        assert found.fits
        assert found.choice.layout.tensor > 1
        assert "share their rows" in " ".join(found.choice.reasons)
        assert found.hours is not None


def test_what_does_not_fit_takes_no_time_and_costs_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"train.batch-size": "64", "train.horizon": "1B tokens"}
    found = plan("llama-1.24b", "rtx4090", settings)
    assert not found.fits
    assert (found.hours, found.dollars, found.to_json()["speed"]) == (None, None, None)
    command = "--train.batch-size 64 --train.horizon 1Btokens"
    run_verb(f"plan llama-1.24b --gpu rtx4090 {command}".split())
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert " a step, " not in text
    assert "$" not in text.split("DOES NOT FIT")[1]
    run_verb(f"plan llama-1.24b --gpu rtx4090,h200 {command} --parallel.recompute all".split())
    rows = [line for line in capsys.readouterr().out.splitlines() if " x 1 x 1 " in line]
    [short] = [row for row in rows if row.split()[0] == "rtx4090"]
    assert short.split()[-2:] == ["-", "-"]


def test_remedies_are_named() -> None:
    told = plan("llama-1.24b", "h100", {"train.batch-size": "32"}).warnings[0]
    assert "the largest that does is 24" in told
    assert "parallel.recompute per-op would do" in told
    named = {"train.batch-size": "26", "parallel.replicate": "8"}
    told = plan("llama-1.24b", "h100", named, gpus=8).warnings[0]
    assert "replicate 4 x shard 2 x tensor 1 would do" in told


def test_hours_buy_no_steps_of_a_run_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    command = "llama3-70b --gpu l4 --gpus 1 --train.horizon 3hours"
    run_verb(f"plan {command}".split())
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "horizon" not in text
    with pytest.raises(ConfigError, match="does not fit"):
        run_verb(f"plan {command} -o run.yaml".split())


def test_latency_grows_with_the_ring_and_less_with_a_tree() -> None:
    assert ring_s(8, 1) < ring_s(64, 8) < ring_s(512, 64) < ring_s(5120, 640)
    assert ring_s(5120, 640) > 0.02, "4,480 hops inside and 639 between"
    assert all_reduce_s(5120, 640) < ring_s(5120, 640) / 20
    assert all_reduce_s(2, 1) < 25e-6


def test_a_small_model_is_not_sharded_over_thousands() -> None:
    for nodes in (1, 8, 64, 640):
        small = plan("clm-60m", "h100", nodes=nodes)
        assert small.choice.layout == MeshLayout(replicate=8 * nodes)
    sharded = plan("clm-60m", "h100", {"parallel.shard": "5120"}, nodes=640)
    assert sharded.choice.speed.step_s > 10 * small.choice.speed.step_s


def test_shards_are_no_larger_than_they_must_be() -> None:
    found = plan(
        "llama3-8b", "h100", {"train.horizon": "10", "parallel.recompute": "all"}, nodes=64
    )
    assert found.fits
    assert found.choice.layout.shard <= 8
    assert found.choice.layout.replicate >= 64


def test_advice_is_of_the_hardware_at_hand() -> None:
    t4 = " ".join(plan("clm-60m", "t4").warnings)
    assert "use bf16" not in t4
    assert "math path" not in t4
    slow = {"train.dtype": "fp32", "train.kernels.attention": "math"}
    assert "t4 has no bf16" in " ".join(plan("clm-60m", "t4", slow).warnings)
    settings = {"train.batch-size": "auto", "train.horizon": "100000"}
    amd = " ".join(plan("llama3.1-8b", "mi250x", nodes=8).warnings)
    assert "NVLink" not in amd
    assert "NCCL_P2P" not in amd
    quick = " ".join(plan("clm-60m", "l4", settings | {"checkpoint.every": "1"}).warnings)
    assert "every 0 minutes" not in quick
    assert "seconds and continues" in quick


def test_windows_are_planned_with_their_own_kernel() -> None:
    """kernels.attention is for layers without a mask, kernels.attention_masked for the others."""
    window = {"model.windows": "1024,1024,1024,0", "train.seq-len": "8192", "train.batch-size": "8"}

    def seconds(**named: str) -> float:
        settings = {**window, **{name.replace("__", "."): value for name, value in named.items()}}
        found = plan("depth-12", "h200", settings, gpus=1)
        assert found.choice.speed is not None
        return found.choice.speed.parts["attention"]

    by_flash = seconds()
    assert seconds(train__kernels__attention="cudnn") == by_flash
    assert seconds(train__kernels__attention_masked="band") < 0.9 * by_flash  # full layers stay
    assert by_flash < 0.6 * seconds(model__windows="[]")


@pytest.mark.parametrize(
    ("width", "whole", "windowed"), [(2048, 535_281, 538_252), (8192, 375_244, 486_543)]
)
def test_what_windows_save_is_foretold(width: int, whole: float, windowed: float) -> None:
    """Tokens/s of depth-12 on one H200, 65,536 positions a step, without and with windows of 1024
    in three of four layers (docs/performance.md)."""
    base = {
        "train.seq-len": str(width),
        "train.batch-size": str(65_536 // width),
        "train.global-batch-tokens": "65536",
    }
    window = {"model.windows": "1024,1024,1024,0", "train.kernels.attention-masked": "band"}
    foretold = []
    for settings, measured in ((base, whole), ({**base, **window}, windowed)):
        speed = plan("depth-12", "h200", settings, gpus=1).choice.speed
        assert speed is not None
        foretold.append(speed.tokens_per_s)
        assert speed.tokens_per_s == pytest.approx(measured, rel=0.06)
    assert foretold[1] / foretold[0] == pytest.approx(windowed / whole, rel=0.03)
