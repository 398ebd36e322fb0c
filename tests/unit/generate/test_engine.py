"""The engine writes what a plain decoder writes, alone or in any company, and gives all back."""

import random
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY, build, misses, plain_logits, small_engine

from foundling.config.errors import CheckpointError, ConfigError
from foundling.generate.engine import Engine
from foundling.generate.request import Completion, Request, TokenScores
from foundling.generate.sampling import Sampling
from foundling.model.transformer import Transformer
from foundling.runtime import device


def some_requests(rng: random.Random, count: int, **fields: Any) -> list[Request]:
    """Prompts of all lengths, many of which begin alike."""
    stem = [rng.randrange(VOCABULARY) for _ in range(60)]
    return [
        Request(
            prompt=stem[: rng.randrange(60)] + rng.choices(range(VOCABULARY), k=rng.randint(1, 30)),
            max_tokens=rng.randint(1, 30),
            **fields,
        )
        for _ in range(count)
    ]


def run_mix(
    engine: Engine, rng: random.Random, requests: list[Request]
) -> list[tuple[Request, list[int]]]:
    """Requests come at random steps and some are cancelled on the way; what the others say."""
    waiting, said = list(requests), dict[int, tuple[Request, list[int]]]()
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), rng.choice((0, 0, 1, 3)))):
            request = waiting.pop()
            said[engine.submit(request)] = request, []
        for output in engine.step():
            if output.id is not None:
                said[output.number][1].append(output.id)
        if said and rng.random() < 0.05:
            gone = rng.choice(list(said))
            engine.cancel(gone)
            del said[gone]
    assert all(len(ids) == request.max_tokens for request, ids in said.values())
    return list(said.values())


def mixes(family: str, count: int) -> None:
    """So many random mixes of one family against the plain decoder."""
    model = build(family)
    rng, ties, compared, different = random.Random(family), 0, 0, set[int]()
    preempted = reused = 0
    for number in range(count):
        engine = small_engine(
            model, blocks=rng.randint(8, 16), step_tokens=rng.choice((7, 24, 200)),
            shares=number % 4 != 3,
        )  # fmt: skip
        for request, said in run_mix(engine, rng, some_requests(rng, 12)):
            wrong, near = misses(model, request.prompt, said)
            assert wrong == 0
            ties, compared = ties + near, compared + len(said)
            different |= set(said)
        assert engine.blocks.used == 0
        preempted += engine.scheduler.preemptions
        reused += engine.reused_tokens
    assert ties <= 1 + 0.001 * compared
    assert compared > 40 * count
    # Or nothing was tried.
    assert preempted
    assert reused
    # A model that says one thing only would pass whatever the cache did.
    assert len(different) > 20


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_the_plain_decoder_in_random_mixes(family: str) -> None:
    mixes(family, 4)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_the_plain_decoder_in_200_random_mixes(family: str) -> None:
    mixes(family, 200)


SAMPLINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=1.0, seed=3),
    "filters": Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=4),
    "penalties": Sampling(
        temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=5
    ),
    "bias": Sampling(temperature=1.0, logit_bias={3: 5.0, 7: -100.0}, seed=6),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_company_does_not_matter(name: str) -> None:
    model, stops = build(), frozenset(range(0, VOCABULARY, 20))
    requests = some_requests(random.Random(1), 10, sampling=SAMPLINGS[name], stop_ids=stops)
    together = small_engine(model, blocks=20).complete(requests)
    alone = [Engine(model, "cpu").complete([request])[0] for request in requests]
    assert [one.ids for one in together] == [one.ids for one in alone]
    # Requests ended at different times, by stop token and by length, or nothing was dropped.
    assert {one.finish for one in together} == {"stop", "length"}


