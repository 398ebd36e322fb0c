"""A few real steps of a config on this device: seconds by part, memory at each moment.

The steps are the trainer's own on random tokens, with update ratios on the logging clock, so that
nothing but a config is needed. `ceilings.py` measures what the device could do.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # its documented home

from foundling.config.run import RunConfig
from foundling.plan.horizon import batch_tokens
from foundling.plan.workload import SMALL_MODEL
from foundling.profiling.step_runner import StepRunner, Tell, random_rows, tell_chosen
from foundling.profiling.trace import taken_apart, watched
from foundling.runtime.device import (
    device_name,
    free_cached_memory,
    prepare_device,
    reset_peak_memory,
)
from foundling.train.oom import refuse_on_oom
from foundling.train.state import TrainState

TIMED, WARM_UP = 5, 2
STEPS_TAKEN = WARM_UP + TIMED + 3
"""Warmed up, timed, weighed, and two of which the second is profiled."""
MICRO_STEPS = 2
"""Micro-steps that a probe takes at most: the second finds gradients, as all later ones do."""
MOMENTS = {"begin": "", "loss": "forward", "clipped": "backward"}
"""The moments of a step that are weighed, and what a probe calls them."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a step took, and what it held."""

    device: str
    dtype: str
    torch: str
    rows: int
    """Of a micro-batch."""
    seq_len: int
    micro_steps: int
    """Taken in each probed step."""
    planned_micro_steps: int
    """That the config's global batch needs on this one device."""
    measures_update: bool
    """Whether the step made update ratios, which cost copies of the weights."""
    steps: int
    """Timed; the median is reported."""
    first_step_s: float
    """With everything that happens once: compilation, libraries, moments."""
    step_s: float
    parts: dict[str, float]
    """Seconds by part (PARTS); their sum is step_s."""
    memory: dict[str, dict[str, int]]
    """Bytes by moment (after build, and in the last micro-step after forward, after backward, after
    step): allocated, reserved, and the peak since the moment before."""
    memory_definition: str

    @property
    def peak_bytes(self) -> int:
        """The most that a step held at once."""
        return max(at["peak"] for at in self.memory.values())

    @property
    def tokens_per_s(self) -> float:
        return self.rows * self.seq_len * self.micro_steps / self.step_s

    @property
    def planned_step_s(self) -> float:
        """A step of the whole global batch: the micro-steps grow, the optimizer does not."""
        once = self.parts["optimizer"]
        return once + (self.step_s - once) * self.planned_micro_steps / self.micro_steps

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "peak_bytes": self.peak_bytes,
            "tokens_per_s": self.tokens_per_s,
            "planned_step_s": self.planned_step_s,
        }


def probe(
    config: RunConfig,
    *,
    steps: int = TIMED,
    warmup: int = WARM_UP,
    tell: Tell = lambda _: None,
) -> Probe:
    """Take a few steps of `config` here, alone, and say what they cost; `tell` gets progress."""
    choice = prepare_device(config.train)
    with refuse_on_oom(config.train):
        # What a run leaves to the device is chosen here too, or the steps would not be the
        # trainer's.
        runner = StepRunner(config, choice)
        tell_chosen(runner.chosen, lambda _: None)
        found = _taken(runner, steps, warmup, tell)
    del runner
    free_cached_memory()
    return found


def _taken(runner: StepRunner, steps: int, warmup: int, tell: Tell) -> Probe:
    """Three passes, because a profiler slows the clock and a memory count slows both: timed,
    weighed, profiled."""
    config, state, rows = runner.config, runner.state, random_rows(runner.config)
    size = config.train.batch_size
    with memory_meter(state) as read:
        memory = {"build": read()}
    planned = max(1, -(-batch_tokens(config, 1) // (size * config.train.seq_len)))
    micro_steps = min(planned, MICRO_STEPS)
    count = sum(param.numel() for _, param in state.params())
    measure = count < SMALL_MODEL or config.log.every == 1
    times = []
    for number in range(1, warmup + steps + 1):
        timed = runner.timed(rows, 1, size=size, micro_steps=micro_steps, warmup=0, measure=measure)
        times.append(timed.seconds)
        tell(f"step {number} of {warmup + steps} took {times[-1]:.3g} s")
    step_s = sorted(times[warmup:])[steps // 2]
    tell("three more, to weigh and to profile")
    batches = runner.batches(rows, 0, size, micro_steps)

    def take() -> None:
        runner.step(batches, runner.timed_lr, measure=measure)

    with memory_meter(state) as read:

        def seen(moment: str) -> None:
            if moment in MOMENTS:
                found = read()  # peaks from here on
                if name := MOMENTS[moment]:
                    memory[name] = found

        with watched(state, seen):
            take()
        memory["step"] = read()
    parts, _ = taken_apart(state, [take], step_s)
    return Probe(
        device=device_name(state.device),
        dtype="bf16" if state.dtype == torch.bfloat16 else "fp32",
        torch=torch.__version__,
        rows=size,
        seq_len=config.train.seq_len,
        micro_steps=micro_steps,
        planned_micro_steps=planned,
        measures_update=measure,
        steps=steps,
        first_step_s=times[0],
        step_s=step_s,
        parts=parts,
        memory=memory,
        memory_definition="CUDA's caching allocator"
        if state.device.type == "cuda"
        else "live tensors",
    )


@contextlib.contextmanager
def memory_meter(state: TrainState) -> Iterator[Callable[[], dict[str, int]]]:
    """A function that gives the bytes held now (allocated, reserved) and their peak since it was
    last called."""
    device = state.device
    if device.type == "cuda":

        def read_cuda() -> dict[str, int]:
            held = state.memory()
            reset_peak_memory(device)
            return {name: held[f"memory_{name}"] for name in ("allocated", "reserved", "peak")}

        yield read_cuda
        return
    with LiveBytes(held_tensors(state)) as live:

        def read() -> dict[str, int]:
            found = {"allocated": live.now, "reserved": live.now, "peak": live.peak}
            live.reset_peak()
            return found

        yield read


def held_tensors(state: TrainState) -> Iterator[Tensor]:
    """Tensors that outlive a step."""
    yield from (param.detach() for _, param in state.params())
    yield from state.model.buffers()
    for moments in state.optimizer.state.values():
        yield from (value for value in moments.values() if isinstance(value, Tensor))


# Bytes of tensors alive on a CPU, as CUDA's allocator would count them, with their peak.
#
# Sees every tensor that an operator returns, through torch's dispatcher, and forgets its storage
# when it dies: exact for weights, gradients, moments and kept activations, blind to scratch space
# inside a kernel. Rejected: the process's resident size (pages come late and go later, if ever) and
# the bytes that autograd saves (per-op recompute keeps its results elsewhere, and saved weights are
# no extra).


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered: `now` and `peak`, in bytes. Tensors that were there before are passed in."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        for tensor in tensors:
            self._meet(tensor)

    def reset_peak(self) -> None:
        """Start a new peak."""
        self.peak = self.now

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                self._meet(leaf)
        return out

    def _meet(self, tensor: Tensor) -> None:
        storage: torch.UntypedStorage = tensor.untyped_storage()
        # Of the memory, not of its Python object, which may be made anew.
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_: object) -> None:
            if self._alive.pop(key, None) is not None:
                self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
