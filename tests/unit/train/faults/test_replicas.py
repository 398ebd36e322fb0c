"""The hash of the weights, and who is named when replicas differ (ranks: tests/dist)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundling.parallel.mesh import ALONE
from foundling.train.faults import replicas
from foundling.train.faults.replicas import find_difference, hash_of, majority_difference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bytes_have_equal_hashes(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    tensor = (100 * torch.randn(37, 53)).to(dtype)
    assert hash_of(tensor) == hash_of(tensor.clone())
    assert hash_of(tensor.t().contiguous().t()) == hash_of(tensor)  # values, not layout


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2999), st.integers(0, 31))
def test_one_flipped_bit_anywhere_changes_it(place: int, bit: int) -> None:
    torch.manual_seed(2)
    tensor = torch.randn(3000)
    flipped = tensor.clone()
    mask = torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    flipped.view(torch.int32)[place] ^= mask
    assert hash_of(flipped) != hash_of(tensor)


def test_places_matter_across_chunks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "CHUNK", 64)
    torch.manual_seed(3)
    tensor = torch.randn(1000)
    swapped = tensor.clone()
    swapped[[0, 64]] = tensor[[64, 0]]  # the same place of two chunks
    near = tensor.clone()
    near[[5, 6]] = tensor[[6, 5]]
    assert len({int(hash_of(t)) for t in (tensor, swapped, near)}) == 3


def test_zeros_of_different_sign_differ() -> None:
    assert hash_of(torch.zeros(9)) != hash_of(-torch.zeros(9))


def test_the_odd_one_is_named_with_the_first_parameter() -> None:
    names, ranks = ["embed", "norm", "head"], [0, 2, 4]
    assert majority_difference([[1, 2, 3]] * 3, ranks, names) is None
    found = majority_difference([[1, 2, 3], [1, 9, 9], [1, 2, 3]], ranks, names)
    assert found is not None
    assert (found.differing_ranks, found.name) == ((2,), "norm")
    assert "rank 2" in found.describe()


def test_of_two_nobody_can_say_which() -> None:
    found = majority_difference([[1, 2], [1, 3]], [0, 1], ["a", "b"])
    assert found is not None
    assert (found.differing_ranks, found.name) == ((), "b")
    assert "ranks [0, 1] do not hold the same b" in found.describe()


def test_one_process_has_nobody_to_differ_from() -> None:
    assert find_difference([("a", torch.randn(3))], ALONE) is None
