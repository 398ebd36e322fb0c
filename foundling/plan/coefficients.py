"""Every number of the memory and speed model that is not arithmetic, in one place.

Each says what it was taken from. FITTED_ON names the configurations that were used, so that the
errors of all others are an honest result; nothing may be fitted on more than half of what was run.
"""

from dataclasses import dataclass

FITTED_ON: tuple[str, ...] = (
    "the 12 lines marked `fit` of tests/gpu/plan_grid.py on one H200 (docs/plan.md has the table)",
    "llama-1.24b on one H200, batch 24 x 2048, bf16, blocks compiled, fused loss (the 100-line"
    " script's: matrix products 502 ms at 729 TFLOP/s, attention 80, elementwise 83, optimizer 10,"
    " other 13)",
    "attention alone, 16 x 2048 on one H200: cuDNN 2.81 and 2.25 ms, flash 4.61 and 4.11 ms",
    "account 004's fp32 rows on one H100 (fp32_share)",
    "account 001's 1333 tok/s on MI250X dies (the reach of the MI250X in hardware.py)",
)


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Shares of a peak, bytes and seconds that only a measurement can give."""

    # Matrix products: rate = peak x share x s(m) s(n) s(k), s(x) = x / (x + half).
    # Ten shapes on one H200 alone (511 TFLOP/s at 384 x 1408, 651 at 4096 x 14336) give the half;
    # 802 TFLOP/s at 8192 cubed and 729 over the 2048-wide model's own shapes the share.
    product_share: float = 0.83
    product_half: float = 80.0
    # Products one after the other heat the device and run slower than between other kernels:
    # 741 TFLOP/s in a step of the 1.24B model where the same shapes alone reach 612.
    product_in_step: float = 1.24
    # Products in float8 over the same in bf16: 1300 and 802 TFLOP/s at 8192 cubed on one H200; a
    # scale for each row takes another kernel, with which the 100-line script is as fast as in bf16.
    tensorwise_gain: float = 1.62
    rowwise_gain: float = 1.0
    # CUDA cores: 004's fp32 run reaches 41 TFLOP/s in all, sgemm about 0.8 of 66.9.
    fp32_share: float = 0.80
    fp32_half: float = 24.0
    cpu_share: float = 0.80
    cpu_half: float = 24.0
    # Of the rate that a norm reaches, from a probe of the demo's model on two quiet cores (0.7 had
    # been a guess and made its step 21% too long).
    cpu_elementwise: float = 1.2
    # Attention, forward and backward, causal FLOPs: share of the dense peak by width of a head.
    cudnn_share: float = 0.346
    cudnn_share_wide: float = 0.432
    flash_share: float = 0.21
    flash_share_wide: float = 0.237
    # Of cuDNN's rate for whole rows, in a window of 1024 (tiles are half masked on both sides):
    # 291 of 397 TFLOP/s in rows of 2048, 298 of 506 in rows of 8192.
    band_share: float = 0.73
    attention_overhead: float = 1.15
    # Share of the memory bandwidth that elementwise kernels reach (SwiGLU's backward: 15 of 31 ms
    # at worst, plain copies 0.9).
    elementwise_share: float = 0.75
    # Bytes that eager kernels move over those counted; a compiled block moves what is counted.
    elementwise_eager: float = 1.2
    optimizer_share: float = 0.75
    # Seconds between two kernels that wait in the queue, and from launch to launch in Python.
    gap_s: float = 1.4e-6
    launch_s: float = 8e-6
    # A block of a real model takes Python longer than one of a tiny model.
    block_excess: float = 1.0
    # Clipping and the optimizer's own Python, while the GPU waits: by tensor, and a fixed part;
    # update ratios go over the tensors once more.
    tensor_s: float = 1.2e-5
    tensor_ratio_s: float = 1.2e-5
    step_overhead_s: float = 1.0e-3
    # Communication: share of a link that large collectives reach.
    link_share: float = 0.75
    network_share: float = 0.75
    # The wait to start a collective, and for each hop of its ring or tree within a node and between
    # nodes: NCCL's own table for its Simple protocol (src/graph/tuning.cc: 3.4 and 14 us).
    latency_s: float = 15e-6
    hop_inside_s: float = 3.4e-6
    hop_between_s: float = 14e-6
    # Beside the steps. Start and first step on an H200 are 14.8 to 29.1 s together, 51 s with all
    # blocks in one graph (docs/performance.md); imports and weights are about 10 of them.
    start_cuda_s: float = 10.0
    compile_blocks_s: float = 14.0
    compile_model_s: float = 40.0
    # On two cores, hamlet's shape: compiled in 14 s, and in 28 s beside other work; a save of its
    # 13 MB is files and agreement more than bytes.
    start_s: float = 5.0
    compile_cpu_s: float = 20.0
    save_s: float = 0.02
    # Share of the backward pass behind which gradient traffic can hide (DDP, FSDP).
    overlap: float = 0.8
    # A step waits for its slowest rank: this much longer each time the nodes double.
    straggle_per_doubling: float = 0.005
    # Memory: cached blocks that do not fit anything, and what the driver takes.
    slack: float = 0.03
    context: int = 600_000_000
    headroom: float = 0.05
    """Share of the device that `auto` leaves free."""


COEFFICIENTS = Coefficients()
