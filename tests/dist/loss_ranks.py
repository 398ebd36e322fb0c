"""The head's loss in a rank that holds some rows of the head, beside the whole one."""

import torch
import torch.distributed as dist

from foundling.model.loss import IGNORE
from foundling.model.loss import cross_entropy_sum
from foundling.parallel.losses import vocab_parallel_loss

ROWS, WIDTH, VOCAB = 12, 8, 20


def compare_losses(softcap: float, z_weight: float) -> list[float]:
    """Largest differences of the loss, of the hidden state's gradient and of the head's."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (ROWS,), generator=generator)
    targets[::5] = IGNORE
    whole = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    expected, _ = cross_entropy_sum(whole[0], whole[1], targets, softcap, z_weight)
    (3 * expected).backward()
    part = VOCAB // dist.get_world_size()
    first = part * dist.get_rank()
    mine = [hidden.clone().requires_grad_(), head[first : first + part].clone().requires_grad_()]
    assert dist.group.WORLD is not None
    found, count = vocab_parallel_loss(
        mine[0], mine[1], targets, softcap, first, dist.group.WORLD, z_weight
    )
    (3 * found).backward()
    assert int(count) == int((targets != IGNORE).sum())
    wanted, got = [tensor.grad for tensor in whole], [tensor.grad for tensor in mine]
    assert wanted[0] is not None and wanted[1] is not None
    assert got[0] is not None and got[1] is not None
    dist.all_reduce(got[0])  # this rank's part of a sum
    pairs = ((found, expected), (got[0], wanted[0]), (got[1], wanted[1][first : first + part]))
    return [float((a - b).detach().abs().max()) for a, b in pairs]
