"""Presets: named starting points, as functions that build on each other.

A preset is values and nothing else; no code elsewhere knows its name. Shapes and recipes of the
published models are facts with their counts pinned by tests. Rejected: YAML files (they cannot
share a base without inventing inheritance).
"""

import math
import re
from collections.abc import Callable

from foundling.config.data import DataConfig
from foundling.config.model import InitConfig, ModelConfig, RopeScaling
from foundling.config.optim import OptimConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.run import CheckpointConfig, EvalConfig, LogConfig, RunConfig
from foundling.config.train import TrainConfig

_DEPTH_PRESET = re.compile(r"depth-([1-9]\d?)")


def hamlet() -> RunConfig:
    """The demo's pretraining: a model that learns a village in minutes on two cores.

    Found by some ninety runs (docs/log.md): the wider embedding init made the largest
    difference to facts that were only read, then weight decay and the long linear decay.
    """
    return RunConfig(
        model=ModelConfig(
            vocab_size=2048,
            dim=160,
            layers=3,
            heads=5,
            ffn_dim=448,
            tie_embeddings=True,
            init=InitConfig(std=0.06),
        ),
        optim=OptimConfig(lr=3e-3, schedule="wsd", decay_share=0.5, warmup=0.03, weight_decay=0.3),
        train=TrainConfig(horizon="3.2M tokens", seq_len=256, batch_size=8, param_count="all"),
        checkpoint=CheckpointConfig(every=100),
        eval=EvalConfig(every=200, tokens=16384),
        log=LogConfig(every=50),
    )


def hamlet_chat() -> RunConfig:
    """The demo's fine-tuning. Give it conversations and, as a second source of equal weight, the
    documents again: without them facts are forgotten while manners are learned."""
    base = hamlet()
    return base.replace(
        optim=OptimConfig(lr=2e-3, schedule="cosine", warmup=0.03, weight_decay=0.01),
        train={"start": "runs/hamlet", "horizon": "460K tokens"},
        checkpoint=CheckpointConfig(every=50),
        eval={"every": 100},
    )


def _clm(dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int) -> RunConfig:
    """A torchtitan tutorial's Llama-style family on FineWeb-Edu: 22 tokens per parameter without
    the input embedding."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=49152,
            dim=dim,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            ffn_dim=ffn_dim,
        ),
        optim=OptimConfig(lr=1e-4, schedule="linear", warmup=0.2),
        train=TrainConfig(
            horizon="22 tokens/param", seq_len=2048, param_count="no-input-embedding"
        ),
    )


def _llama3(
    dim: int, layers: int, heads: int, ffn_dim: int, *, tied: bool = False, rope_scaling: float = 1
) -> RunConfig:
    """Meta's Llama 3 shapes: eight key-value heads, rope base 500,000; 3.1 scales the rotary
    positions by 8, 3.2 by 32."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=128256,
            dim=dim,
            layers=layers,
            heads=heads,
            kv_heads=8,
            ffn_dim=ffn_dim,
            rope_theta=500000.0,
            rope_scaling=RopeScaling(factor=rope_scaling),
            tie_embeddings=tied,
        ),
        train=TrainConfig(seq_len=8192, batch_size=1, param_count="all"),
    )


def _llama31_8b() -> RunConfig:
    """With the continued pretraining on Frontier (name the weights with --start): 21 rows of 8192 a
    data-parallel rank, everything recomputed. Its layout (shard 32 x tensor 8) is left open: it is
    one of 256 GPUs and more."""
    base = _llama3(4096, 32, 32, 14336, rope_scaling=8)
    return base.replace(
        optim=OptimConfig(lr=3e-5, schedule="linear", warmup=500),
        train={"horizon": 500_000, "batch_size": 21},
        parallel=ParallelConfig(recompute="all"),
        checkpoint=CheckpointConfig(every=100),
    )


def _llama31_8b_cluster(replicate: int) -> RunConfig:
    """The run of Llama-3.1-8B on Frontier's nodes of eight dies: shard 32 x tensor 8, and a replica
    for every 32 nodes; every block recomputed in the backward pass. It trained without the rotary
    scaling that its weights came with and evaluated with it; here both have it."""
    base = _llama31_8b()
    parallel = ParallelConfig(replicate=replicate, shard=32, tensor=8, recompute="all")
    return base.replace(parallel=parallel)


def _llama31_8b_bench() -> RunConfig:
    """The benchmark of Llama-3.1-8B on Frontier: eight nodes, everything sharded, LayerNorm, one
    row a die."""
    base = _llama31_8b()
    return base.replace(
        model={"norm": "layer"},
        parallel=ParallelConfig(replicate=1, shard=64, recompute="per-op"),
        optim={"warmup": 0},
        train={"horizon": 100, "batch_size": 1},
    )


