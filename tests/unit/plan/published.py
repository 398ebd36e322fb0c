"""Peers' published runs (FACTS section 2) written down as plans: setup, figure, and where from.

A consistency check: where a peer does not say how it works, its setup was chosen to agree with its
figure (docs/plan.md says which). Used by the test and by docs/plan.md's table, which
`python -m tests.unit.plan.published` prints.
"""

from dataclasses import dataclass, replace

from foundling.config.load import load_config
from foundling.plan.hardware import TABLE, Gpu
from foundling.plan.layout import MeshLayout
from foundling.plan.memory import plan_memory
from foundling.plan.speed import plan_speed
from foundling.plan.workload import Workload

MODEL = load_config("llama-1.24b").model
LLAMA_8B = load_config("llama3-8b").model
CLM_60M = load_config("clm-60m").model


@dataclass(frozen=True)
class Published:
    """One run of somebody else's."""

    name: str
    gpu: str
    work: Workload
    tokens_per_s: float
    """A GPU."""
    peak_gb: float | None = None
    why_not: str = ""
    """Where the plan is more than 25% off: why."""


def _1b(batch: int, **how: object) -> Workload:
    """The 1.24B model at 2048: peers keep no copy for update ratios."""
    fixed = {"measures_update": False, "evaluates": False, "seq_len": 2048, "loss": "chunks"}
    return Workload(model=MODEL, batch=batch, **{**fixed, **how})  # type: ignore[arg-type]


def _8b(batch: int, **how: object) -> Workload:
    fixed = {"measures_update": False, "seq_len": 8192, "loss": "plain", "recompute": "per-op"}
    return Workload(model=LLAMA_8B, batch=batch, stream_bytes=2, **{**fixed, **how})  # type: ignore[arg-type]


def _depth(layers: int) -> Workload:
    """nanochat's own trainer: half a million tokens a step, compiled whole with its plain loss."""
    model = load_config(f"depth-{layers}").model
    fixed = {"measures_update": False, "evaluates": False, "seq_len": 2048, "stream_bytes": 2}
    how = {"compile": True, "feed_forward": "plain", "optimizer": "muon", "accumulation": 8}
    return Workload(model=model, batch=32, loss="plain", logit_bytes=(2, 4), **fixed, **how)  # type: ignore[arg-type]


# A whole-model compile writes the logits' gradient over them; a compiled loss keeps both.
WHOLE = {"loss": "plain", "compile": True, "logit_bytes": (2, 2)}
TITAN = {"loss": "plain", "compile": True, "logit_bytes": (2, 4), "stream_bytes": 2}
EAGER_LOSS = {"loss": "plain", "compile": True}
TRUE = {"stream_bytes": 2, "weight_bytes": 2}
HALF = {"recompute": "per-op", "saved_products": 0.5}
SPAN = {"layout": MeshLayout(shard=64)}
NODE = {
    "layout": MeshLayout(shard=8),
    "kernel": "flash",
    "saved_products": 0.5,
    "logit_bytes": (2, 4),
}
# torchtitan's benchmarks/llama3_h100_202412_torchtitan.md: Grand Teton, H100 with 96 GB of HBM2e at
# 2.4 TB/s, limited to 500 W; "the actual peak is between SXM and NVL". Taken: the NVL's.
TETON = replace(
    TABLE["h100-sxm"],
    name="h100-hbm2e-500w",
    peaks=TABLE["h100-nvl"].peaks,
    bandwidth=2.4e12,
    memory=95 << 30,
)
GPUS: dict[str, Gpu] = {**TABLE, TETON.name: TETON}

