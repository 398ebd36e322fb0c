"""Small models with every parameter random, as files and as runs, for tests of conversions."""

from pathlib import Path

import torch

from foundling.checkpoint.convert.convert import WRITERS
from foundling.checkpoint.convert.detect import open_source
from foundling.checkpoint.convert.model_source import ConvertPlan, Kind, SidecarShape, sidecar_json
from foundling.config.model import ModelConfig
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer

BASE = ModelConfig(vocab_size=211, dim=48, layers=2, heads=6, kv_heads=2, ffn_dim=112)
SCALED = BASE.replace(rope_theta=500_000.0, rope_scaling={"factor": 8.0, "original": 128})
FAMILIES: dict[str, ModelConfig] = {
    "llama 2": BASE.replace(kv_heads=0),
    "llama 3.1": SCALED,
    "llama 3.2": SCALED.replace(rope_scaling={"factor": 32.0}, tie_embeddings=True),
    "wide heads": BASE.replace(head_dim=16),
    "qwen 2": BASE.replace(bias="qkv", norm_eps=1e-6, tie_embeddings=True),
    "qwen 3": BASE.replace(qk_norm=True, head_dim=12),
    "gpt 2": ModelConfig(
        vocab_size=211,
        dim=48,
        layers=2,
        heads=6,
        ffn_dim=112,
        activation="gelu",
        norm="layer",
        bias="all",
        positions=200,
        tie_embeddings=True,
    ),
    "depth": BASE.replace(
        activation="relu2",
        norm="rms-unscaled",
        qk_norm=True,
        embed_norm=True,
        rope_theta=100_000.0,
        value_embeds=True,
        residual_scales=True,
        logit_softcap=15.0,
        windows=(40, 40, 40, 0),
    ),
}
META = ("llama 2", "llama 3.1", "llama 3.2")


def random_model(config: ModelConfig, seed: int = 3) -> Transformer:
    """Ones and zeros would hide what is left out."""
    model = Transformer(config)
    init_weights(model, 7)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.2 if parameter.dim() == 1 else 0.1)
    return model.eval()


def as_file(path: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Path:
    """A torch.save file of ours with a random model."""
    model = random_model(config).to(dtype)
    torch.save({"model": model.state_dict(), "foundling": sidecar_json(SidecarShape(config))}, path)
    return path


def as_layout(folder: Path, config: ModelConfig, to: Kind) -> Path:
    """A random model in a layout, written and not compared: that is what conversions are for."""
    source = open_source(as_file(folder / "given.pt", config))
    (folder / f"given-{to}").mkdir()
    WRITERS[to](folder / f"given-{to}", ConvertPlan(source))
    return folder / f"given-{to}"


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a source by our names."""
    source = open_source(path)
    return {name: source.read(name).clone() for name in source.places}


def same(one: Path, other: Path) -> bool:
    """Whether two sources have the same config and the same bits."""
    if open_source(one).model != open_source(other).model:
        return False
    left, right = weights_of(one), weights_of(other)
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )
