"""Killed in the middle, every way to compute a step goes on to the same bits (train.deterministic).

What torch cannot repeat (some attention kernels' gradients) is refused by name before the run.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from killed_run import assert_goes_on_to_the_same_bits

from foundling.config.errors import ConfigError
from foundling.config.run import RunConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "float8 tensorwise": {"train": {"float8": "tensorwise"}},
    "float8 rowwise": {"train": {"float8": "rowwise"}},
    "float8 and 8-bit moments": {
        "train": {"float8": "tensorwise"},
        "optim": {"name": "adamw8bit"},
    },
    "float8 logits": {"train": {"float8": "tensorwise", "float8_skip": ()}},
    "plain loss": {"train": {"kernels": {"loss": "plain"}}},
    "eager": {"train": {"compile": "off"}},
    "one graph": {"train": {"compile": "model"}},
    "CUDA graphs": {"train": {"compile": "graphs"}},
    "recompute ffn": {"parallel": {"recompute": "ffn"}},
    "recompute per-op": {"parallel": {"recompute": "per-op"}},
    "recompute every-2": {"parallel": {"recompute": "every-2"}},
    "recompute budget": {"parallel": {"recompute": "budget-0.5"}},
    "fp16": {"train": {"dtype": "fp16"}},
    "fused feed-forward": {
        "model": {"activation": "relu2"},
        "train": {"kernels": {"mlp": "fused"}},
        "optim": {"name": "muon"},
    },
    "depth recipe": {
        "model": {
            "activation": "relu2",
            "value_embeds": True,
            "residual_scales": True,
            "qk_norm": True,
            "logit_softcap": 15.0,
        },
        "optim": {"name": "muon"},
    },
    "windows": {"model": {"windows": (16, 16, 16, 0)}},
    "documents": {"data": {"document_mask": True}},
    **{
        f"attention {name}": {"train": {"kernels": {"attention": name}}}
        for name in ("flash4", "cudnn", "flash", "efficient", "flex", "math")
    },
}
MAY_BE_REFUSED = ("flash4", "cudnn", "efficient", "flex")
"""Not installed, or not to be repeated bit by bit: then by its name."""


@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_to_the_same_bits(
    case: str, tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    # Sides that are whole multiples of 16, as float8's products need them.
    shape = {"dim": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_dim": 128}
    sections: dict[str, dict[str, Any]] = {
        "model": shape,
        "train": {"device": "cuda", "dtype": "bf16", "deterministic": True},
    }
    for section, changes in CASES[case].items():
        sections[section] = {**sections.get(section, {}), **changes}
    config = tiny.replace(
        **{name: getattr(tiny, name).replace(**given) for name, given in sections.items()}
    )
    refusal = ""
    try:
        assert_goes_on_to_the_same_bits(config, tmp_path, monkeypatch)
    except ConfigError as error:
        refusal = str(error)
    name = case.removeprefix("attention ")
    assert not refusal or (name in MAY_BE_REFUSED and name in refusal), refusal