PUBLISHED = (
    Published(
        "004 fp32 eager [3]",
        "h100-sxm",
        _1b(3, dtype="fp32", loss="plain", kernel="math"),
        5000,
        72.3,
    ),
    Published(
        "004 fp32 compiled [4]",
        "h100-sxm",
        _1b(4, dtype="fp32", loss="plain", compile=True, logit_bytes=(4, 8), kernel="math"),
        5500,
        82.9,
    ),
    Published("004 bf16, fused AdamW [16]", "h100-sxm", _1b(16, **WHOLE), 65000, 73.6),
    Published(
        "004 recompute every second [16]",
        "h100-sxm",
        _1b(16, **WHOLE, recompute="every-2"),
        57700,
        49.7,
    ),
    Published("004 recompute all [16]", "h100-sxm", _1b(16, **WHOLE, recompute="all"), 54600, 29.7),
    Published("004 recompute all [64]", "h100-sxm", _1b(64, **WHOLE, recompute="all"), 55500, 73.8),
    Published(
        "004 8 x DDP, recompute all [64]",
        "h100-sxm",
        _1b(64, **WHOLE, recompute="all", layout=MeshLayout(replicate=8)),
        50000,
    ),
    Published("004's recipe [16]", "h200", _1b(16, **WHOLE, recompute="all"), 55688, 26.9),
    Published("torchtitan, no recompute [16]", "h200", _1b(16, **TITAN), 68032, 77.0),
    Published("torchtitan, selective [16]", "h200", _1b(16, **TITAN, **HALF), 62036, 50.9),
    Published("transformers + liger [32]", "h200", _1b(32, compile=True, **TRUE), 66510, 105.4),
    Published("transformers + liger, eager [32]", "h200", _1b(32, **TRUE), 62296, 122.0),
    Published("litgpt bf16-true [16]", "h200", _1b(16, **EAGER_LOSS, **TRUE), 64168, 102.3),
    Published("litgpt bf16-mixed [16]", "h200", _1b(16, **EAGER_LOSS), 62430, 116.6),
    Published(
        "transformers, compiled whole [16]",
        "h200",
        _1b(
            16,
            **{**EAGER_LOSS, **TRUE},
            logit_bytes=(6, 10),
            masked_kernel="efficient",
            document_mask=True,
        ),
        59084,
        90.9,
    ),
    Published("100-line script, cuDNN [24]", "h200", _1b(24, compile=True), 70132, 96.3),
    Published(
        "100-line script, float8 [40]",
        "h200",
        _1b(40, compile=True, float8="tensorwise"),
        83694,
        105.5,
    ),
    Published(
        "100-line script, float8 rowwise [32]",
        "h200",
        _1b(32, compile=True, float8="rowwise"),
        68819,
        83.8,
    ),
    Published("nanochat d12 [32]", "h200", _depth(12), 535_700, 29.4),
    Published("nanochat d20 [32]", "h200", _depth(20), 154_500, 74.5),
    Published(
        "000 60M, 2 GPUs, fp32 [48]",
        "h100-sxm",
        Workload(
            model=CLM_60M,
            seq_len=2048,
            batch=48,
            dtype="fp32",
            loss="plain",
            compile=True,
            kernel="efficient",
            logit_bytes=(4, 8),
            layout=MeshLayout(replicate=2),
        ),
        52142,
    ),
    Published("001 8B, 64 dies [1]", "mi250x", _8b(1, **SPAN), 1333),
    Published("001 8B, 64 GPUs [1]", "a100-80", _8b(1, **SPAN), 2900),
    Published("torchtitan 8B, eager [2]", TETON.name, _8b(2, **NODE), 5762),
    Published("torchtitan 8B, compiled [2]", TETON.name, _8b(2, **NODE, compile=True), 6667),
    Published(
        "torchtitan 8B, float8 [2]",
        TETON.name,
        _8b(2, **NODE, compile=True, float8="tensorwise"),
        8532,
    ),
)


def predicted(one: Published) -> tuple[float, float]:
    """Tokens/s a GPU and peak GB."""
    gpu = GPUS[one.gpu]
    speed = plan_speed(one.work, gpu).tokens_per_s_gpu
    return speed, plan_memory(one.work, gpu).peak / 1e9


def main() -> None:
    """The table of docs/plan.md."""
    print(
        "| run [batch] | GPU | tok/s a GPU: published | plan | off | GB: published | plan | off |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for one in PUBLISHED:
        speed, peak = predicted(one)
        memory = "- | - | -"
        if one.peak_gb:
            memory = f"{one.peak_gb} | {peak:.1f} | {peak / one.peak_gb - 1:+.0%}"
        off = f"{speed / one.tokens_per_s - 1:+.0%}"
        print(
            f"| {one.name} | {one.gpu} | {one.tokens_per_s:,} | {speed:,.0f} | {off} | {memory} |"
        )


if __name__ == "__main__":
    main()
