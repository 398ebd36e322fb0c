"""A few real steps of a config on this device: seconds by part, memory at each moment."""

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as profiler
from torch.utils._python_dispatch import TorchDispatchMode  # its documented home

from foundling.config.errors import ConfigError, RunError
from foundling.config.run import RunConfig
from foundling.model.transformer import Transformer
from foundling.optim.gradients import UpdateRatio, clip_
from foundling.optim.optimizer import set_lr
from foundling.parallel.mesh import ALONE
from foundling.plan.horizon import batch_tokens
from foundling.plan.workload import SMALL_MODEL
from foundling.profiling.trace import RANGE, after_hidden, fill_up, split
from foundling.runtime.device import (
    DeviceChoice,
    device_name,
    prepare_device,
    reset_peak_memory,
    synchronise,
)
from foundling.train.autotune.present_machine import autotune, report_choices
from foundling.train.oom import too_large_sentence
from foundling.train.state import TrainState, autocast, make_state

# The steps are the trainer's (module, autocast, clipping, optimizer, update ratios on the logging
# clock) on random tokens, so that nothing but a config is needed. Three passes, because a profiler
# slows the clock and a memory count slows both: timed, weighed, profiled. `ceilings.py` measures
# what the device could do.


Moment = Literal["build", "forward", "backward", "step"]
Mark = Callable[[Moment], None]
Tell = Callable[[str], None]
TIMED, WARM_UP = 5, 2
STEPS_TAKEN = WARM_UP + TIMED + 2
"""Warmed up, timed, weighed, profiled."""
MICRO_STEPS = 2
"""Micro-steps that a probe takes at most: the second finds gradients, as all later ones do."""


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
    if config.model.vocab_size < 1:
        raise ConfigError("model.vocab_size is 0 and a probe has no tokenizer to ask; give it.")
    choice = prepare_device(config.train)
    # What a run leaves to the device is chosen here too, or the steps would not be the trainer's.
    config, choices = autotune(config, choice)
    report_choices(choices, lambda _: None)
    try:
        return _ProbeRun(config, choice, tell).run(steps, warmup)
    except torch.OutOfMemoryError as error:
        raise RunError(f"{too_large_sentence(config.train)}.") from error
    finally:
        if choice.device.type == "cuda":
            torch.cuda.empty_cache()


class _ProbeRun:
    """One config set up for probing."""

    def __init__(
        self, config: RunConfig, choice: DeviceChoice, tell: Tell = lambda _: None
    ) -> None:
        self.config, self.tell = config, tell
        self.cuda = choice.device.type == "cuda"
        self.state = _fresh_state(config, choice)
        with memory_meter(self.state) as read:
            self.built = read()
        at_a_time = config.train.batch_size * config.train.seq_len
        self.planned = max(1, -(-batch_tokens(config, 1) // at_a_time))
        self.micro_steps = min(self.planned, MICRO_STEPS)
        count = sum(param.numel() for _, param in self.state.params())
        self.measures_update = count < SMALL_MODEL or config.log.every == 1

    def run(self, steps: int, warmup: int) -> Probe:
        count = warmup + steps
        times = []
        for number in range(1, count + 1):
            times.append(self._timed())
            self.tell(f"step {number} of {count} took {times[-1]:.3g} s")
        first, timed = times[0], sorted(times[warmup:])
        step_s = timed[len(timed) // 2]
        self.tell("two more, to weigh and to profile")
        memory = self._memory()
        train = self.config.train
        return Probe(
            device=device_name(self.state.device),
            dtype="bf16" if self.state.dtype == torch.bfloat16 else "fp32",
            torch=torch.__version__,
            rows=train.batch_size,
            seq_len=train.seq_len,
            micro_steps=self.micro_steps,
            planned_micro_steps=self.planned,
            measures_update=self.measures_update,
            steps=steps,
            first_step_s=first,
            step_s=step_s,
            parts=self._parts(step_s),
            memory=memory,
            memory_definition="CUDA's caching allocator" if self.cuda else "live tensors",
        )

    def _timed(self) -> float:
        synchronise(self.state.device)
        started = time.perf_counter()
        self._step()
        synchronise(self.state.device)
        return time.perf_counter() - started

    def _step(self, mark: Mark = lambda _: None) -> None:
        """One step as train/step.py takes it, with marks at its moments."""
        state, train = self.state, self.config.train
        targets = self.micro_steps * train.batch_size * train.seq_len
        total = torch.zeros((), device=state.device)
        for _ in range(self.micro_steps):
            with record_function(RANGE + "data"):
                batch = self._draw()
            with autocast(state):
                loss_sum, _count = self._loss(*batch)
                mark("forward")
                (loss_sum / targets).backward()  # type: ignore[no-untyped-call]
            mark("backward")
            total += loss_sum.detach()
        with record_function(RANGE + "optimizer"):
            float(total), float(clip_([p for _, p in state.params()], self.config.optim.clip))
            ratio = UpdateRatio(state.optimizer) if self.measures_update else None
            set_lr(state.optimizer, 0.0)  # random tokens must not lead the weights astray
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
            if ratio is not None:
                ratio.read()
            del ratio  # as at the end of the trainer's step
        mark("step")

    def _draw(self) -> tuple[Tensor, Tensor, Tensor | None]:
        train, device = self.config.train, self.state.device
        shape = (train.batch_size, train.seq_len + 1)
        tokens = torch.randint(self.config.model.vocab_size, shape).to(device, non_blocking=True)
        documents = None
        if self.config.data.document_mask:
            quarters = torch.arange(train.seq_len, device=device) * 4 // train.seq_len
            documents = quarters.expand(train.batch_size, -1)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), documents

    def _loss(self, *batch: Tensor | None) -> tuple[Tensor, Tensor]:
        """The module's loss, with a range from the final norm's end to the loss's: head and all."""
        with contextlib.ExitStack() as stack:

            def begin() -> None:
                stack.enter_context(record_function(RANGE + "loss"))

            stack.enter_context(after_hidden(self.state.model, begin))
            result: tuple[Tensor, Tensor] = self.state.module(*batch)
        return result

    def _memory(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {"build": self.built}
        with memory_meter(self.state) as read:
            read()  # peaks from here on

            def mark(moment: Moment) -> None:
                found[moment] = read()

            self._step(mark)
        return found

    def _parts(self, step_s: float) -> dict[str, float]:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.cuda
        with silent_stderr(), profiler(activities=activities) as trace:
            profiled_s = self._timed()
        parts = split(trace.events() or [], cuda=self.cuda)
        return fill_up(parts, step_s if self.cuda else profiled_s, step_s)


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Kineto greets on the C level when it starts and stops, and no setting keeps it from it."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _fresh_state(config: RunConfig, choice: DeviceChoice) -> TrainState:
    """Random weights drawn on the device: for a probe only their spread matters, and the trainer's
    own way (each parameter from its own generator on the CPU) takes long for a large model."""
    with torch.device(choice.device):
        model = Transformer(config.model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(1.0)
    return make_state(model, config.train, config.optim, config.parallel, ALONE, choice)


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