def test_the_seed_decides_the_sample() -> None:
    engine, prompt = Engine(build(), "cpu"), [5, 6, 7]

    def said(seed: int) -> list[int]:
        sampling = Sampling(temperature=1.0, seed=seed)
        return engine.complete([Request(prompt=prompt, max_tokens=12, sampling=sampling)])[0].ids

    assert said(1) == said(1) != said(2)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_a_full_forward_pass(family: str) -> None:
    model, rng = build(family), random.Random(2)
    stem = rng.choices(range(VOCABULARY), k=40)
    texts = [stem[: rng.randint(5, 40)] + rng.choices(range(VOCABULARY), k=20) for _ in range(12)]
    starts = [rng.randint(1, len(text)) for text in texts]
    engine = small_engine(model, blocks=16)
    found: dict[int, TokenScores] = dict(engine.score([*texts, texts[0]], [*starts, starts[0]]))
    assert sorted(found) == list(range(13))
    for place, (text, start) in enumerate(zip(texts, starts, strict=True)):
        logprobs = plain_logits(model, text).log_softmax(-1)
        wanted = [float(logprobs[at - 1, text[at]]) for at in range(start, len(text))]
        assert found[place].logprobs == pytest.approx(wanted, abs=1e-4)
        best = [int(logprobs[at - 1].argmax()) == text[at] for at in range(start, len(text))]
        assert found[place].likeliest == best
    assert found[12] == found[0]
    assert engine.blocks.used == 0


def test_scoring_and_generating_share_steps() -> None:
    model = build()
    engine = small_engine(model, blocks=30)
    [alone] = engine.complete([Request(prompt=[1, 2, 3], max_tokens=20)])
    number = engine.submit(Request(prompt=[1, 2, 3], max_tokens=20))
    scored = dict(engine.score([[4, 5, 6, 7]], [1]))
    assert len(scored[0].logprobs) == 3
    first, second = (engine.generate([Request(prompt=[at], max_tokens=20)]) for at in (8, 9))
    assert len(list(zip(first, second, strict=True))) == 20
    said = []
    while engine.has_work or len(said) < 20:
        said += [output.id for output in engine.step() if output.number == number]
    assert said == alone.ids
    assert engine.blocks.used == 0


def test_log_probabilities_of_tokens_and_of_the_prompt() -> None:
    model, prompt = build(), [3, 1, 4, 1, 5]
    engine = Engine(model, "cpu")
    number = engine.submit(Request(prompt=prompt, max_tokens=6, logprobs=3, prompt_logprobs=2))
    outputs = engine.step()
    scores = engine.prompt_scores(number)
    while engine.has_work:
        outputs += engine.step()
    said = [output.id for output in outputs if output.id is not None]
    logprobs = plain_logits(model, [*prompt, *said]).log_softmax(-1)
    assert scores is not None
    assert scores.logprobs == pytest.approx(
        [float(logprobs[at - 1, prompt[at]]) for at in range(1, 5)], abs=1e-4
    )
    assert [len(top) for top in scores.top] == [2] * 4
    for at, output in enumerate(outputs):
        row = logprobs[len(prompt) - 1 + at]
        assert output.logprob == pytest.approx(float(row[said[at]]), abs=1e-4)
        assert output.top is not None
        assert list(output.top) == row.topk(3).indices.tolist()
    [chosen] = engine.complete([Request(prompt=prompt, max_tokens=6, logprobs=0)])
    assert chosen.ids == said
    assert chosen.logprobs == pytest.approx([output.logprob for output in outputs], abs=1e-4)


def one(model: Transformer, **fields: Any) -> Completion:
    return Engine(model, "cpu").complete([Request(**{"prompt": [9], "max_tokens": 12, **fields})])[
        0
    ]


def test_a_stop_token_ends_a_request_and_is_not_part_of_it() -> None:
    model = build()
    free = one(model)
    stop = free.ids[5]
    cut = one(model, stop_ids=frozenset({stop}))
    assert cut.ids == free.ids[: free.ids.index(stop)]
    assert (cut.finish, cut.stop_id) == ("stop", stop)
    assert (free.finish, free.stop_id) == ("length", None)
    later = one(model, stop_ids=frozenset({stop}), min_tokens=12)
    assert len(later.ids) == 12
    assert stop not in later.ids


def test_a_bias_and_a_penalty_change_what_is_said() -> None:
    model = build()
    assert set(one(model, sampling=Sampling(logit_bias={17: 1e4})).ids) == {17}
    kept = one(model, sampling=Sampling(logit_bias={17: 50.0}, frequency_penalty=30.0)).ids
    assert kept[:2] == [17, 17]
    assert set(kept) != {17}


