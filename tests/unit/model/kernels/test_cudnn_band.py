"""Windows through cuDNN's own graphs.

The package needs a GPU; a stand-in with its interface computes in fp32 on the CPU, so that what is
asked of it (layouts, band, outputs, statistics) and everything around it is the real thing.
tests/gpu/test_kernels_gpu.py asks the package itself where it is installed.
"""

import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.train import TrainConfig
from foundling.model.initialization import init_weights
from foundling.model.kernels import attention_backends, cudnn_band
from foundling.model.kernels.attention_backends import KERNELS, MaskSpec
from foundling.model.transformer import Transformer
from foundling.parallel.apply import apply_parallel
from foundling.parallel.mesh import ALONE
from foundling.train.autotune.attention import AttentionShape, attention_error, try_kernel

CPU = torch.device("cpu")
SHAPE = AttentionShape(2, 24, 4, 2, 8, 0.0)
Types = Enum("Types", ["HALF", "BFLOAT16", "FLOAT"])
WIDTHS = {Types.HALF: torch.float16, Types.BFLOAT16: torch.bfloat16, Types.FLOAT: torch.float32}


class Value:
    """A tensor of a graph."""

    def __init__(self, kind: Types, dim: list[int] | None = None, stride: list[int] | None = None):
        self.kind, self.dim, self.stride, self.is_output = kind, dim, stride, False

    def set_output(self, given: bool) -> "Value":
        self.is_output = given
        return self

    def set_dim(self, dim: list[int]) -> "Value":
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> "Value":
        self.stride = stride
        return self

    def set_data_type(self, kind: Types) -> "Value":
        self.kind = kind
        return self

    def check(self, tensor: Tensor) -> None:
        """What is handed in lies as the graph was told."""
        assert list(tensor.shape) == self.dim
        assert list(tensor.stride()) == self.stride
        assert tensor.dtype == WIDTHS[self.kind]
        assert tensor.stride(-1) == 1


class Graph:
    """One attention node, forward or backward."""

    built = 0
    launched = 0

    def __init__(self, *, io_data_type: Types, handle: object, **_: Types) -> None:
        self.kind, self.inputs, self.outputs, self.ready = io_data_type, {}, [], False

    def tensor(self, *, dim: list[int], stride: list[int], data_type: Types) -> Value:
        return Value(data_type, dim, stride)

    def sdpa(self, *, generate_stats: bool, **given: Any) -> list[Value]:
        assert generate_stats
        return self._node(given, 2)

    def sdpa_backward(self, *, use_deterministic_algorithm: bool, **given: Any) -> list[Value]:
        self.is_steady = use_deterministic_algorithm
        return self._node(given, 3)

    def _node(self, given: dict[str, Any], results: int) -> list[Value]:
        self.inputs, self.outputs = given, [Value(self.kind) for _ in range(results)]
        return self.outputs

    def _quiet(self, *_: object) -> None:
        pass

    validate = build_operation_graph = create_execution_plans = check_support = _quiet

    def build_plans(self) -> None:
        assert all(value.is_output for value in self.outputs)
        self.ready = True
        Graph.built += 1

    def get_workspace_size(self) -> int:
        return 16

    def execute(self, tensors: dict[Value, Tensor], room: Tensor, *, handle: object) -> None:
        assert self.ready
        assert room.numel() == 16
        Graph.launched += 1
        for value, tensor in tensors.items():
            value.check(tensor)
        named = {k: tensors[v] for k, v in self.inputs.items() if isinstance(v, Value)}
        found = self._computed(named)
        for value, result in zip(self.outputs, found, strict=True):
            tensors[value].copy_(result)

    def _computed(self, given: dict[str, Tensor]) -> list[Tensor]:
        q, k, v = (given[name].float() for name in "qkv")
        repeats = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        places = torch.arange(q.shape[2])
        back = places[:, None] - places
        left, right = (self.inputs[f"diagonal_band_{side}_bound"] for side in ("left", "right"))
        seen = (back < left) & (back >= -right)
        scores = (q @ wide_k.mT * self.inputs["attn_scale"]).masked_fill(~seen, -torch.inf)
        if "stats" not in given:
            sums = scores.logsumexp(-1, keepdim=True)
            return [(scores - sums).exp() @ wide_v, sums]
        grad, out = given["dO"].float(), given["o"].float()
        p = (scores - given["stats"]).exp()
        ds = p * (grad @ wide_v.mT - (grad * out).sum(-1, keepdim=True)) * self.inputs["attn_scale"]
        folded = [(x.unflatten(1, (-1, repeats)).sum(2)) for x in (ds.mT @ q, p.mT @ grad)]
        return [ds @ wide_k, *folded]


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module: Any = ModuleType("cudnn")
    module.data_type = Types
    module.diagonal_alignment = Enum("Alignment", ["TOP_LEFT", "BOTTOM_RIGHT"])
    module.heur_mode = Enum("Mode", ["A", "FALLBACK"])
    module.pygraph = Graph
    module.set_stream = lambda handle, stream: None
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(attention_backends, "_is_installed", lambda name: name == "cudnn")
    monkeypatch.setattr(cudnn_band, "_handle", lambda device: "handle")
    monkeypatch.setattr(cudnn_band, "_stream", lambda device: 0)
    Graph.built = Graph.launched = 0
    cudnn_band._forward.cache_clear()
    cudnn_band._backward.cache_clear()
    yield
    cudnn_band._forward.cache_clear()
    cudnn_band._backward.cache_clear()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("window", [1, 7, 23])
