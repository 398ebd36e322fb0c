"""What only a GPU can show of the fast paths: graphs with accumulation, copies ahead, the cache."""

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from foundling.config.model import ModelConfig
from foundling.config.optim import OptimConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.run import RunConfig
from foundling.config.train import TrainConfig
from foundling.data.batch import Batch, Bounds, Counts
from foundling.model.initialization import init_weights
from foundling.model.layers import Embedding
from foundling.model.transformer import Transformer
from foundling.parallel.mesh import ALONE
from foundling.runtime.device import choose_device
from foundling.train.state import make_state
from foundling.train.step import StepOptions, prefetch_to_device, train_step

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
MODEL = ModelConfig(vocab_size=512, dim=128, layers=3, heads=2, ffn_dim=256)


def batch(step: int, micro: int, width: int = 128) -> Batch:
    tokens = np.random.default_rng((step, micro)).integers(512, size=(4, width + 1))
    inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    counts = Counts(inputs.size, inputs.size, inputs.size)
    documents = np.arange(width) // (width // 3) + np.arange(4)[:, None] * 4
    bounds = Bounds.of(documents.astype(np.int32))
    return Batch(inputs, targets, bounds, counts, {"a": counts}, {"a": 4})


DEPTH = MODEL.replace(
    activation="relu2", value_embeds=True, residual_scales=True, logit_softcap=15.0
)


EVERY_WIDTH, ONE_WIDTH = (128, 128, 64, 128, 128), (128, 128, 128)


@lru_cache
def course(
    mode: str,
    *,
    kernel: str = "flash",
    shape: ModelConfig = MODEL,
    widths: tuple[int, ...] = EVERY_WIDTH,
    recompute: str = "none",
    masked: str = "",
) -> list[float]:
    """Losses and gradient norms of steps of three micro-batches, an evaluation and other rows
    between them. Each is taken once: what it costs is compiling."""
    torch._dynamo.reset()
    model = Transformer(shape)
    init_weights(model, 1)
    model.to(CUDA)
    feed = "fused" if shape.activation == "relu2" and mode != "off" else "plain"
    kernels: Any = {"attention": kernel, "attention_masked": masked or "torch", "mlp": feed}
    train = TrainConfig(compile=mode, kernels=kernels)  # type: ignore[arg-type]
    parallel = ParallelConfig(recompute=recompute)
    config = RunConfig(model=shape, optim=OptimConfig(), train=train, parallel=parallel)
    state, found = (
        make_state(
            model, config.train, config.optim, config.parallel, ALONE, choose_device("cuda", "bf16")
        ),
        [],
    )
    for step, width in enumerate(widths):
        batches = [batch(step, micro, width) for micro in range(3)]
        options = StepOptions(lr=1e-3, clip=1.0, sources=["a"], document_mask=bool(masked))
        result = train_step(state, batches, options)
        found += [result.loss, result.grad_norm]
        if step == 1:
            rows = torch.arange(96, device=CUDA).view(2, 48)
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                found.append(float(state.model.loss(rows, rows)[0]))
    return found


@pytest.mark.parametrize("mode", ["blocks", "model", "graphs"])
def test_a_compiled_course_is_the_eager_one(mode: str) -> None:
    assert course(mode) == pytest.approx(course("off"), rel=1e-2)


@pytest.mark.parametrize("mode", ["blocks", "model", "graphs"])
def test_a_fused_feed_forward_learns_as_a_plain_one(mode: str) -> None:
    counters.clear()
    found = course(mode, shape=DEPTH)
    assert not counters["graph_break"]
    assert found == pytest.approx(course("off", shape=DEPTH), rel=1e-2)


@pytest.mark.parametrize("policy", ["all", "ffn", "per-op", "budget-0.5"])
def test_a_fused_feed_forward_is_made_again(policy: str) -> None:
    found = course("blocks", shape=DEPTH, widths=ONE_WIDTH, recompute=policy)
    assert found == pytest.approx(course("off", shape=DEPTH, widths=ONE_WIDTH), rel=1e-2)


GROUPED = MODEL.replace(kv_heads=1)


@pytest.mark.parametrize("policy", ["all", "per-op", "budget-0.5"])
@pytest.mark.parametrize("mode", ["blocks", "model", "graphs"])
def test_recompute_under_every_compiler(mode: str, policy: str) -> None:
    found = course(mode, shape=GROUPED, widths=ONE_WIDTH, recompute=policy)
    assert found == pytest.approx(course("off", shape=GROUPED, widths=ONE_WIDTH), rel=1e-2)


@pytest.mark.parametrize("mode", ["blocks", "model", "graphs"])
def test_documents_under_every_compiler(mode: str) -> None:
    plain = course("off", shape=GROUPED, masked="math")
    assert plain != pytest.approx(course("off", shape=GROUPED), rel=1e-3)  # they are masked
    assert course(mode, shape=GROUPED, masked="flash") == pytest.approx(plain, rel=1e-2)


def test_tables_gradients_are_autograds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Added where they lie, and added by autograd."""
    found = course("off", shape=DEPTH)
    monkeypatch.setattr(Embedding, "adds_in_place", property(lambda _: False, lambda *_: None))
    assert found == pytest.approx(course.__wrapped__("off", shape=DEPTH), rel=1e-3)


def test_copies_ahead_bring_what_was_sent() -> None:
    sent = [batch(0, micro) for micro in range(16)]
    busy = torch.randn(4096, 4096, device=CUDA)
    sums = []
    for rows in prefetch_to_device(sent, CUDA, document_mask=True):
        for _ in range(20):  # the device lags behind: a copy must not overtake its reader
            busy = busy @ busy / 64
        assert rows.documents is not None
        sums.append(rows.inputs.sum() + 3 * rows.targets.sum() + rows.documents.sum())
    wanted = [int(b.inputs.sum() + 3 * b.targets.sum() + b.documents.sum()) for b in sent]
    assert [int(total) for total in sums] == wanted


PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from test_speed_gpu import course
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CUDA]) as trace:
    course("blocks", kernel=sys.argv[1])
print("|".join({event.key for event in trace.key_averages()}))
"""


def test_a_cached_graph_keeps_to_the_runs_own_kernel(tmp_path: Path) -> None:
    """The same cache for both: the second run must not get the first one's attention."""
    home = {**os.environ, "FOUNDLING_HOME": str(tmp_path)}
    home.pop("TORCHINDUCTOR_CACHE_DIR", None)
    found = {}
    for kernel in ("flash", "cudnn"):
        command = [sys.executable, "-c", PROGRAM, kernel, str(Path(__file__).parent)]
        done = subprocess.run(command, env=home, capture_output=True, text=True, check=True)
        found[kernel] = done.stdout
    assert (tmp_path / "compiled").is_dir()
    assert "flash_fwd" in found["flash"]
    assert "flash_fwd_kernel" not in found["cudnn"]
