"""Presets: named starting points, as functions that build on each other.

A preset is values and nothing else; no code elsewhere knows its name. Shapes and recipes of the
published models are facts with their counts pinned by tests. Rejected: YAML files (they cannot
share a base without inventing inheritance).
"""

from collections.abc import Callable
from dataclasses import replace

from foundling.config.sections import (
    CheckpointConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)


def hamlet() -> RunConfig:
    """The demo's pretraining: a model that learns a village in minutes on two cores.

    Found by some ninety runs, told in docs/log.md: the wider embedding init made the largest
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
            init_std=0.06,
        ),
        optim=OptimConfig(
            lr=3e-3, schedule="wsd", decay_share=0.5, warmup_share=0.03, weight_decay=0.3
        ),
        train=TrainConfig(tokens=3_200_000, seq_len=256, batch_size=8, param_count="all"),
        checkpoint=CheckpointConfig(every=100),
        eval=EvalConfig(every=200, tokens=16384, sample_every=200),
        log=LogConfig(every=50),
    )


def hamlet_chat() -> RunConfig:
    """The demo's fine-tuning. Give it conversations and, as a second source of equal weight, the
    documents again: without them facts are forgotten while manners are learned."""
    base = hamlet()
    return replace(
        base,
        optim=OptimConfig(lr=2e-3, schedule="cosine", warmup_share=0.03, weight_decay=0.01),
        train=replace(base.train, stage="finetune", init="runs/hamlet", tokens=460_000),
        checkpoint=CheckpointConfig(every=50),
        eval=replace(base.eval, every=100, sample_every=100),
    )


def _clm(dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int) -> RunConfig:
    """Account 000's Llama-style family: 22 tokens per parameter without the input embedding."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=49152,
            dim=dim,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            ffn_dim=ffn_dim,
            norm_eps=1e-5,
            rope_theta=10000.0,
        ),
        optim=OptimConfig(lr=1e-4, schedule="linear", warmup_share=0.2),
        train=TrainConfig(tokens_per_param=22, seq_len=2048, param_count="no-input-embedding"),
    )


def _llama3(
    dim: int, layers: int, heads: int, ffn_dim: int, *, vocab_size: int = 128256, tied: bool = False
) -> RunConfig:
    """Meta's Llama 3 shapes: eight key-value heads, rope base 500,000."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=vocab_size,
            dim=dim,
            layers=layers,
            heads=heads,
            kv_heads=8,
            ffn_dim=ffn_dim,
            rope_theta=500000.0,
            tie_embeddings=tied,
        ),
        train=TrainConfig(seq_len=8192, batch_size=1, param_count="all"),
    )


def _llama_1b24() -> RunConfig:
    """Account 004's model: 20B tokens at 2^20 a step."""
    base = _llama3(2048, 16, 32, 8192, vocab_size=131072, tied=True)
    return replace(
        base,
        optim=OptimConfig(lr=3e-4, schedule="cosine", warmup_share=0.01, final_lr_share=0.1),
        train=TrainConfig(
            tokens=20_000_000_000,
            seq_len=2048,
            batch_size=16,
            global_batch_tokens=2**20,
            param_count="all",
        ),
    )


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
    "llama-1.24b": _llama_1b24,
}
