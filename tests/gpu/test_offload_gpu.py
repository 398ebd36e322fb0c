"""Activation offload on a GPU: copies on other streams, the same bits, less memory."""

import gc

import pytest
import torch
from torch import Tensor

from foundling.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from foundling.model import Transformer, init_weights
from foundling.parallel import ALONE
from foundling.runtime.device import choose, set_deterministic
from foundling.train.state import autocast, make_state

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
MODEL = ModelConfig(vocab_size=512, dim=512, layers=8, heads=8, kv_heads=4, ffn_dim=2048)


def gradients(offloads: bool, policy: str, mode: str) -> tuple[dict[str, Tensor], int]:
    """Of three micro-batches, and the peak of memory beside what others hold."""
    torch._dynamo.reset()
    gc.collect()
    held = torch.cuda.memory_allocated()
    model = Transformer(MODEL)
    init_weights(model, 1)
    model.to(CUDA)
    # Deterministic: a compiler that times its kernels may take others the second time.
    train = TrainConfig(compile=mode, attention="flash", deterministic=True)  # type: ignore[arg-type]
    parallel = ParallelConfig(recompute=policy, offload_activations=offloads)
    config = RunConfig(model=MODEL, train=train, parallel=parallel)
    state = make_state(model, config, ALONE, choose("cuda", "bf16"))
    generator = torch.Generator().manual_seed(3)
    for micro in range(3):
        tokens = torch.randint(512, (16, 1025), generator=generator).to(CUDA)
        if micro == 1:  # the first compiles
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        with autocast(state):
            total, _ = state.module(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)
            (total / 1e4).backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    grads = {name: param.grad.clone() for name, param in model.named_parameters()}  # type: ignore[union-attr]
    return grads, peak - held


# per-op is refused where nothing is compiled: what it keeps would not reach the hooks.
CASES = [
    *((policy, mode) for policy in ("none", "ffn", "all") for mode in ("off", "blocks")),
    ("per-op", "blocks"),
]


@pytest.mark.parametrize(("policy", "mode"), CASES)
def test_the_same_bits_in_less_memory(policy: str, mode: str) -> None:
    set_deterministic(True)
    try:
        wanted, before = gradients(False, policy, mode)
        found, after = gradients(True, policy, mode)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, grad in wanted.items():
        assert torch.equal(grad, found[name]), name
    assert after < before, (before, after)
    if policy == "none":
        assert after < 0.75 * before, (before, after)
