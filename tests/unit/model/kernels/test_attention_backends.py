"""Documents laid end to end: where they begin, and attention that does not cross.

The kernels that take such lists need a GPU; here a plain operator with their signature stands in,
so that everything around it is the real thing. tests/gpu/test_kernels_gpu.py has the kernels.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.train import TrainConfig
from foundling.data.batch import Batch, Bounds, Counts
from foundling.model.initialization import init_weights
from foundling.model.kernels import attention_backends
from foundling.model.kernels.attention_backends import FEWEST, KERNELS, MaskSpec, note_count, packed
from foundling.model.transformer import Transformer
from foundling.parallel.apply import apply_parallel
from foundling.parallel.mesh import ALONE
from foundling.train.autotune.attention import AttentionShape, attention_error
from foundling.train.step import prefetch_to_device

CPU = torch.device("cpu")
SHAPE = AttentionShape(3, 24, 4, 2, 8, 0.0)
DOCUMENTS = torch.tensor(
    [[0] * 5 + [1] * 4 + [-1] * 15, [0] * 24, [0, 1, 2] + [3] * 11 + [4] * 10], dtype=torch.int32
)
SPECS = [MaskSpec(DOCUMENTS, 0), MaskSpec(DOCUMENTS, 3)]


def plain(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, width: int, window: int, dropout: float
) -> Tensor:
    """Attention inside of each document of [N, H, D], by a mask of all pairs."""
    places = torch.arange(len(q))
    number = torch.searchsorted(starts[1:], places.int(), right=True)
    distance = places[:, None] - places
    seen = (number[:, None] == number) & (distance >= 0)
    if window:
        seen = seen & (distance < window)
    repeats = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    mixed: Tensor = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return mixed.transpose(0, 1)


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for all kernels."""
    monkeypatch.setattr(attention_backends, "_flash", plain)
    around: Any = ModuleType("flash_attn")
    around.cute = ModuleType("flash_attn.cute")
    packages = {
        "flash_attn": around,
        "flash_attn.cute": around.cute,
        "flash_attn.cute.interface": stand_in_4(),
        "flash_attn_interface": stand_in_3(),
    }
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)


def rows_or_documents(q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any], window: int) -> Tensor:
    """As the packages take them: [B, T, H, D], or [N, H, D] and where documents begin."""
    assert how["causal"]
    if how.get("cu_seqlens_q") is not None:
        assert how["cu_seqlens_q"] is how["cu_seqlens_k"]
        return plain(q, k, v, how["cu_seqlens_q"], how["max_seqlen_q"], window, 0.0)
    starts = torch.arange(0, q.shape[0] * q.shape[1] + 1, q.shape[1], dtype=torch.int32)
    laid = (part.flatten(0, 1) for part in (q, k, v))
    return plain(*laid, starts, q.shape[1], window, 0.0).view_as(q)


