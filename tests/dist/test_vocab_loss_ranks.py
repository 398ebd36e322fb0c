"""The loss of a head that is cut along its vocabulary is that of the whole one."""

import pytest
from loss_ranks import compare_losses
from worlds import World


@pytest.mark.parametrize(("softcap", "z_weight"), [(0.0, 0.0), (0.0, 1e-2), (4.0, 1e-2)])
def test_a_cut_head_has_the_same_loss(
    softcap: float, z_weight: float, opened: dict[int, World]
) -> None:
    for differences in opened[2].run(compare_losses, softcap, z_weight):
        assert max(differences) < 1e-10