REFUSED = {
    "the prompt is empty": {"prompt": []},
    "token 211 is none of the model's 211": {"prompt": [1, 211]},
    "token -1 is none": {"prompt": [-1]},
    "max_tokens is 0": {"max_tokens": 0},
    "none of which is left to write at": {"prompt": [1] * 128},
    "ask for 8 or fewer": {"prompt": [1] * 120, "max_tokens": 9},
    "does not fit the cache of 80 tokens": {"prompt": [1] * 70, "max_tokens": 20},
    "logit_bias names token 999": {"sampling": Sampling(logit_bias={999: 1.0})},
    "logprobs is -1 and must be 0": {"logprobs": -1},
    "prompt_logprobs is -2 and must be 0": {"prompt_logprobs": -2},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_request_that_cannot_be_answered_is_refused_alone(sentence: str) -> None:
    engine = small_engine(build(), blocks=5)
    neighbour = engine.submit(Request(prompt=[1, 2], max_tokens=5))
    with pytest.raises(ConfigError, match=sentence):
        engine.submit(Request(**{"prompt": [1], "max_tokens": 5, **REFUSED[sentence]}))
    said = []
    while engine.has_work:
        said += [output.id for output in engine.step() if output.number == neighbour]
    assert len(said) == 5


def test_logits_that_are_no_numbers_end_a_request_with_a_sentence() -> None:
    model = build()
    model.norm.weight.data[0] = float("nan")
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        one(model)
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        list(Engine(model, "cpu").score([[1, 2, 3]], [1]))


def test_memory_that_runs_out_costs_a_smaller_step_and_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build()
    wanted = small_engine(model, 30, step_tokens=256).complete(some_requests(random.Random(3), 6))
    real = Transformer.states_at

    def short(self: Transformer, tokens: torch.Tensor, *more: Any) -> torch.Tensor:
        if tokens.shape[1] > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, tokens, *more)

    monkeypatch.setattr(Transformer, "states_at", short)
    engine = small_engine(model, 30, step_tokens=256)
    found = engine.complete(some_requests(random.Random(3), 6))
    assert [one.ids for one in found] == [one.ids for one in wanted]
    assert engine.scheduler.step_tokens < 100


def test_a_step_that_is_interrupted_leaves_no_prefix_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, prompt = build(), list(range(50))
    engine = small_engine(model, 30, step_tokens=256)
    wanted = engine.complete([Request(prompt=prompt, max_tokens=5)])
    engine.forget()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Transformer, "states_at", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.complete([Request(prompt=prompt, max_tokens=5)])
    assert engine.blocks.used == 0
    assert engine.complete([Request(prompt=prompt, max_tokens=5)]) == wanted


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was_found(training: bool) -> None:
    model = build().requires_grad_(True).train(training)
    for _ in Engine(model, "cpu").generate([Request(prompt=[1, 2], max_tokens=3)]):
        assert not model.training
        break
    assert model.training is training
    # What generation cached (rotary tables) must not spoil the next training step.
    loss, _ = model.loss(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long))
    torch.autograd.backward(loss)


def test_half_precision_runs_under_autocast_and_nearly_agrees() -> None:
    model = build()
    requests = some_requests(random.Random(4), 6)
    wide = Engine(model, "cpu").complete(requests)
    half = Engine(model, "cpu", dtype=torch.float16).complete(requests)
    assert sum(a.ids[0] == b.ids[0] for a, b in zip(wide, half, strict=True)) >= 5


def many_requests(count: int) -> None:
    model, rng = build("windows"), random.Random(7)
    engine = small_engine(model, blocks=20, step_tokens=100)
    live, most = set[int](), 0
    before = device.memory_usage(torch.device("cpu"))
    for request in some_requests(rng, count, sampling=Sampling(temperature=1.0)):
        live.add(engine.submit(request))
        while len(engine.scheduler.waiting) > 8:
            live -= {output.number for output in engine.step() if output.finish}
        if rng.random() < 0.3:
            gone = rng.choice(sorted(live))
            engine.cancel(gone)
            live.discard(gone)
        most = max(most, engine.blocks.used)
    while engine.has_work:
        engine.step()
    assert most > 10
    for pool in engine.blocks.pools:
        assert pool.free == pool.count
        assert not any(pool._users)
    assert not engine._live
    assert not engine._by_number
    grown = (
        device.memory_usage(torch.device("cpu"))["memory_allocated"] - before["memory_allocated"]
    )
    assert grown < 64e6, "memory rises"


def test_no_block_is_lost_over_many_requests() -> None:
    many_requests(300)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_no_block_is_lost_over_ten_thousand_requests() -> None:
    many_requests(10_000)