def test_a_band_is_a_window(heads: tuple[int, int], window: int) -> None:
    shape = AttentionShape(2, 24, *heads, 8, 0.0)
    error = attention_error(KERNELS["band"], shape, MaskSpec(None, window), CPU, torch.bfloat16)
    assert error < 2e-2
    assert Graph.launched == 2, "forward and backward"


def test_graphs_are_built_once_for_a_layout() -> None:
    for _ in range(3):
        attention_error(KERNELS["band"], SHAPE, MaskSpec(None, 7), CPU, torch.bfloat16)
    assert (Graph.built, Graph.launched) == (2, 6)
    attention_error(KERNELS["band"], SHAPE, MaskSpec(None, 8), CPU, torch.bfloat16)
    assert Graph.built == 4


def test_heads_that_lie_behind_time_are_taken_as_they_lie() -> None:
    """As a model has them: [B, T, H, D] with two sides exchanged, gradients likewise."""
    torch.manual_seed(0)
    kernel = KERNELS["band"]
    drawn = [torch.randn(2, 24, count, 8).bfloat16().requires_grad_() for count in (4, 2, 2)]
    q, k, v = (x.transpose(1, 2) for x in drawn)
    out = kernel.attend(q, k, v, kernel.mask(MaskSpec(None, 5), 24, CPU), 0.0)
    assert out.stride() == q.stride()
    spread = torch.randn(*out.shape, 2).bfloat16()[..., 0]  # its last side is no run of numbers
    found = torch.autograd.grad(out, drawn, spread)
    math = KERNELS["math"]
    same = math.attend(q, k, v, math.mask(MaskSpec(None, 5), 24, CPU), 0.0)
    for ours, wanted in zip(found, torch.autograd.grad(same, drawn, spread), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=5e-2, atol=5e-2)


def test_it_is_for_windows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, documents = KERNELS["band"], torch.zeros(2, 24, dtype=torch.int32)
    assert kernel.refusal(MaskSpec(None, 5), 0.0) is None
    assert kernel.mask(MaskSpec(None, 24), 24, CPU) is None
    for spec in (MaskSpec(), MaskSpec(documents), MaskSpec(documents, 5)):
        assert kernel.refusal(spec, 0.0) == "it knows windows alone, and no documents"
    assert kernel.refusal(MaskSpec(None, 5), 0.1) == "it has no dropout"
    tried = try_kernel(kernel, SHAPE, MaskSpec(None, 5), CPU, torch.float32)
    assert "takes numbers of 16 bits" in tried.refusal
    monkeypatch.setattr(attention_backends, "_is_installed", lambda name: False)
    assert "cudnn is not installed" in str(kernel.refusal(MaskSpec(None, 5), 0.0))


def test_a_deterministic_run_asks_for_steady_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    backward = Graph.sdpa_backward

    def watched(self: Graph, **given: Any) -> list[Value]:
        asked.append(given["use_deterministic_algorithm"])
        return backward(self, **given)

    monkeypatch.setattr(Graph, "sdpa_backward", watched)
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            tried = try_kernel(KERNELS["band"], SHAPE, MaskSpec(None, 5), CPU, torch.bfloat16)
        finally:
            torch.use_deterministic_algorithms(False)
        assert not tried.refusal
    assert set(asked[: len(asked) // 2]) == {False}
    assert set(asked[len(asked) // 2 :]) == {True}


@pytest.mark.filterwarnings("ignore")  # torch's compiler about itself
@pytest.mark.parametrize(
    ("mode", "policy"), [("off", "none"), ("off", "per-op"), ("off", "all"), ("blocks", "none")]
)
def test_a_model_of_windows_learns_the_same(mode: str, policy: str) -> None:
    config = ModelConfig(
        vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, windows=(8, 8, 8, 0)
    )
    tokens = torch.randint(64, (2, 25), generator=torch.Generator().manual_seed(0))
    grads = []
    for name, *way in (("math", "off", "none"), ("band", mode, policy)):
        torch._dynamo.reset()
        counters.clear()
        model = Transformer(config)
        init_weights(model, 1)
        model.use_kernels(KERNELS[name], KERNELS[name])
        train = TrainConfig(compile=way[0])  # type: ignore[arg-type]
        module = apply_parallel(model, ParallelConfig(recompute=way[1]), ALONE, train)
        with torch.autocast("cpu", torch.bfloat16):
            total, _ = module(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)
            total.backward()
        parts = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
        grads.append(torch.cat(parts).double())
    assert not counters["graph_break"]
    assert Graph.launched >= 4
    assert float((grads[1] - grads[0]).norm() / grads[0].norm()) < 3e-2
    if policy == "per-op":
        assert Graph.launched == 4, "its result is kept, not made again"
