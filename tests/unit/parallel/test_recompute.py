"""Recompute: the same numbers to the last bit, less memory, and only the work that was named."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig, recomputed_blocks
from foundling.config.train import TrainConfig
from foundling.model.initialization import init_weights
from foundling.model.kernels import flash4
from foundling.model.loss import IGNORE
from foundling.model.mlp import _Relu2Mlp
from foundling.model.transformer import Transformer
from foundling.parallel.apply import apply_parallel
from foundling.parallel.mesh import ALONE
from foundling.parallel.recompute import _recomputed, _saved_ops, _weigh_products
from foundling.profiling.probe import LiveBytes
from tests.unit.parallel.shapes import DEPTH, PLAIN

POLICIES = ("every-1", "every-2", "every-3", "all", "per-op", "ffn")
GPT = PLAIN.replace(norm="layer", bias="all", activation="relu", positions=32)


def make(policy: str, config: ModelConfig = PLAIN) -> tuple[Transformer, nn.Module]:
    model = Transformer(config)
    init_weights(model, 1)
    parallel = ParallelConfig(recompute=policy)
    return model, apply_parallel(model, parallel, ALONE)


def rows(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(50, (3, 13), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets[0, :4] = IGNORE
    return tokens[:, :-1], targets


def two_micro_steps(
    policy: str, config: ModelConfig, documents: Tensor | None
) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    """Losses and gradients of two accumulated micro-batches, and where the generator ended."""
    model, module = make(policy, config)
    torch.manual_seed(5)
    losses = []
    for seed in (1, 2):
        total, _ = module(*rows(seed), documents)
        (total / 60).backward()
        losses.append(total.detach())
    grads = {name: param.grad for name, param in model.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return losses, grads, torch.get_rng_state()  # type: ignore[return-value]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3] * 3)])
@pytest.mark.parametrize(
    "config",
    [PLAIN, GPT, DEPTH, PLAIN.replace(dropout=0.2)],
    ids=["llama", "gpt", "depth", "dropout"],
)
def test_nothing_changes_but_the_memory(
    policy: str, documents: Tensor | None, config: ModelConfig
) -> None:
    wanted = two_micro_steps("none", config, documents)
    found = two_micro_steps(policy, config, documents)
    for left, right in zip(wanted[0], found[0], strict=True):
        assert torch.equal(left, right)
    for name, grad in wanted[1].items():
        assert torch.equal(grad, found[1][name]), name
    assert torch.equal(wanted[2], found[2])  # the second run took nothing from the generator


def saved_bytes(policy: str) -> int:
    """Bytes of distinct storages that autograd keeps after the forward pass, weights aside."""
    model, module = make(policy)
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*rows(1), None)
    return sum(sizes.values())


def test_autograd_keeps_less() -> None:
    none, third, half, everything = (
        saved_bytes(policy) for policy in ("none", "every-3", "every-2", "all")
    )
    assert none > third > half > everything
    # every-2 spares two of five blocks; `all` spares all five
    assert (none - everything) / (none - half) == pytest.approx(5 / 2, rel=0.05)
    assert everything < 0.3 * none


def test_live_bytes_fall_in_the_same_order() -> None:
    held, peaks = {}, {}
    for policy in ("none", "per-op", "every-2", "all"):
        model, module = make(policy)
        with LiveBytes(model.parameters()) as live:
            total, _ = module(*rows(1), None)
            held[policy] = live.now
            total.backward()
            peaks[policy] = live.peak
    assert held["none"] > held["per-op"] > held["all"]
    assert held["none"] > held["every-2"] > held["all"]
    assert peaks["none"] > peaks["per-op"] > peaks["all"]


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def in_backward(policy: str) -> Counter[str]:
    _, module = make(policy)
    total, _ = module(*rows(1), None)
    with Calls() as calls:
        total.backward()
    return calls.count


def test_per_op_makes_only_the_cheap_things_again() -> None:
    none, per_op, everything = in_backward("none"), in_backward("per-op"), in_backward("all")
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert none["mm"] == per_op["mm"] < everything["mm"]
    assert none[attention] == per_op[attention] == 0 < everything[attention]
    assert none["silu"] == 0 < per_op["silu"] == everything["silu"] == PLAIN.layers


def test_per_op_keeps_the_product_of_a_fused_feed_forward() -> None:
    torch.manual_seed(0)
    up, down = nn.Parameter(torch.randn(24, 8)), nn.Parameter(torch.randn(8, 24))
    x = torch.randn(5, 8, requires_grad=True)
    counted: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            counted.append(str(func))
            return func(*args, **(kwargs or {}))

    with Count():
        _recomputed(lambda x: _Relu2Mlp.apply(x.sin(), up, down), _saved_ops())(x).sum().backward()
    assert counted.count("foundling.relu2_matmul.default") == 1
    assert counted.count("aten.sin.default") == 2


def test_names_stay_and_no_grad_runs_once() -> None:
    plain, _ = make("none")
    model, module = make("all")
    assert list(model.state_dict()) == list(plain.state_dict())
    runs = Counter[int]()
    for index, block in enumerate(model.layers):
        block.attn.register_forward_hook(count_into(runs, index))
    with torch.no_grad():
        module(*rows(1), None)
    assert set(runs.values()) == {1}


def count_into(runs: Counter[int], index: int) -> Callable[..., None]:
    def hook(*_: object) -> None:
        runs[index] += 1

    return hook


# Warnings of torch's compiler about itself, which it hides unless they are errors.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", ["none", "every-2", "all", "per-op", "ffn"])
def test_compiled_blocks_share_their_code(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than torch recompiles for: were each compiled anew, the ninth would run eagerly
    and the speed would be gone without a word."""
    from torch._dynamo.utils import counters

    config = PLAIN.replace(layers=10)
    eager, eager_module = make(policy, config)
    torch._dynamo.reset()
    counters.clear()
    compiled = Transformer(config)
    init_weights(compiled, 1)
    compile_block = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **_: compile_block(self, backend="aot_eager")
    )
    module = apply_parallel(
        compiled, ParallelConfig(recompute=policy), ALONE, TrainConfig(compile="blocks")
    )
    for side in (eager_module, module):
        side(*rows(1), None)[0].backward()
    kinds_of_block = 2 if policy == "every-2" else 1
    assert counters["stats"]["unique_graphs"] == kinds_of_block + 1  # the final norm's
    for left, right in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert left.grad is not None
        assert right.grad is not None
        assert torch.equal(left.grad, right.grad)


