"""Memory by part: against what autograd really keeps, and the ways it must move."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foundling.config.load import load_config
from foundling.config.model import ModelConfig
from foundling.model import loss
from foundling.model.transformer import Transformer
from foundling.optim.muon import MOST
from foundling.plan import memory
from foundling.plan.hardware import TABLE
from foundling.plan.layout import MeshLayout
from foundling.plan.memory import (
    MUON_STACK,
    activation_bytes,
    attention_kernel,
    block_parts,
    optimizer_bytes,
    plan_memory,
)
from foundling.plan.params import sizes_of
from foundling.plan.workload import Workload

BIG = load_config("llama-1.24b").model
H200 = TABLE["h200"]
GPT = {"activation": "relu", "norm": "layer", "bias": "all", "positions": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2},
    "qwen": {"kv_heads": 2, "bias": "qkv"},
    "gpt": GPT,
    "gpt with dropout": {**GPT, "dropout": 0.1},
    "depth": {
        "activation": "relu2",
        "norm": "rms-unscaled",
        "qk_norm": True,
        "embed_norm": True,
        "value_embeds": True,
        "residual_scales": True,
    },
    "windows": {"windows": (16,)},
}


def work(**how: Any) -> Workload:
    return Workload(**{"model": BIG, "seq_len": 2048, "batch": 16, **how})


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_keeps_what_the_plan_says(shape: str) -> None:
    """Bytes that autograd saves on the CPU, each storage once: four blocks less two."""
    shapes = {"vocab_size": 64, "dim": 64, "heads": 4, "ffn_dim": 192, **SHAPES[shape]}
    few, many = (ModelConfig(layers=layers, **shapes) for layers in (2, 4))
    saved = (saved_bytes(many) - saved_bytes(few)) / (2 * 2 * 64)
    work = Workload(model=few, seq_len=64, batch=2, dtype="fp32")
    planned = sum(sum(block_parts(work, TABLE["cpu"], n).values()) for n in range(2)) / 2
    assert planned == pytest.approx(saved, rel=0.03)


def saved_bytes(model: ModelConfig) -> int:
    """What a forward pass of two rows of 64 keeps for the backward pass, weights left out."""
    built = Transformer(model).train()
    weights = {param.untyped_storage().data_ptr() for param in built.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = built.hidden(torch.randint(0, 64, (2, 64)))
    assert hidden.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_the_chunks_are_the_models_own() -> None:
    for name in ("CHUNK_LOGITS", "MOST_CHUNK_LOGITS", "CHUNK_SHARE", "MOST_CHUNK_ROWS"):
        assert getattr(memory, name) == getattr(loss, name)
    assert MUON_STACK == MOST


def test_states_are_exact() -> None:
    sizes = sizes_of(BIG)
    assert sizes.all == 1_241_581_568
    assert (sizes.tables, sizes.head) == (0, 131072 * 2048)
    parts = plan_memory(work(), H200).moments["step"]
    assert parts["weights"] == parts["gradients"] == 4 * sizes.all
    assert parts["optimizer"] == 8 * sizes.all
    assert optimizer_bytes("adamw8bit", sizes) == pytest.approx(2.125 * sizes.all, rel=0.01)
    muon = optimizer_bytes("muon", sizes)
    assert muon == 4 * sizes.blocks + 8 * (sizes.all - sizes.blocks)


def test_recompute_saves_in_order() -> None:
    def kept(policy: str) -> float:
        return activation_bytes(work(recompute=policy), H200)["kept"]

    assert kept("none") > kept("every-3") > kept("every-2") > kept("all")
    assert kept("none") > kept("per-op") > kept("all")
    assert kept("all") == 4 * BIG.dim * 16 * 2048 * BIG.layers
    assert activation_bytes(work(recompute="none"), H200)["made again"] == 0


def test_memory_grows_with_the_batch_and_shrinks_with_shards() -> None:
    peaks = [plan_memory(work(batch=batch), H200).peak for batch in (1, 2, 4, 8, 16, 32)]
    assert peaks == sorted(peaks)
    alone = plan_memory(work(), H200).parts
    sharded = plan_memory(work(layout=MeshLayout(shard=8)), H200).parts
    assert sharded["weights"] == pytest.approx(alone["weights"] / 8)
    assert "gathered weights" in sharded
    split = plan_memory(work(layout=MeshLayout(tensor=8)), H200)
    assert split.peak < plan_memory(work(), H200).peak / 4


def test_gradients_wait_when_there_is_more_than_one_micro_step() -> None:
    assert "gradients" not in plan_memory(work(), H200).moments["forward"]
    assert "gradients" in plan_memory(work(accumulation=2), H200).moments["forward"]


def test_the_math_path_of_fp32_attention_is_counted() -> None:
    """Account 004: 22.5 GB instead of 6.2."""
    fp32 = work(dtype="fp32", batch=3)
    assert attention_kernel(fp32, H200, 0) == "efficient"
    assert attention_kernel(work(), H200, 0) == "cudnn"
    assert attention_kernel(work(document_mask=True), H200, 0) == "flex"
    fp32 = replace(fp32, kernel="math")
    assert attention_kernel(work(), TABLE["a100-80"], 0) == "flash"
    scores = block_parts(fp32, H200, 0)["attention scores"] * fp32.positions * BIG.layers
    assert scores == pytest.approx(27.4e9, rel=0.01)
    repeated = replace(fp32, kernel="")
    whole = replace(repeated, model=BIG.replace(kv_heads=32))
    kept = [block_parts(one, H200, 0)["attention"] for one in (repeated, whole)]
    assert kept[0] == kept[1], "repeated for every query head"


def test_the_fused_loss_is_smaller_than_the_plain_one() -> None:
    fused, plain = plan_memory(work(), H200), plan_memory(work(loss="plain"), H200)
    assert plain.peak - fused.peak > 40e9
    assert plain.moment == "loss"


def test_tasks_are_planned_with_the_cache_that_they_have() -> None:
    from foundling.eval.task_scoring import evaluation_engine

    model = ModelConfig(vocab_size=50, dim=32, layers=3, heads=4, kv_heads=2, ffn_dim=64)
    engine = evaluation_engine(Transformer(model), torch.device("cpu"), max_tokens=128)
    real = engine.cache.bytes
    work = Workload(model=model, seq_len=64, batch=2, dtype="fp32")
    planned = plan_memory(replace(work, asks=True), H200).moments["tasks"]["key-value cache"]
    assert planned == pytest.approx(real, rel=0.01)  # there is a block more, which is nobody's
    assert "tasks" not in plan_memory(work, H200).moments
