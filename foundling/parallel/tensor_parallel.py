"""Tensor parallelism with sequence parallelism, laid over the plain model from outside.

Between blocks each rank holds its part of every row's positions (norms and sums work on those);
inside, attention has a part of the heads and the feed-forward a part of its width (Shoeybi et al.
2019, Korthikanti et al. 2022). Embedding and head are cut along the vocabulary. Collectives of one
block, forward: a gather before attention and before the feed-forward, a reduce-scatter after each;
backward the same the other way round. Every rank of the tensor axis must call them.
"""

from types import MethodType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from foundling.config.model import ModelConfig
from foundling.model.attention import Cache
from foundling.model.loss import cap
from foundling.model.transformer import Transformer
from foundling.parallel.losses import vocab_parallel_loss

WHOLE, ROWS, TIME = Replicate(), Shard(0), Shard(1)


def apply_tensor(model: Transformer, mesh: DeviceMesh) -> None:
    """Cut `model` over the one axis of `mesh`; its parameters become DTensors."""
    for block in model.layers:
        parallelize_module(block, mesh, _block_plan(model.config))
    outside: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=WHOLE, output_layouts=TIME),
        "norm": SequenceParallel(),
    }
    if model.embed_norm is not None:
        outside["embed_norm"] = SequenceParallel(use_local_output=True)
    if model.head is not None:
        outside["head"] = ColwiseParallel()
    parallelize_module(model, mesh, outside)
    model.loss = MethodType(_loss, model)  # type: ignore[method-assign]
    model.forward = MethodType(_forward, model)  # type: ignore[method-assign]
    model.logits = MethodType(_logits, model)  # type: ignore[method-assign]
    model.states_at = MethodType(_states_at, model)  # type: ignore[method-assign]


def tensor_parallel_size(model: nn.Module) -> int:
    """Ranks that each compute with a part of the heads; 1 where weights are whole, or gathered."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            if "tensor" in (mesh.mesh_dim_names or ()):
                return int(mesh["tensor"].size())
    return 1


def sum_replicated_gradients(model: Transformer) -> None:
    """Norms are whole on every rank and see a part of the positions each: add their gradients up.
    (Where FSDP is at work too, it has done so.)"""
    for parameter in model.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
            assert isinstance(parameter, DTensor)
            parameter.grad = grad.redistribute(placements=parameter.placements)


def _block_plan(config: ModelConfig) -> dict[str, ParallelStyle]:
    def gathered(others: int) -> PrepareModuleInput:
        rest = (None,) * others
        return PrepareModuleInput(input_layouts=(TIME, *rest), desired_input_layouts=(WHOLE, *rest))

    plan: dict[str, ParallelStyle] = {
        "attn_norm": SequenceParallel(),
        "attn": gathered(4),
        "attn.q": ColwiseParallel(),
        "attn.k": ColwiseParallel(),
        "attn.v": ColwiseParallel(),
        "attn.o": RowwiseParallel(output_layouts=TIME),
        "ffn_norm": SequenceParallel(),
        "ffn": gathered(0),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=TIME),
    }
    if config.activation == "swiglu":
        plan["ffn.gate"] = ColwiseParallel()
    if config.qk_norm:
        # [B, T, H, D], cut along the heads.
        plan["attn.q_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan["attn.k_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


def _whole(hidden: DTensor) -> Tensor:
    """The hidden state of every position; its gradient is each rank's part of a sum."""
    gathered: DTensor = hidden.redistribute(placements=[WHOLE])
    return gathered.to_local(grad_placements=[Partial()])


def _head_part(model: Transformer) -> tuple[Tensor, int, dist.ProcessGroup]:
    """This rank's rows of the head, the number of the first, and who has the others."""
    head = model.head_weight
    assert isinstance(head, DTensor)
    mesh = head.device_mesh
    part = -(-model.config.vocab_size // mesh.size())
    return head.to_local(), part * mesh.get_local_rank(), mesh.get_group()


def _hidden(model: Transformer, tokens: Tensor, documents: Tensor | None) -> Tensor:
    """Hidden states of every position, on every rank. Rows are filled up on the right until the
    ranks have equal parts; no real position depends on the padding."""
    width, ranks = tokens.shape[1], model.head_weight.device_mesh.size()  # type: ignore[attr-defined]
    more = -width % ranks
    if more:
        tokens = F.pad(tokens, (0, more))
        documents = None if documents is None else F.pad(documents, (0, more), value=-1)
    return _whole(model.hidden(tokens, documents))[:, :width]  # type: ignore[arg-type]


def _loss(
    self: Transformer, tokens: Tensor, targets: Tensor, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    hidden = _hidden(self, tokens, documents)
    head, first, group = _head_part(self)
    return vocab_parallel_loss(
        hidden.flatten(0, 1),
        head,
        targets.flatten(),
        self.config.logit_softcap,
        first,
        group,
        self.z_loss if torch.is_grad_enabled() else 0.0,
    )


def _forward(self: Transformer, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
    """Whole logits on every rank."""
    return self.logits(_hidden(self, tokens, documents))


def _states_at(self: Transformer, tokens: Tensor, at: Tensor, cache: Cache) -> Tensor:
    """Hidden states at some places, on every rank; the cache holds this rank's heads, and rows come
    filled up to equal parts."""
    return _whole(self.hidden(tokens, cache=cache)).flatten(0, 1)[at]  # type: ignore[arg-type]


def _logits(self: Transformer, hidden: Tensor) -> Tensor:
    """Whole logits on every rank of hidden states that every rank has."""
    head, _, _ = _head_part(self)
    mesh = self.head_weight.device_mesh  # type: ignore[attr-defined]
    shape = torch.Size((*hidden.shape[:-1], self.config.vocab_size))
    stride = torch.empty(shape, device="meta").stride()
    mine = F.linear(hidden, head)
    along = [Shard(hidden.dim() - 1)]
    out = DTensor.from_local(mine, mesh, along, shape=shape, stride=stride).full_tensor()
    softcap = self.config.logit_softcap
    return cap(out.to(torch.promote_types(out.dtype, torch.float32)), softcap) if softcap else out
