"""float8 in the plan: what it saves and costs, which products it takes, where it is refused."""

import re
from dataclasses import replace

import pytest

from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.plan.hardware import TABLE
from foundling.plan.layout import MeshLayout
from foundling.plan.memory import plan_memory
from foundling.plan.params import sizes_of
from foundling.plan.roofline import check_skip, narrow_params, narrowed, share
from foundling.plan.speed import plan_speed
from foundling.plan.summary import PlanRequest, answer
from foundling.plan.workload import Workload, work_of

H200 = TABLE["h200"]


def asked(target: str, **settings: str) -> Workload:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return work_of(load_config(target, named), MeshLayout(), H200)


def llama(rows: int, float8: str = "tensorwise", **settings: str) -> Workload:
    tokens = str(2048 * rows)
    size = {"train.batch-size": str(rows), "train.global-batch-tokens": tokens}
    return asked("llama-1.24b", **size, train__float8=float8, **settings)


@pytest.mark.parametrize(("rows", "gigabytes"), [(40, 88.5), (56, 117.5)])
def test_memory_is_what_was_measured(rows: int, gigabytes: float) -> None:
    """On one H200, `bench train llama-1.24b --train.float8 tensorwise` (docs/performance.md)."""
    found = plan_memory(llama(rows), H200)
    assert found.peak / 1e9 == pytest.approx(gigabytes, rel=0.02)
    assert found.fits
    assert not plan_memory(llama(56, "none"), H200).fits


def test_speed_is_near_to_what_was_measured() -> None:
    found = plan_speed(llama(56), H200).tokens_per_s
    assert found == pytest.approx(89_050, rel=0.05)
    assert found > 1.1 * plan_speed(llama(40, "none"), H200).tokens_per_s
    assert plan_speed(llama(32, "rowwise"), H200).tokens_per_s == pytest.approx(68_819, rel=0.1)


def test_the_products_are_those_that_a_run_exchanges() -> None:
    work = llama(8)
    assert narrow_params(work) == sizes_of(work.model).blocks
    assert share(work, "attn.q") == share(work, "ffn.down") == 1
    assert share(llama(8, "none"), "attn.q") == 0
    first = llama(8, train__float8_skip="head,layers.0.")
    assert share(first, "attn.q") == pytest.approx(15 / 16)
    fed = llama(8, train__float8_skip="head,attn")
    assert set(narrowed(fed)) == {(8192, 2048), (2048, 8192)}
    assert share(fed, "attn.o") == 0
    # The gate of value embeddings is 32 by heads, and 6 is no multiple of 16.
    depth = asked("depth-12", train__float8="tensorwise")
    assert (6, 32) not in narrowed(depth)
    assert narrow_params(depth) < sizes_of(depth.model).blocks


def test_what_is_left_out_is_planned_as_without() -> None:
    whole, none, half = llama(40), llama(40, "none"), llama(40, train__float8_skip="head,attn")
    peaks = [plan_memory(work, H200).peak for work in (whole, half, none)]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[1] < peaks[2]
    speeds = [plan_speed(work, H200).parts["matrix"] for work in (whole, half, none)]
    assert speeds[0] < speeds[1] < speeds[2]
    # An eager block keeps what torchao was given.
    eager = replace(whole, compile=False)
    kept = plan_memory(replace(none, compile=False), H200).parts["activations"]
    assert plan_memory(eager, H200).parts["activations"] == kept


def test_a_gpu_without_such_products_is_refused() -> None:
    for planned in (plan_memory, plan_speed):
        with pytest.raises(ConfigError, match="a100-80 has none; set it to none"):
            planned(llama(8), TABLE["a100-80"])
        # A card that the table does not know is planned by another's figures.
        planned(llama(8), replace(TABLE["a40"], name="this GPU"))


def test_a_plain_feed_forward_is_planned_as_such() -> None:
    fused, plain = asked("depth-12"), asked("depth-12", train__kernels__mlp="plain")
    slower, faster = (plan_speed(work, H200).parts["elementwise"] for work in (plain, fused))
    assert slower > faster


@pytest.mark.parametrize(
    ("part", "said"),
    [
        *((part, "has no effect") for part in ("atn", "layers.16", "embed", "heads")),
        ("layers.1", r"leaves out layers\.10\.attn\.q too; write layers\.1\. with the dot"),
    ],
)
def test_a_slip_in_the_filter_is_refused(part: str, said: str) -> None:
    settings = {"train.float8": "tensorwise", "train.float8-skip": part}
    config = load_config("llama-1.24b", settings)
    with pytest.raises(ConfigError, match=f"train.float8_skip {re.escape(part)} {said}"):
        check_skip(config.model, config.train.float8_skip)
    with pytest.raises(ConfigError, match=said):
        next(answer(PlanRequest(resolved=lambda _: config)))
    check_skip(config.model, ("attn", "layers.15", "ffn.down", "layers.0.", "layers.1."))


def test_logits_in_float8_are_faster_and_take_a_byte_a_weight_more() -> None:
    without, with_it = llama(56), llama(56, train__float8_skip="[]")
    assert plan_speed(with_it, H200).tokens_per_s / plan_speed(without, H200).tokens_per_s > 1.01
    moments = [plan_memory(work, H200).moments for work in (without, with_it)]
    for name, more in (("forward", 131072 * 2048), ("evaluation", 0)):
        held = [sum(found[name].values()) for found in moments]
        assert held[1] - held[0] == pytest.approx(more)
