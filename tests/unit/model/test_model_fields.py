"""Every field of the model against a second, slow implementation; cached, packed and dropped."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow_model import slow_logits
from torch import Tensor
from variants import VARIANTS, build

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.generate.engine import Engine
from foundling.generate.request import Request
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer

each_variant = pytest.mark.parametrize("variant", VARIANTS)


def some_tokens(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(37, (rows, width), generator=torch.Generator().manual_seed(seed))


@each_variant
def test_logits_are_those_of_the_slow_model(variant: str) -> None:
    model, tokens = build(variant), some_tokens(2, 11)
    with torch.no_grad():
        logits = model(tokens)
        weights: dict[str, Tensor] = dict(model.named_parameters())
        for row, found in zip(tokens.tolist(), logits, strict=True):
            assert torch.allclose(found, slow_logits(weights, model.config, row), atol=1e-10)
    assert logits.std() > 0.05


@each_variant
def test_every_parameter_has_an_effect(variant: str) -> None:
    model, tokens = build(variant), some_tokens(1, 11)
    before = model(tokens).detach()
    for name, parameter in model.named_parameters():
        if model.positions is not None and name.endswith(("attn.k.bias", "attn.k_norm.bias")):
            continue  # the same shift of all keys cancels in the softmax
        kept = parameter.detach().clone()
        parameter.data.mul_(1.5).add_(0.1)
        assert not torch.allclose(model(tokens).detach(), before, atol=1e-9), name
        parameter.data.copy_(kept)


@each_variant
def test_the_loss_and_its_gradients_are_those_of_the_logits(variant: str) -> None:
    model, tokens = build(variant), some_tokens(3, 9)
    targets = tokens.roll(-1, 1)
    targets[:, -2:] = -100
    total, count = model.loss(tokens, targets)
    got = torch.autograd.grad(total, list(model.parameters()))
    reference = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    expected = torch.autograd.grad(reference, list(model.parameters()))
    assert int(count) == 21
    assert torch.allclose(total, reference, rtol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(got, expected, strict=True))


@each_variant
def test_half_the_precision_is_the_same_function_without_a_warning(variant: str) -> None:
    model, tokens = build(variant, torch.float32), some_tokens(3, 9)
    exact, _ = model.loss(tokens, tokens.roll(-1, 1))
    with torch.autocast("cpu", torch.float16):
        rounded, _ = model.loss(tokens, tokens.roll(-1, 1))
        torch.autograd.backward(rounded)
    assert float(rounded.detach()) == pytest.approx(float(exact.detach()), rel=3e-3)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@each_variant
def test_documents_of_a_packed_row_are_as_if_alone(variant: str) -> None:
    model = build(variant)
    first, second = some_tokens(1, 5, seed=1), some_tokens(1, 7, seed=2)
    row = torch.cat((first, second, torch.zeros(1, 4, dtype=torch.long)), 1)
    documents = torch.tensor([[0] * 5 + [1] * 7 + [-1] * 4])
    packed = model(row, documents)
    assert torch.allclose(packed[:, :5], model(first), atol=1e-10)
    assert torch.allclose(packed[:, 5:12], model(second), atol=1e-10)
    assert packed.isfinite().all()


@each_variant
def test_the_engine_writes_and_scores_as_the_model_alone(variant: str) -> None:
    """Prompts of several lengths in steps of nine tokens, so that some come in pieces."""
    model = build(variant).requires_grad_(False)
    prompts = [some_tokens(1, width, seed=width)[0].tolist() for width in (1, 6, 3, 10)]
    engine = Engine(model, "cpu", step_tokens=9)
    requests = [Request(prompt=prompt, max_tokens=12) for prompt in prompts]
    texts = []
    for prompt, completion in zip(prompts, engine.complete(requests), strict=True):
        text = list(prompt)
        for _ in range(12):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        assert completion.ids == text[len(prompt) :]
        texts.append(text)
    for place, scores in engine.score(texts, [1] * len(texts)):
        ids = torch.tensor(texts[place])
        wanted = model(ids[None, :-1])[0].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        assert torch.allclose(torch.tensor(scores.logprobs, dtype=wanted.dtype), wanted, atol=1e-10)


def test_a_text_beyond_the_last_position_is_refused() -> None:
    model = build("gpt")
    model(some_tokens(1, 24))
    with pytest.raises(ConfigError, match="25 tokens long and the model has 24 positions"):
        model(some_tokens(1, 25))
    request = Request(prompt=some_tokens(1, 20)[0].tolist(), max_tokens=5)
    with pytest.raises(ConfigError, match="24 positions; ask for 4 or fewer"):
        Engine(model, "cpu").submit(request)


def dropped(model: Transformer, seed: int) -> Tensor:
    torch.manual_seed(seed)
    logits: Tensor = model(some_tokens(2, 9))
    return logits.detach()


@pytest.mark.parametrize("variant", ["gpt", "depth"])
def test_dropout_is_keyed_by_the_seed_and_off_in_evaluation(variant: str) -> None:
    model, plain = build(variant, dropout=0.3), build(variant)
    assert torch.equal(dropped(model, 1), dropped(model, 1))
    assert not torch.allclose(dropped(model, 1), dropped(model, 2))
    assert not torch.allclose(dropped(model, 1), dropped(plain, 1))
    model.eval()
    assert torch.equal(dropped(model, 1), dropped(plain, 2))


def test_dropout_is_in_the_embedding_the_attention_and_both_branches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, float]] = []
    attend, drop = F.scaled_dot_product_attention, F.dropout

    def watched_attend(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(("attention", kwargs["dropout_p"]))
        return attend(*args, **kwargs)

    def watched_drop(x: Tensor, p: float, training: bool) -> Tensor:
        calls.append(("branch", p if training else 0.0))
        return drop(x, p, training)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched_attend)
    monkeypatch.setattr(F, "dropout", watched_drop)
    model = build("gpt", dropout=0.2)
    model(some_tokens(1, 4))
    layer = [("attention", 0.2), ("branch", 0.2), ("branch", 0.2)]
    assert calls == [("branch", 0.2), *layer * 3]
    calls.clear()
    build("gpt")(some_tokens(1, 4))
    assert calls == [("attention", 0.0)] * 3


def test_a_row_within_the_window_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Tensor | None] = []
    attend = F.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        masks.append(kwargs["attn_mask"])
        return attend(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    model = build("windows")
    model(some_tokens(1, 3))
    assert masks == [None] * 3
    model(some_tokens(1, 4))
    assert [mask is None for mask in masks[3:]] == [False, True, False]


def test_fresh_weights_of_the_depth_recipe() -> None:
    model = build("depth")
    model = Transformer(model.config)
    init_weights(model, 1)
    weights = dict(model.named_parameters())
    assert weights["layers.0.mix"].tolist() == pytest.approx([1.15, 0.20])
    assert weights["layers.2.mix"].tolist() == pytest.approx([1.05, 0.05])
    assert not weights["layers.2.attn.value_gate.weight"].any()
    assert set(model.value_embeds) == {"0", "2"}
    config = ModelConfig(
        vocab_size=512,
        dim=64,
        layers=2,
        heads=4,
        bias="all",
        norm="layer",
        positions=300,
        init={"std": 0.3, "head_std": 0.5, "outputs": "zero"},
        value_embeds=True,
    )
    model = Transformer(config)
    init_weights(model, 1)
    for name, weight in model.named_parameters():
        if name.endswith(("attn.o.weight", "ffn.down.weight", ".bias", "value_gate.weight")):
            assert not weight.any(), name
    spreads = {
        "head.weight": 0.5,
        "positions.weight": 0.3,
        "embed.weight": 0.3,
        "value_embeds.1.weight": 1 / math.sqrt(64),
    }
    found = dict(model.named_parameters())
    for name, std in spreads.items():
        assert float(found[name].detach().std()) == pytest.approx(std, rel=0.05), name


IDLE: dict[str, tuple[dict[str, Any], str]] = {
    "no room": ({"positions": 0}, "model.positions must be rotary, or the rows"),
    "no number": ({"positions": "learned"}, "model.positions must be rotary, or the rows"),
    "theta": ({"positions": 9, "rope_theta": 5.0}, "model.rope_theta"),
    "factor": (
        {"positions": 9, "rope_scaling": {"factor": 5.0}},
        "model.rope_scaling",
    ),
    "low": ({"rope_scaling": {"low": 2.0}}, "model.rope_scaling.low has no effect"),
    "original": (
        {"rope_scaling": {"original": 4096}},
        "model.rope_scaling.original has no effect",
    ),
    "order": (
        {"rope_scaling": {"factor": 8.0, "low": 4.0}},
        "model.rope_scaling.high must be above",
    ),
    "shrink": ({"rope_scaling": {"factor": 0.5}}, "model.rope_scaling.factor is at least 1"),
    "letters": ({"windows": (4, "S")}, "model.windows[1] must be a whole number"),
    "negative": ({"windows": (4, -1)}, "model.windows[1] cannot be negative"),
    "all long": ({"windows": (0,)}, "model.windows has no effect"),
    "never reached": ({"windows": (0, 0, 0, 4), "layers": 3}, "model.windows has no effect"),
    "tied": ({"tie_embeddings": True, "init": {"head_std": 0.1}}, "model.init.head_std"),
    "dropout": ({"dropout": 1.0}, "model.dropout"),
    "softcap": ({"logit_softcap": -1.0}, "model.logit_softcap"),
    "narrow": ({"value_embeds": True, "dim": 8, "heads": 2}, "model.dim of 12 or more"),
}


@pytest.mark.parametrize("case", IDLE)
def test_a_field_that_cannot_take_effect_is_refused(case: str) -> None:
    fields, named = IDLE[case]
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**fields)
    assert named in str(caught.value)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_rows_longer_than_the_positions_are_refused() -> None:
    from foundling.config.load import load_config

    with pytest.raises(ConfigError, match=r"train\.seq_len is 4096 and the model has 2048"):
        load_config("tinygpt-524m", {"train.seq-len": "4096"})
