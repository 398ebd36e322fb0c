"""Choices that depend on the machine at hand: kernels, loss, MLP, compile mode, in their order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from foundling.config.errors import ConfigError
from foundling.config.parallel import budget_share
from foundling.config.run import RunConfig
from foundling.config.train import FLOAT8_MULTIPLE, Compile
from foundling.model.layers import Rope
from foundling.model.transformer import Block
from foundling.plan.roofline import check_skip
from foundling.runtime.console import first_line, warn
from foundling.runtime.device import DeviceChoice, missing_for_compile
from foundling.train.autotune.attention import choose_attention_kernels, shapes_of
from foundling.train.autotune.harness import median_seconds
from foundling.train.autotune.loss import choose_loss
from foundling.train.autotune.mlp import choose_mlp


@dataclass(frozen=True)
class PresentMachine:
    """The device at hand, as plan/resolve asks it."""

    choice: DeviceChoice
    resumed_config: RunConfig | None = None
    """What the run was resolved to when it began: one that goes on keeps to it."""

    @property
    def settings(self) -> dict[str, str | int]:
        """train.device, dtype and threads as they are here."""
        choice = self.choice
        threads = torch.get_num_threads()
        return {"device": choice.device.type, "dtype": choice.name, "threads": threads}

    def measured(self, config: RunConfig, steps: int) -> tuple[RunConfig, list[str]]:
        """Kernels and compile mode of a run of so many steps, and a reason for each."""
        return autotune(config, self.choice, steps=steps, resumed_config=self.resumed_config)


def autotune(
    config: RunConfig,
    choice: DeviceChoice,
    *,
    steps: int = 0,
    resumed_config: RunConfig | None = None,
) -> tuple[RunConfig, list[str]]:
    """The config with every kernel setting chosen by launching on this device; `resumed_config`
    is what the run chose when it began, `steps` how long it is."""
    if resumed_config is not None:
        train, was = config.train, resumed_config.train
        again = dict(was.kernels)
        if max(config.parallel.shard, config.parallel.tensor) > 1:
            again["loss"] = "fused"  # the others need the whole head
        kept = {name: again[name] for name, asked in train.kernels if asked == "auto"}
        mode = was.compile if train.compile == "auto" else train.compile
        config = config.replace(train={"kernels": kept, "compile": mode})
    else:
        check_skip(config.model, config.train.float8_skip)
    _check_float8_rows(config)
    model, train, parallel = config.model, config.train, config.parallel
    device, dtype = choice.device, choice.dtype
    found, lines = choose_attention_kernels(model, train, config.data, device, dtype)
    found["mlp"], line = choose_mlp(model, train, parallel.tensor, device, dtype)
    lines += [line] if line else []
    found["loss"], line = choose_loss(model, train, parallel, choice)
    lines += [line] if line else []
    mode, why = choose_compile(config, choice, steps)
    if train.compile == "auto":
        lines.append(f"compile {mode} ({why})")
    return config.replace(train={"kernels": found, "compile": mode}), lines


def report_choices(lines: Sequence[str], tell: Callable[[str], None]) -> None:
    """Print what was chosen; fallbacks as warnings."""
    for line in lines:
        warn(line) if "WARNING" in line else tell(line)


def _check_float8_rows(config: RunConfig) -> None:
    """A weight's gradient sums over the positions of a micro-batch, which are a side then."""
    if config.train.float8 == "none":
        return
    for shape in shapes_of(config.model, config.train, config.data):
        if shape.rows * shape.width % FLOAT8_MULTIPLE:
            raise ConfigError(
                f"train.float8 {config.train.float8} needs micro-batches of a multiple of"
                f" {FLOAT8_MULTIPLE} positions, and one has {shape.rows} rows of {shape.width};"
                " change train.batch_size or train.seq_len, or set it to none."
            )


# Whether to compile, where the config leaves it open: on CUDA always, on a CPU if it pays.
#
# On a CPU a compiled block may be faster or slower than an eager one, and compiling takes longer
# than a short run: both are timed, when the run is long enough for the answer to matter.

LONG_S = 900.0
"""Seconds of blocks alone from which a run on a CPU is worth the time of compiling one."""
WORTH = 0.95
"""Compiled blocks must take less than this share of the eager ones' time."""


def choose_compile(config: RunConfig, choice: DeviceChoice, steps: int) -> tuple[Compile, str]:
    """The mode to use, and why."""
    train = config.train
    if train.compile == "graphs" and choice.device.type != "cuda":
        raise ConfigError(
            f"train.compile graphs needs a CUDA device, and this is {choice.device.type}; use"
            " blocks or auto."
        )
    if config.parallel.tensor > 1 and train.compile != "off":
        # Gradients leave a compiled block as plain tensors where DTensors are awaited.
        if train.compile != "auto" or budget_share(config.parallel.recompute) is not None:
            raise ConfigError(
                f"train.compile {train.compile} with parallel.recompute"
                f" {config.parallel.recompute} is not built for parallel.tensor; use train.compile"
                " off and another policy, or parallel.shard."
            )
        return "off", "WARNING: blocks are not compiled under parallel.tensor"
    if train.compile != "auto":
        if train.compile != "off" and (missing := missing_for_compile(choice.device.type)):
            raise ConfigError(
                f"train.compile {train.compile}, asked for now or when the run began, needs"
                f" {missing}; install it, or set train.compile off."
            )
        return train.compile, "asked for"
    if budget_share(config.parallel.recompute) is not None:
        return "blocks", f"parallel.recompute {config.parallel.recompute} is the compiler's work"
    if choice.device.type == "cuda":
        if missing := missing_for_compile(choice.device.type):
            return "off", f"WARNING: compiled blocks would be faster, and need {missing}"
        return "blocks", "the default on CUDA"
    if choice.device.type != "cpu":
        return "off", f"not tried on {choice.device.type}"
    if train.deterministic:
        return "off", "deterministic runs are not chosen by a clock"
    return _by_time(config, choice.dtype, steps)


def _by_time(config: RunConfig, dtype: torch.dtype, steps: int) -> tuple[Compile, str]:
    train = config.train
    micro_tokens = train.batch_size * train.seq_len
    passes = steps * max(1, train.global_batch_tokens // max(micro_tokens, 1))
    if not passes:
        return "off", "not measured"
    block = Block(config.model, layer=0)
    eager = _block_s(block, config, dtype)
    total = eager * config.model.layers * passes
    if total < LONG_S:
        return "off", "the run is too short to pay for compiling"
    try:
        block.compile(dynamic=False)
        compiled = _block_s(block, config, dtype)
    except Exception as error:  # a compiler that is missing, or fails: eager blocks work
        return "off", f"a block does not compile here: {first_line(error)}"
    times = f"a block takes {1e3 * eager:.1f} ms, compiled {1e3 * compiled:.1f} ms"
    return ("blocks" if compiled < WORTH * eager else "off"), times


def _block_s(block: nn.Module, config: RunConfig, dtype: torch.dtype) -> float:
    """Forward and backward of one block at the run's shapes and in its arithmetic."""
    model, train = config.model, config.train
    x = torch.randn(train.batch_size, train.seq_len, model.dim, dtype=dtype, requires_grad=True)
    rotation = None
    if model.positions == "rotary":
        rotation = Rope(model).upto(train.seq_len, x.device, x.dtype)
    start = x.detach() if model.residual_scales else None

    def forward_backward() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            total = block(x, rotation, None, None, start).sum()
        total.backward()

    return median_seconds(forward_backward, x.device, 0.0)
