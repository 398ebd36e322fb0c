"""The engine writes what an uncached decode writes, alone or in any company."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.generate.engine import Engine
from foundling.generate.sampling import Sampling
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=211, dim=48, layers=3, heads=6, kv_heads=2, ffn_dim=96, init_std=0.5
)
TIE = 1e-4
"""Top two logits closer than this may fall either way; the comparison ends there."""


def build(seed: int = 5, **changes: object) -> Transformer:
    model = Transformer(CONFIG.replace(**changes))  # type: ignore[arg-type]
    init_weights(model, seed)
    return model


def ragged_prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(211, (n,), generator=generator).tolist() for n in lengths]


def greedy_uncached(model: Transformer, prompt: Sequence[int], n: int) -> tuple[list[int], bool]:
    """The reference, a full pass for every token: up to the first near tie, and if one came."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            logits: Tensor = model(torch.tensor([text]))[0, -1]
            best = logits.topk(2)
            if float(best.values[0] - best.values[1]) < TIE:
                return text[len(prompt) :], True
            text.append(int(best.indices[0]))
    return text[len(prompt) :], False


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_equals_the_uncached_decode_token_for_token(tied: bool) -> None:
    model = build(tie_embeddings=tied)
    prompts = ragged_prompts(24)
    got = Engine(model, "cpu").generate(prompts, 24)
    ties = compared = 0
    for prompt, completion in zip(prompts, got, strict=True):
        expected, tie = greedy_uncached(model, prompt, 24)
        assert completion.ids[: len(expected)] == expected
        assert len(completion.ids) == 24
        assert not completion.finished
        ties += tie
        compared += len(expected)
    assert compared > 500
    assert ties < 0.005 * compared
    # A model that says one thing only would pass whatever the cache did.
    assert len({token for completion in got for token in completion.ids}) > 20


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.95, seed=3)])
def test_company_does_not_matter(sampling: Sampling) -> None:
    model, prompts = build(), ragged_prompts(10, seed=1)
    stops = frozenset(range(0, 211, 10))
    together = Engine(model, "cpu").generate(prompts, 20, sampling, stops)
    in_threes = Engine(model, "cpu", max_batch=3).generate(prompts, 20, sampling, stops)
    assert together == in_threes
    if sampling.temperature == 0:
        alone = [Engine(model, "cpu").generate([p], 20, sampling, stops)[0] for p in prompts]
        assert together == alone
    # Rows ended at different times, by stop token and by length, or nothing was dropped.
    assert len({len(completion.ids) for completion in together}) > 3


def test_the_seed_decides_the_sample() -> None:
    engine, prompts = Engine(build(), "cpu"), ragged_prompts(3)
    hot = [Sampling(temperature=1.0, seed=s) for s in (1, 1, 2)]
    first, again, other = (engine.generate(prompts, 12, sampling) for sampling in hot)
    assert first == again
    assert first != other
    # The same prompt twice in one call is two different draws.
    twins = engine.generate([prompts[0]] * 2, 12, hot[0])
    assert twins[0].ids != twins[1].ids


def test_a_stop_token_ends_a_row_and_is_not_part_of_it() -> None:
    engine, prompt = Engine(build(), "cpu"), ragged_prompts(1)[0]
    free = engine.generate([prompt], 12)[0]
    stop = free.ids[5]
    cut = engine.generate([prompt], 12, stop_ids={stop})[0]
    assert cut.ids == free.ids[: free.ids.index(stop)]
    assert (cut.finished, cut.stop_id) == (True, stop)
    assert (free.finished, free.stop_id) == (False, None)


def test_a_stop_token_as_the_very_last_allowed_one_still_finishes() -> None:
    engine, prompt = Engine(build(), "cpu"), ragged_prompts(1)[0]
    free = engine.generate([prompt], 12)[0]
    first = free.ids[0]
    assert engine.generate([prompt], 1, stop_ids={first})[0].finished


def test_tokens_stream_in_order_and_without_the_stop() -> None:
    seen: dict[int, list[int]] = {}
    stops = frozenset(range(0, 211, 10))
    prompts = ragged_prompts(8, seed=1)
    done = Engine(build(), "cpu", max_batch=3).generate(
        prompts,
        20,
        stop_ids=stops,
        on_token=lambda row, token: seen.setdefault(row, []).append(token),
    )
    assert [seen.get(row, []) for row in range(8)] == [completion.ids for completion in done]


def test_the_models_last_position_ends_a_row_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    prompts = [[1] * 5, [2] * 9, [3] * 10, [4] * 15]
    free = Engine(model, "cpu").generate(prompts, 8)
    monkeypatch.setattr(model, "max_positions", 10)
    limited = Engine(model, "cpu").generate(prompts, 8)
    assert [completion.ids for completion in limited] == [free[0].ids[:5], free[1].ids[:1], [], []]
    assert not any(completion.finished for completion in limited)


def test_a_row_at_the_last_position_may_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One finished row in six is too few to drop: it stays in the batch with its slots all used.
    model = build()
    prompts = [[7] * 18, *([row] * 3 for row in range(5))]
    free = Engine(model, "cpu").generate(prompts, 12)
    monkeypatch.setattr(model, "max_positions", 20)
    limited = Engine(model, "cpu").generate(prompts, 12)
    assert limited[0].ids == free[0].ids[:2]
    assert limited[1:] == free[1:]


def test_nothing_asked_is_nothing_done() -> None:
    engine = Engine(build(), "cpu")
    assert engine.generate([], 5) == []
    assert engine.generate([[1]], 0)[0].ids == []


def test_an_empty_prompt_is_refused_by_number() -> None:
    with pytest.raises(ConfigError, match="prompt 1 is empty"):
        Engine(build(), "cpu").generate([[1], []], 5)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was_found(training: bool) -> None:
    model = build().train(training)
    engine = Engine(model, "cpu")
    modes = []

    def fail(row: int, token: int) -> None:
        modes.append(model.training)
        raise KeyboardInterrupt

    engine.generate([[1, 2]], 2)
    assert model.training is training
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2]], 2, on_token=fail)
    assert modes == [False]
    assert model.training is training
    # What generation cached (rotary tables) must not spoil the next training step.
    loss, _ = model.loss(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long))
    torch.autograd.backward(loss)


def test_half_precision_runs_under_autocast_and_nearly_agrees() -> None:
    model, prompts = build(), ragged_prompts(6)
    wide = Engine(model, "cpu").generate(prompts, 4)
    half = Engine(model, "cpu", dtype=torch.float16).generate(prompts, 4)
    same = sum(a.ids[0] == b.ids[0] for a, b in zip(wide, half, strict=True))
    assert same >= 5
