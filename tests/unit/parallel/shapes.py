"""Tiny models on which the policies of memory are tried."""

from foundling.config.model import ModelConfig

PLAIN = ModelConfig(vocab_size=50, dim=16, layers=5, heads=4, kv_heads=2, ffn_dim=32)
DEPTH = PLAIN.replace(
    qk_norm=True,
    norm="rms-unscaled",
    activation="relu2",
    windows=(4, 4, 4, 0),
    value_embeds=True,
    residual_scales=True,
    logit_softcap=15.0,
)