def _llama_1b24() -> RunConfig:
    """A 1.24B Llama trained on eight H100s: 20B tokens at 2^20 a step."""
    base = _llama3(2048, 16, 32, 8192, tied=True)
    return base.replace(
        model={"vocab_size": 131072},
        optim=OptimConfig(lr=3e-4, schedule="cosine", warmup=0.01, final_lr_share=0.1),
        train=TrainConfig(
            horizon="20B tokens",
            seq_len=2048,
            batch_size=16,
            global_batch_tokens=2**20,
            param_count="all",
        ),
    )


def _qwen2(vocab_size: int) -> RunConfig:
    """Qwen2-0.5B, as it was trained on four GPUs of 24 GB: 100,000 steps of 112 rows, of which the
    longest bucket but one is written here, 2048 tokens (buckets by length are not)."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=vocab_size,
            dim=896,
            layers=24,
            heads=14,
            kv_heads=2,
            ffn_dim=4864,
            bias="qkv",
            norm_eps=1e-6,
            rope_theta=1_000_000.0,
            tie_embeddings=True,
        ),
        optim=OptimConfig(
            lr=5e-4, betas=(0.9, 0.999), schedule="quarter-cosine", warmup=2000, final_lr_share=0.1
        ),
        train=TrainConfig(
            horizon="100000 steps",
            seq_len=2048,
            batch_size=7,
            global_batch_tokens=112 * 2048,
            param_count="all",
        ),
    )


def _tinygpt() -> RunConfig:
    """A 460M GPT after nanochat: learned positions, LayerNorm, biases, ReLU, dropout. Its horizon
    is 20 tokens per parameter at 524,288 a step."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=50257,
            dim=1280,
            layers=20,
            heads=10,
            ffn_dim=5120,
            activation="relu",
            norm="layer",
            bias="all",
            positions=2048,
            dropout=0.1,
        ),
        optim=OptimConfig(lr=6e-4, schedule="cosine", warmup=0.01, final_lr_share=0.1),
        train=TrainConfig(
            horizon="20 tokens/param", seq_len=2048, batch_size=8, global_batch_tokens=2**19
        ),
    )


def _qwen2_on_24gb() -> RunConfig:
    """The Qwen2-0.5B run on one GPU of 24 GB: documents in buckets by length, 14,336 padded tokens
    a micro-batch (56 rows of 256, 7 of 2048, one of 8192), every block recomputed."""
    base = _qwen2(50258)
    return base.replace(
        data=DataConfig(packing="bucket", bucket_tokens=7 * 2048),
        train={"seq_len": 8192, "batch_size": 1},
        parallel=ParallelConfig(recompute="all"),
    )


def _tinygpt_on_16gb() -> RunConfig:
    """The 460M GPT after nanochat on one GPU of 16 GB: 8-bit moments."""
    base = _tinygpt()
    return base.replace(optim={"name": "adamw8bit"}, train={"batch_size": 4})


def _llama_1b24_on_24gb() -> RunConfig:
    """The 1.24B Llama on one GPU of 24 GB: moments in 8 bits (in fp32 they alone are 10 GB), the
    feed-forward halves recomputed."""
    base = _llama_1b24()
    return base.replace(
        optim={"name": "adamw8bit"},
        train={"batch_size": 4},
        parallel=ParallelConfig(recompute="ffn"),
    )