@pytest.mark.filterwarnings("ignore")
def test_graphs_of_one_policy_are_not_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's policies are settings of the process, which its graphs are not told apart by:
    a second model of the same shapes would keep what the first one kept."""
    torch._dynamo.reset()
    backend, compile_block = "aot_eager_decomp_partition", nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **_: compile_block(self, backend=backend)
    )
    policies = ("none", "per-op", "none", "budget-0.3", "none", "ffn", "none")
    saved = [0] * len(policies)
    for number, policy in enumerate(policies):
        model = Transformer(PLAIN.replace(layers=2))
        init_weights(model, 1)
        parallel = ParallelConfig(recompute=policy)
        module = apply_parallel(model, parallel, ALONE, TrainConfig(compile="blocks"))

        def pack(tensor: Tensor, number: int = number) -> Tensor:
            saved[number] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(*rows(1), None)
    assert saved[0] == saved[2] == saved[4] == saved[6] > saved[1] > saved[3]
    # Three tensors of the feed-forward half, and the normed stream before each half.
    widths = 3 * PLAIN.ffn_dim + 2 * PLAIN.dim
    assert saved[0] - saved[5] >= 2 * rows(1)[0].numel() * 4 * widths


def test_the_budget_knows_what_attention_costs() -> None:
    """Shared keys too, which torch 2.11 refused to count; inside a window only what it sees."""
    import torch._functorch.config as compiler
    from torch.utils.flop_counter import FlopCounterMode

    _weigh_products(compiler)
    q = torch.empty(2, 8, 64, 16, device="meta", dtype=torch.bfloat16)
    k = v = torch.empty(2, 2, 64, 16, device="meta", dtype=torch.bfloat16)
    turned = [part.transpose(1, 2) for part in (q, k, v)]
    starts = torch.empty(3, device="meta", dtype=torch.int32)
    counted = []
    for attend in (
        lambda: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True),
        lambda: torch.ops.foundling.band(q, k, v, 16),
        lambda: flash4.flash4(*turned, None, 64, 0),
        lambda: flash4.flash4(*turned, None, 64, 16),
        lambda: flash4.flash4(*(part.flatten(0, 1) for part in turned), starts, 64, 0),
    ):
        with FlopCounterMode(display=False) as counter:
            attend()
        counted.append(counter.get_total_flops())
    whole = 4 * 2 * 8 * 64 * 64 * 16
    assert counted == [whole, whole // 4, whole, whole // 4, whole]


def test_per_op_keeps_what_flash_attention_4_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """Its two passes, of a kernel that mixes nothing."""

        @staticmethod
        def _flash_attn_fwd(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Any:
            return v.clone(), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

        @staticmethod
        def _flash_attn_bwd(*passed: Tensor, **_: Any) -> Any:
            q, k, _, _, grad, _ = passed
            return torch.zeros_like(q), torch.zeros_like(k), grad.clone()

    monkeypatch.setattr(flash4, "_library", Library)
    x = torch.randn(2, 8, 2, 4, requires_grad=True)
    mixed = _recomputed(lambda x: flash4.flash4(x.sin(), x, x, None, 8, 0)[0], _saved_ops())(x)
    with Calls() as calls:
        mixed.sum().backward()
    assert (calls.count["flash4"], calls.count["sin"]) == (0, 1)


def test_which_blocks() -> None:
    assert recomputed_blocks("none", 4) == ()
    assert recomputed_blocks("every-2", 5) == (1, 3)
    assert recomputed_blocks("every-3", 6) == (2, 5)
    assert recomputed_blocks("all", 3) == recomputed_blocks("every-1", 3) == (0, 1, 2)
    assert recomputed_blocks("per-op", 2) == (0, 1)


@pytest.mark.parametrize("policy", ["every", "every-0", "every-x", "some", ""])
def test_an_unknown_policy_is_refused_by_name(policy: str) -> None:
    with pytest.raises(ConfigError, match="must be none, every-N"):
        load_config("hamlet", {"parallel.recompute": policy})


def test_a_policy_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="no effect on a model of 3 layers; use every-3"):
        load_config("hamlet", {"parallel.recompute": "every-4"})
    with pytest.raises(ConfigError, match="not been decided"):
        make("auto")
