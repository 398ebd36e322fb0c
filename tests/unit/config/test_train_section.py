"""Settings of speed that cannot work together, or would have no effect, are refused by name."""

import pytest

from foundling.config.errors import ConfigError
from foundling.config.load import load_config

FLOAT8 = {"train.float8": "tensorwise"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"train.z-loss": "-1"}, "train.z_loss cannot be negative"),
        (
            {"parallel.recompute": "budget-0.5", "train.compile": "off"},
            "budget-0.5 has no effect while train.compile is off",
        ),
        ({**FLOAT8, "parallel.tensor": "2"}, "not built for parallel.tensor"),
        ({**FLOAT8, "parallel.shard": "2", "parallel.fsdp1": "true"}, "for parallel.fsdp1"),
        (
            {**FLOAT8, "train.dtype": "fp32"},
            "needs train.dtype bf16, and it is fp32; set train.dtype bf16 or",
        ),
        ({"train.float8-skip": "[attn]"}, "train.float8_skip has no effect"),
        ({"train.float8-skip": "[]"}, "train.float8_skip has no effect"),
        (
            {**FLOAT8, "train.float8-skip": "[]", "train.kernels.loss": "plain"},
            "needs train.kernels.loss fused",
        ),
        (
            {**FLOAT8, "train.float8-skip": "[]", "train.kernels.loss": "auto"},
            "it is auto; use fused",
        ),
        ({**FLOAT8, "train.float8-skip": "[]", "model.dim": "72"}, "a multiple of 16"),
        ({"train.compile": "model", "parallel.shard": "2"}, "use train.compile blocks"),
        ({"train.compile": "graphs", "parallel.tensor": "2"}, "use train.compile blocks"),
        (
            {"train.kernels.loss": "torch", "train.z-loss": "1e-4"},
            "train.kernels.loss torch knows neither",
        ),
        ({"train.kernels.loss": "torch", "parallel.shard": "2"}, "parallel.shard cuts it"),
        ({"train.kernels.loss": "liger", "parallel.tensor": "2"}, "parallel.tensor cuts it"),
    ],
)
def test_what_cannot_work_is_named(settings: dict[str, str], named: str) -> None:
    shape = {"model.heads": "4", "model.dim": "64", "model.ffn-dim": "64", "model.kv-heads": "4"}
    with pytest.raises(ConfigError, match=named) as caught:
        load_config("hamlet", {**shape, **settings})
    assert str(caught.value).count(". ") == 0  # one sentence


@pytest.mark.parametrize(
    "settings",
    [
        {"parallel.recompute": "budget-0.5"},
        {"parallel.recompute": "budget-0.5", "train.compile": "blocks"},
        {**FLOAT8, "parallel.shard": "2"},
        {"train.compile": "blocks", "parallel.shard": "2"},
        {"train.z-loss": "1e-4", "parallel.tensor": "2", "model.heads": "4", "model.kv-heads": "4"},
    ],
)
def test_what_works_is_let_through(settings: dict[str, str]) -> None:
    load_config("hamlet", settings)