def _depth(layers: int) -> RunConfig:
    """The depth dial after nanochat's public recipe: one number gives the shape and the run.

    Left out of that recipe: the token smear and the mid-layer subtraction (26 parameters in all),
    the second moment of Muon's rows, and the warm-up of its momentum (docs/optim.md).
    """
    dim = -(-64 * layers // 128) * 128
    batch = _depth_batch(layers, dim)
    return RunConfig(
        model=ModelConfig(
            vocab_size=32768,
            dim=dim,
            layers=layers,
            heads=dim // 128,
            head_dim=128,
            ffn_dim=4 * dim,
            activation="relu2",
            norm="rms-unscaled",
            qk_norm=True,
            embed_norm=True,
            rope_theta=100_000.0,
            value_embeds=True,
            residual_scales=True,
            logit_softcap=15.0,
            init=InitConfig(std=0.8, head_std=0.001, outputs="zero"),
        ),
        optim=_depth_optim(layers, dim, batch),
        train=TrainConfig(
            horizon="10.5 tokens/param",
            seq_len=2048,
            batch_size=32,
            global_batch_tokens=batch,
            param_count="matrices-and-head",
        ),
    )


def _depth_batch(layers: int, dim: int) -> int:
    """Tokens of a step: 2^19 at depth 12, growing with the 0.383th power of the horizon (a fit over
    many runs: Bergsma et al. 2025), rounded down to a power of two: depth 20 still has 2^19."""
    matrices = 12 * dim * dim * layers + 32768 * dim
    at_12 = 12 * 768 * 768 * 12 + 32768 * 768
    return 1 << math.floor(19 + 0.383 * math.log2(matrices / at_12))


def _depth_optim(layers: int, dim: int, batch: int) -> OptimConfig:
    """Muon's rate is the same at every width; AdamW's fall with its root. A larger batch is worth
    the root of its size in rate, and the decay falls with the square of the depth."""
    more = (batch / 2**19) ** 0.5
    rest = more * (768 / dim) ** 0.5
    return OptimConfig(
        name="muon",
        muon_scale="spectral",
        lr=0.02 * more,
        lr_of={"embedding": 0.3 * rest, "head": 0.004 * rest, "vector": 0.01 * more},
        betas=(0.8, 0.95),
        eps=1e-10,
        weight_decay=0.2 * (12 / layers) ** 2,
        cautious_decay=True,
        clip=0.0,
        schedule="wsd",
        decay_share=0.5,
    )


DERIVED_FROM = ("train.global_batch_tokens", "model.layers", "model.dim")
"""Settings that a depth preset's rates follow from."""


def derived_rates(name: str, config: RunConfig) -> dict[str, float]:
    """The rates and the decay that a depth preset has for the batch and the shape of `config`; none
    for another preset or optimizer, or while the batch is left to the number of processes."""
    batch = config.train.global_batch_tokens
    if not _DEPTH_PRESET.fullmatch(name) or config.optim.name != "muon" or not 0 < batch < 2**63:
        return {}
    optim = _depth_optim(config.model.layers, config.model.dim, batch)
    parts = {f"lr_of.{part}": rate for part, rate in optim.lr_of.items()}
    return {"lr": optim.lr, **parts, "weight_decay": optim.weight_decay}


PRESETS: dict[str, Callable[[], RunConfig]] = {
    "hamlet": hamlet,
    "hamlet-chat": hamlet_chat,
    "clm-debug": lambda: _clm(128, 2, 4, 2, 512),
    "clm-60m": lambda: _clm(384, 22, 6, 2, 1408),
    "clm-200m": lambda: _clm(768, 24, 12, 4, 2688),
    "clm-400m": lambda: _clm(960, 30, 15, 5, 3328),
    "clm-600m": lambda: _clm(1152, 32, 18, 6, 4096),
    "clm-1.1b": lambda: _clm(1536, 32, 24, 8, 5376),
    "llama3-8b": lambda: _llama3(4096, 32, 32, 14336),
    "llama3-70b": lambda: _llama3(8192, 80, 64, 28672),
    "llama3.1-8b": _llama31_8b,
    "llama3.1-8b-n64": lambda: _llama31_8b_cluster(2),
    "llama3.1-8b-n640": lambda: _llama31_8b_cluster(20),
    "llama3.1-8b-n8-bench": _llama31_8b_bench,
    "llama3.1-70b": lambda: _llama3(8192, 80, 64, 28672, rope_scaling=8),
    "llama3.1-405b": lambda: _llama3(16384, 126, 128, 53248, rope_scaling=8),
    "llama3.2-1b": lambda: _llama3(2048, 16, 32, 8192, tied=True, rope_scaling=32),
    "llama3.2-3b": lambda: _llama3(3072, 28, 24, 8192, tied=True, rope_scaling=32),
    "llama-1.24b": _llama_1b24,
    "qwen2-0.5b": lambda: _qwen2(151936),
    "qwen2-0.5b-gpt2": lambda: _qwen2(50258),
    "tinygpt-524m": _tinygpt,
    "qwen2-0.5b-gpt2-24gb": _qwen2_on_24gb,
    "tinygpt-524m-16gb": _tinygpt_on_16gb,
    "llama-1.24b-24gb": _llama_1b24_on_24gb,
    "depth-12": lambda: _depth(12),
    "depth-20": lambda: _depth(20),
}


def find_preset(name: str) -> RunConfig | None:
    """The preset of this name; depth-N exists for every N up to 99."""
    if name in PRESETS:
        return PRESETS[name]()
    match = _DEPTH_PRESET.fullmatch(name)
    return _depth(int(match[1])) if match else None
