"""The transformer: names, counts, causality, documents, and the traps of its cached tables."""

import math

import pytest
import torch
from torch import Tensor

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.model.initialization import init_weights
from foundling.model.kernels.attention_backends import MaskSpec, dense_mask
from foundling.model.layers import Rope, rotate
from foundling.model.loss import IGNORE
from foundling.model.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=97,
    dim=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn_dim=48,
    init={"std": 0.05},
)


def build(seed: int = 3, dtype: torch.dtype = torch.float64, **changes: object) -> Transformer:
    model = Transformer(CONFIG.replace(**changes))  # type: ignore[arg-type]
    init_weights(model, seed)
    return model.to(dtype)


def some_tokens(rows: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.vocab_size, (rows, width), generator=generator)


def test_parameter_names_and_shapes_are_the_published_ones() -> None:
    shapes = {name: tuple(p.shape) for name, p in build().named_parameters()}
    layer = {
        "attn_norm.weight": (32,),
        "attn.q.weight": (64, 32),
        "attn.k.weight": (32, 32),
        "attn.v.weight": (32, 32),
        "attn.o.weight": (32, 64),
        "ffn_norm.weight": (32,),
        "ffn.gate.weight": (48, 32),
        "ffn.up.weight": (48, 32),
        "ffn.down.weight": (32, 48),
    }
    expected = {"embed.weight": (97, 32), "norm.weight": (32,), "head.weight": (97, 32)}
    expected |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    assert shapes == expected
    assert "head.weight" not in dict(build(tie_embeddings=True).named_parameters())


def test_the_state_holds_parameters_only_even_after_a_forward_pass() -> None:
    model = build()
    model(some_tokens(1, 5))
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_llama_1b_has_its_published_count_on_the_meta_device() -> None:
    shape = ModelConfig(
        vocab_size=131072,
        dim=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        ffn_dim=8192,
        tie_embeddings=True,
    )
    with torch.device("meta"):
        model = Transformer(shape)
    assert sum(p.numel() for p in model.parameters()) == 1_241_581_568


def test_a_vocabulary_that_was_never_filled_in_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size is 0"):
        Transformer(ModelConfig())


def test_no_position_sees_a_later_token() -> None:
    model, tokens = build(), some_tokens(2, 12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % CONFIG.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_documents_of_a_packed_row_do_not_see_each_other() -> None:
    model = build()
    first, second = some_tokens(1, 5, seed=1), some_tokens(1, 7, seed=2)
    row = torch.cat((first, second, torch.zeros(1, 4, dtype=torch.long)), 1)
    documents = torch.tensor([[0] * 5 + [1] * 7 + [-1] * 4])
    packed = model(row, documents)
    # Rotary positions are relative: a document may begin anywhere in the row.
    assert torch.allclose(packed[:, :5], model(first), atol=1e-12)
    assert torch.allclose(packed[:, 5:12], model(second), atol=1e-12)
    assert packed.isfinite().all()
    assert not torch.allclose(packed[:, 5:12], model(row)[:, 5:12], atol=1e-3)


def test_padding_gives_no_nan_in_loss_or_gradients() -> None:
    model, tokens = build(), some_tokens(3, 8)
    documents = torch.full((3, 8), -1)
    documents[0, :3], documents[0, 3:6] = 0, 1
    targets = tokens.roll(-1, 1).masked_fill(documents < 0, IGNORE)
    loss, count = model.loss(tokens, targets, documents)
    torch.autograd.backward(loss)
    assert int(count) == 6
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("row", [[0, 0, 0, 0], [0, 0, -1, -1], [-1, -1, -1, -1]])
def test_one_document_needs_no_mask(row: list[int]) -> None:
    assert dense_mask(MaskSpec(torch.tensor([row])), len(row), torch.device("cpu")) is None


@pytest.mark.parametrize("row", [[0, 0, 1, 1], [0, 1, -1, -1], [-1, 0, 0, 0]])
def test_the_mask_is_causal_and_inside_documents(row: list[int]) -> None:
    mask = dense_mask(MaskSpec(torch.tensor([row])), len(row), torch.device("cpu"))
    assert mask is not None
    expected = [[s <= t and row[s] == row[t] for s in range(4)] for t in range(4)]
    assert mask[0, 0].tolist() == expected


def test_rotation_is_a_turn_by_the_distance_of_positions() -> None:
    rope = Rope(CONFIG.replace(head_dim=8, rope_theta=100.0))
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind()

    def score(t: int, s: int) -> float:
        at = [rope.at(torch.tensor([[p]]), 1000, torch.float64) for p in (t, s)]
        return float((rotate(q, at[0]) * rotate(k, at[1])).sum())

    assert score(5, 2) == pytest.approx(score(905, 902), abs=1e-12)
    assert score(5, 2) != pytest.approx(score(6, 2), abs=1e-3)
    # Against complex numbers: coordinate i and i + D/2 are one number, turned by t * theta^(-2i/D).
    turned = rotate(q, rope.at(torch.tensor([[7]]), 8, torch.float64)).flatten()
    for i in range(4):
        z = complex(q.flatten()[i], q.flatten()[i + 4]) * complex(
            math.cos(7 * 100.0 ** (-i / 4)), math.sin(7 * 100.0 ** (-i / 4))
        )
        assert complex(turned[i], turned[i + 4]) == pytest.approx(z, abs=1e-12)


def test_a_table_made_while_sampling_can_be_trained_with() -> None:
    model = build(dtype=torch.float32)
    with torch.inference_mode():
        model(some_tokens(1, 300))
    loss, _ = model.loss(some_tokens(1, 300), some_tokens(1, 300, seed=1))
    torch.autograd.backward(loss)


def test_rounding_the_weights_does_not_round_the_positions() -> None:
    model = build(dtype=torch.float32)
    model(some_tokens(1, 4))
    model.to(torch.bfloat16)(some_tokens(1, 4))
    assert model.rope is not None
    cos, _ = model.rope.upto(4, torch.device("cpu"), torch.bfloat16)
    assert cos.dtype == torch.float32
    assert rotate(torch.ones(1, 4, 1, 16, dtype=torch.bfloat16), (cos, cos)).dtype == torch.bfloat16


def test_a_longer_row_grows_the_table_and_changes_nothing_before() -> None:
    model = build()
    tokens = some_tokens(1, 600)
    short = model(tokens[:, :20])
    assert torch.allclose(model(tokens)[:, :20], short, atol=1e-12)
