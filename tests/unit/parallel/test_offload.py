"""Activation offload: the same gradients to the last bit, and nothing left on the device.

On a CPU the copies are made at once and everything else is the same: which tensors travel, how they
come back, when memory is given up. tests/gpu/test_offload_gpu.py has the streams.
"""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundling.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from foundling.config.resolve import resolve
from foundling.model import Transformer, init_weights
from foundling.parallel import ALONE, apply_parallel, offload
from foundling.parallel.offload import Shelf, apply_offload
from tests.unit.parallel.shapes import DEPTH, PLAIN

CPU = torch.device("cpu")
ALL = 1
"""Bytes: every tensor of a tiny model is large."""


def made(offloads: bool, config: ModelConfig, policy: str, compile: Any = "off") -> nn.Module:
    model = Transformer(config)
    init_weights(model, 1)
    train = TrainConfig(compile=compile)
    module = apply_parallel(model, ParallelConfig(recompute=policy), ALONE, train)
    if offloads:
        apply_offload(model.layers, CPU, ALL)
    return module


def rows(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(50, (3, 13), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Of two micro-batches, an evaluation between them."""
    torch.manual_seed(5)
    for seed in (1, 2):
        total, _ = module(*rows(seed), None)
        (total / 60).backward()
        with torch.no_grad():
            module(*rows(3), None)
    return {name: param.grad for name, param in module.named_parameters()}  # type: ignore[misc]


@pytest.fixture
def parked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What autograd keeps instead of tensors, as it is handed over."""
    found: list[Any] = []
    pack = Shelf.pack

    def noted(self: Shelf, tensor: Tensor) -> Any:
        saved = pack(self, tensor)
        found.append(saved)
        return saved

    monkeypatch.setattr(Shelf, "pack", noted)
    return found


@pytest.mark.parametrize("policy", ["none", "every-2", "all", "ffn"])
@pytest.mark.parametrize(
    "config", [PLAIN, DEPTH, replace(PLAIN, dropout=0.2)], ids=["llama", "depth", "dropout"]
)
def test_the_gradients_are_the_same(policy: str, config: ModelConfig, parked: list[Any]) -> None:
    wanted = gradients(made(False, config, policy))
    assert not parked
    found = gradients(made(True, config, policy))
    # The depth recipe's first block begins with what all blocks are given, which stays.
    travelling = config.layers - (2 if config.residual_scales else 1)
    assert sum(isinstance(saved, tuple) for saved in parked) >= 2 * travelling
    for name, grad in wanted.items():
        assert torch.equal(grad, found[name]), name


@pytest.mark.filterwarnings("ignore")  # torch's compiler about itself
@pytest.mark.parametrize("policy", ["none", "all", "per-op"])
def test_around_compiled_blocks_too(
    policy: str, parked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    backend, compile_block = "aot_eager_decomp_partition", nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **_: compile_block(self, backend=backend)
    )
    wanted = gradients(made(False, PLAIN, policy, "blocks"))
    found = gradients(made(True, PLAIN, policy, "blocks"))
    assert sum(isinstance(saved, tuple) for saved in parked) >= 2 * (PLAIN.layers - 1)
    for name, grad in wanted.items():
        assert torch.equal(grad, found[name]), name


@pytest.mark.parametrize("policy", ["none", "all"])
def test_every_copy_is_waited_for(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies on a stream may be made as late as somebody waits for them. Here they are made then
    and no earlier, and buffers are filled with nonsense first: a wait that is missing shows."""
    wanted = gradients(made(False, PLAIN, policy))
    copies_are_late(monkeypatch)
    found = gradients(made(True, PLAIN, policy))
    for name, grad in wanted.items():
        assert torch.equal(grad, found[name]), name


def copies_are_late(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make copies when they are waited for; returns the ends of those that nobody waited for, as
    weak references."""
    late: list[Any] = []

    def copy(self: Any, pairs: Any, stream: Any) -> Any:
        todo = [(weakref.ref(target.fill_(255)), weakref.ref(source)) for target, source in pairs]
        late.append(todo)
        return todo

    def wait(self: Any, todo: Any) -> None:
        if todo in late:
            late.remove(todo)
            for target, source in todo:
                assert target() is not None, "written to memory that is somebody else's"
                assert source() is not None, "read from memory that is somebody else's"
                target().copy_(source())

    monkeypatch.setattr(offload._Lines, "copy", copy)
    monkeypatch.setattr(offload._Lines, "wait", wait)
    return late


class Broken(torch.autograd.Function):
    """Fails in the one pass or in the other, as a device without memory does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at_once: bool) -> Tensor:
        if at_once:
            raise MemoryError
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise MemoryError


@pytest.mark.parametrize("at_once", [True, False], ids=["forward", "backward"])
def test_memory_of_a_pass_that_broke_off_is_not_used_under_its_copies(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = gradients(made(False, PLAIN, "none"))
    late = copies_are_late(monkeypatch)
    module = made(True, PLAIN, "none")
    block: Any = module.model.layers[2]  # type: ignore[union-attr,index]
    usual = block.feed
    block.feed = lambda x: Broken.apply(usual(x), at_once)  # type: ignore[no-untyped-call]
    with pytest.raises(MemoryError):
        module(*rows(1), None)[0].backward()
    assert len(late) == (0 if at_once else 1), "one block ahead is on its way"
    block.feed = usual
    module.zero_grad()
    gc.collect()
    found = gradients(module)  # the copies of the broken pass are made here, into their own memory
    assert not late
    for name, grad in wanted.items():
        assert torch.equal(grad, found[name]), name


def test_weights_stay_and_storages_travel_once(parked: list[Any]) -> None:
    module = made(True, PLAIN, "none")
    weights = {param.untyped_storage().data_ptr() for param in module.parameters()}
    total, _ = module(*rows(1), None)
    away = [saved[0] for saved in parked if isinstance(saved, tuple)]
    stayed = [saved for saved in parked if isinstance(saved, Tensor)]
    assert any(tensor.untyped_storage().data_ptr() in weights for tensor in stayed)
    assert len({id(one) for one in away}) < len(away), "views of one storage are one copy"
    assert all(one.source is None for one in away), "nothing is left behind the last block"
    total.backward()
    assert all(one.here is None for one in away), "and nothing when the graph is gone"


def test_little_is_held_after_the_forward_pass(parked: list[Any]) -> None:
    module = made(True, replace(PLAIN, layers=12), "none")
    weights = {param.untyped_storage().data_ptr() for param in module.parameters()}
    module(*rows(1), None)
    away = {id(saved[0]): saved[0].size for saved in parked if isinstance(saved, tuple)}
    storages = [saved.untyped_storage() for saved in parked if isinstance(saved, Tensor)]
    held = {one.data_ptr(): one.nbytes() for one in storages if one.data_ptr() not in weights}
    # The last block of twelve, and the rotations that all share.
    assert sum(held.values()) < 0.15 * sum(away.values())


def test_nobody_holds_what_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the copies' own record: a GPU's memory was not freed because of it."""
    sources: list[Any] = []
    start = Shelf.close

    def noted(self: Shelf) -> None:
        sources.extend(weakref.ref(parked.source) for parked in self.parked.values())
        start(self)

    monkeypatch.setattr(Shelf, "close", noted)
    total, _ = made(True, replace(PLAIN, layers=12), "none")(*rows(1), None)
    assert len(sources) > 11
    assert not any(source() is not None for source in sources)
    total.backward()


def test_a_graph_that_is_kept_can_be_used_twice() -> None:
    once, twice = made(True, PLAIN, "none"), made(True, PLAIN, "none")
    total, _ = once(*rows(1), None)
    (2 * total).backward()
    total, _ = twice(*rows(1), None)
    total.backward(retain_graph=True)
    total.backward()
    for left, right in zip(once.parameters(), twice.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)


def test_host_buffers_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = made(True, PLAIN, "none")
    gradients(module)
    monkeypatch.setattr("foundling.parallel.offload.torch.empty", _only_on_the_device)
    gradients(module)


def _only_on_the_device(*size: Any, **how: Any) -> Tensor:
    assert "pin_memory" not in how, "a step after the first asks the host for nothing"
    return torch.zeros(*size, **how)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"parallel.shard": "2"}, "not built for parallel.shard"),
        ({"train.compile": "graphs"}, "use train.compile blocks"),
        ({"parallel.recompute": "per-op", "train.compile": "off"}, "use ffn, all or every-N"),
        ({"model.layers": "1"}, "no effect on a model of one layer"),
    ],
)
def test_what_it_does_not_know_is_refused(settings: dict[str, str], told: str) -> None:
    asked = {"parallel.offload-activations": "true", **settings}
    with pytest.raises(ConfigError, match=told):
        resolve("hamlet", asked)


def test_what_the_compiler_keeps_can_be_offloaded() -> None:
    settings = {"parallel.offload-activations": "true", "parallel.recompute": "per-op"}
    assert resolve("hamlet", settings).parallel.offload_activations is True


def test_a_cpu_has_nothing_to_offload_and_auto_must_be_decided() -> None:
    for asked, told in ((True, "this run is on cpu"), ("auto", "not been decided")):
        parallel = ParallelConfig(offload_activations=asked)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=told):
            apply_parallel(Transformer(PLAIN), parallel, ALONE)
