"""Which part of a step a kernel belongs to."""

from types import SimpleNamespace
from typing import Any

import pytest

from foundling.profiling.trace import RANGE, split


def event(name: str, *kernels: str, parent: Any = None) -> Any:
    found = [SimpleNamespace(name=kernel, duration=2e6) for kernel in kernels]
    return SimpleNamespace(
        name=name, kernels=found, cpu_parent=parent, scope=0, thread=1, fwd_thread=1, sequence_nr=-1
    )


@pytest.mark.parametrize(
    ("operator", "kernel", "part"),
    [
        ("aten::mm", "nvjet_sm90_tst_192x192", "matrix"),
        ("foundling::relu2_matmul", "_product", "matrix"),  # an operator of ours is no range
        ("aten::mul", "triton_poi_fused_mul_0", "elementwise"),
        ("aten::copy_", "Memcpy HtoD (Pinned -> Device)", "data"),
        ("aten::_scaled_dot_product_cudnn_attention", "some_kernel", "attention"),
    ],
)
def test_a_kernel_belongs_to_a_part(operator: str, kernel: str, part: str) -> None:
    alone = event(operator, kernel)
    assert split([alone], cuda=True)[part] == 2.0
    inside = event(operator, kernel, parent=event(RANGE + "loss"))
    assert split([inside], cuda=True)["loss"] == 2.0


def test_on_a_cpu_what_the_compiler_made_is_no_idle_time() -> None:
    graph = event("## Call CompiledFxGraph fan2jtfy ##")
    product = event("aten::mm", parent=graph)
    around = event("CompiledFunction")
    for one in (graph, product, around):
        one.self_cpu_time_total = 2e6
    found = split([around, graph, product], cuda=False)
    assert (found["elementwise"], found["matrix"], found["other"]) == (2.0, 2.0, 0.0)