def stand_in_3() -> Any:
    package: Any = ModuleType("flash_attn_interface")

    def mixed(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        left, right = how["window_size"]
        assert right == (-1 if left == -1 else 0)
        return rows_or_documents(q, k, v, how, 0 if left == -1 else left + 1)

    package.flash_attn_varlen_func = package.flash_attn_func = mixed
    return package


def stand_in_4() -> Any:
    """Two passes, which autograd knows nothing of."""
    package: Any = ModuleType("flash_attn.cute.interface")

    def size(how: dict[str, Any]) -> int:
        left = how.get("window_size_left")
        assert how.get("window_size_right") == (None if left is None else 0)
        return 0 if left is None else int(left) + 1

    def forward(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Any:
        assert how["return_lse"]
        out = rows_or_documents(q, k, v, how, size(how)).contiguous()
        shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (len(q), q.shape[2], q.shape[1])
        return out, torch.zeros(shape), None, None, None

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, sums: Tensor, **how: Any
    ) -> Any:
        assert sums.dtype == torch.float32
        assert out.shape == grad.shape

        def gradients() -> tuple[Tensor, ...]:
            inputs = [part.detach().requires_grad_() for part in (q, k, v)]
            return torch.autograd.grad(rows_or_documents(*inputs, how, size(how)), inputs, grad)

        with ThreadPoolExecutor(1) as another:  # autograd is off on this one, inside an operator
            return another.submit(gradients).result()

    package._flash_attn_fwd, package._flash_attn_bwd = forward, backward
    return package


def test_where_documents_begin() -> None:
    found = packed(DOCUMENTS, 7)
    assert found.window == 7
    assert found.starts.dtype == torch.int32
    assert found.starts.tolist()[:9] == [0, 5, 9, 24, 48, 49, 50, 51, 62]
    assert set(found.starts.tolist()[9:]) == {72}
    assert len(found.starts) == 16 + 1, "a power of two, so that shapes are few"


def test_the_number_that_was_noted_is_taken_and_is_enough() -> None:
    starts = packed(DOCUMENTS, 0).starts.tolist()
    for at_most, places in ((9, 16), (12, 16), (17, 32), (60, 64), (70, 128)):
        noted = packed(note_count(DOCUMENTS.clone(), at_most), 0).starts.tolist()
        assert len(noted) == places + 1
        assert noted[:17] == starts
        assert set(noted[16:]) == {72}
    single = packed(torch.zeros(2, 8), 0)
    assert len(single.starts) == 2 * FEWEST + 1
    every = packed(torch.arange(16).view(2, 8), 0)
    assert every.starts.tolist() == list(range(17))


def test_batches_bring_the_number_along() -> None:
    documents = DOCUMENTS.numpy()
    counts = Counts(72, 57, 57)
    rows = np.zeros((3, 24), np.int64)
    batch = Batch(rows, rows, Bounds.of(documents), counts, {"a": counts}, {"a": 3})
    (there,) = prefetch_to_device([batch], CPU, document_mask=True)
    assert there.documents is not None
    # Eight documents, and padding may end each of three rows.
    assert vars(there.documents) == {"_at_most": 8 + 3}
    assert torch.equal(there.documents, DOCUMENTS)


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("name", ["flash3", "flash4"])
@pytest.mark.parametrize("window", [0, 7])
def test_a_package_attends_to_whole_rows(name: str, window: int) -> None:
    assert attention_error(KERNELS[name], SHAPE, MaskSpec(None, window), CPU, torch.float32) < 1e-5


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("name", ["flash", "flash3", "flash4"])
@pytest.mark.parametrize("spec", SPECS, ids=["documents", "both"])
def test_attention_stays_inside(name: str, spec: MaskSpec) -> None:
    for row in range(3):  # the check takes a row
        assert spec.documents is not None
        one = MaskSpec(spec.documents[row : row + 1], spec.window)
        assert attention_error(KERNELS[name], SHAPE, one, CPU, torch.float32) < 1e-5


@pytest.mark.usefixtures("operator")
@pytest.mark.filterwarnings("ignore")  # torch's compiler about itself
@pytest.mark.parametrize(("mode", "policy"), [("off", "none"), ("blocks", "all")])
def test_a_model_with_packed_documents_is_the_masked_one(
    mode: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    compile_block = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **_: compile_block(self, backend="aot_eager")
    )
    config = ModelConfig(
        vocab_size=50, dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=32, windows=(6, 6, 6, 0)
    )
    tokens = torch.randint(50, (3, 25), generator=torch.Generator().manual_seed(1))
    found = []
    for name, how, again in (("torch", "off", "none"), ("flash", mode, policy)):
        model = Transformer(config)
        init_weights(model, 1)
        model.use_kernels(KERNELS[name], KERNELS[name])
        parallel = ParallelConfig(recompute=again)
        module = apply_parallel(model, parallel, ALONE, TrainConfig(compile=how))
        total, _ = module(tokens[:, :-1], tokens[:, 1:], DOCUMENTS)
        total.backward()
        found.append([total.detach(), *(param.grad for param in model.parameters())])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
