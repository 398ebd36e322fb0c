"""The engine where several read it, where memory is short, and where a request is odd."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import VOCABULARY, build, plain_logits, small_engine

from foundling.config.errors import ConfigError
from foundling.generate import kv_cache
from foundling.generate.engine import Engine
from foundling.generate.request import Output, Request
from foundling.generate.sampling import NOTHING_LEFT, Sampling
from foundling.model.transformer import Transformer
from foundling.plan.serving import plan_serving
from foundling.runtime.device import bf16_failure


def all_of(engine: Engine) -> list[Output]:
    found: list[Output] = []
    while engine.has_work:
        found += engine.step()
    return found


@pytest.mark.parametrize("call", ["generate", "score"])
def test_outputs_that_another_reader_took_are_an_error_and_no_endless_loop(call: str) -> None:
    engine = small_engine(build(), 30)
    if call == "generate":
        reader: Any = engine.generate([Request(prompt=[1], max_tokens=6)])
    else:
        reader = engine.score([[7] * 60, [8] * 50], [1, 1])
    next(reader)
    all_of(engine)
    with pytest.raises(RuntimeError, match="read by someone else"):
        list(reader)


def test_what_is_not_read_yet_waits_with_its_scores() -> None:
    engine = small_engine(build(), 30)
    number = engine.submit(Request(prompt=[1, 2], max_tokens=1, prompt_logprobs=0))
    dict(engine.score([[4, 5, 6] * 12], [1]))
    assert engine.has_work
    assert not engine.scheduler.running
    assert [output.number for output in engine.step()] == [number]
    scores = engine.prompt_scores(number)
    assert scores is not None
    assert len(scores.logprobs) == 1


def test_a_step_that_fails_loses_no_output() -> None:
    fails = False

    def before() -> None:
        if fails:
            raise KeyError

    engine = small_engine(build(), 30, before_step=before)
    number = engine.submit(Request(prompt=[1], max_tokens=2))
    dict(engine.score([[4, 5, 6] * 12], [1]))
    fails = True
    with pytest.raises(KeyError):
        engine.step()
    fails = False
    assert [output.number for output in all_of(engine)] == [number] * 2


def test_memory_that_runs_out_after_judging_loses_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    [(_, wanted)] = small_engine(model, 30).score([[5, 6, 7]], [1])
    engine = small_engine(model, 30, step_tokens=256)
    engine.submit(Request(prompt=[1, 2], max_tokens=2))
    real, rows = Transformer.next_logits, list[int]()

    def short(self: Transformer, states: torch.Tensor) -> torch.Tensor:
        rows.append(len(states))
        if len(rows) == 2:  # that of the token to draw
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, states)

    monkeypatch.setattr(Transformer, "next_logits", short)
    [(_, found)] = engine.score([[5, 6, 7]], [1])
    assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    assert len(all_of(engine)) == 2


def test_memory_that_does_not_suffice_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = small_engine(build(), 30, step_tokens=64)
    monkeypatch.setattr(Transformer, "states_at", short)
    with pytest.raises(ConfigError, match=r"beside a cache of 480 .* One of 240 leaves"):
        engine.complete([Request(prompt=[1], max_tokens=2)])
    monkeypatch.setattr(kv_cache.torch, "zeros", short)
    monkeypatch.setattr(kv_cache, "memory_free", lambda device: 30_000)
    with pytest.raises(ConfigError, match=r"are free: at most 75 tokens fit"):
        small_engine(build(), 30).complete([Request(prompt=[1], max_tokens=2)])


@pytest.mark.parametrize("windows", [(), (32, 32, 0)])
@pytest.mark.parametrize("length", [128, 320])
def test_what_the_plan_says_fits_runs_at_a_time_and_one_more_waits(
    windows: tuple[int, ...], length: int
) -> None:
    model = build(windows=windows)
    plan = plan_serving(
        model.config, 0, 400_000, bytes_per_weight=4, bytes_per_number=4, contexts=[length],
        step_tokens=64,
    )  # fmt: skip
    fits = plan.requests[length]
    assert fits >= 2
    engine = Engine(
        model, "cpu", cache_bytes=plan.cache, max_length=length, max_running=fits + 5,
        step_tokens=64,
    )  # fmt: skip
    assert engine.blocks.capacity // length == fits
    rng, most = random.Random(1), 0
    for _ in range(fits + 1):
        prompt = rng.choices(range(VOCABULARY), k=length - 60)
        engine.submit(Request(prompt=prompt, max_tokens=60))
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
        if most == fits and len(engine.scheduler.waiting) == 1:
            break
    # What decodes needs a block more now and then: all of them are there.
    while len(engine.scheduler.waiting) == 1 and len(engine.scheduler.running) == fits:
        engine.step()
    assert most == fits
    assert engine.scheduler.preemptions == 0


def test_a_model_of_windows_alone_makes_do_with_a_small_cache() -> None:
    model, prompt = build("all windowed"), [1, 2, 3, 4, 5] * 20
    engine = small_engine(model, blocks=5, step_tokens=200)
    [wanted] = small_engine(model, blocks=50).complete([Request(prompt=prompt, max_tokens=5)])
    [found] = engine.complete([Request(prompt=prompt, max_tokens=5)])
    assert found.ids == wanted.ids
    assert engine.blocks.capacity == 128
    with pytest.raises(ConfigError, match="no room beside a window of 9"):
        small_engine(model, blocks=1)


def test_stop_tokens_that_the_model_lacks_are_left_out() -> None:
    ids = frozenset({VOCABULARY, 9999})
    request = Request(prompt=[3], max_tokens=4, min_tokens=2, stop_ids=ids)
    assert len(small_engine(build()).complete([request])[0].ids) == 4


def test_limits_are_those_of_the_model_at_most_and_no_less_than_nothing() -> None:
    engine = small_engine(build("gpt"), 30, max_length=1000)
    assert engine.longest == 128
    with pytest.raises(ConfigError, match="128 positions"):
        engine.submit(Request(prompt=[1] * 150, max_tokens=5))
    with pytest.raises(ConfigError, match="below zero"):
        small_engine(build(), step_tokens=-5)


def test_rules_that_leave_no_token_are_not_blamed_on_the_weights() -> None:
    engine = small_engine(build())
    every = frozenset(range(VOCABULARY))
    with pytest.raises(ConfigError) as refused:
        engine.complete([Request(prompt=[3], max_tokens=3, min_tokens=2, stop_ids=every)])
    assert str(refused.value) == NOTHING_LEFT


@pytest.mark.parametrize("shares", [True, False])
def test_a_token_of_nan_fails_its_own_request_alone(shares: bool) -> None:
    model, rng = build(), random.Random(1)
    model.embed.weight.data[7] = float("nan")
    stem = rng.choices([id for id in range(VOCABULARY) if id != 7], k=64)
    engine = small_engine(model, 60, step_tokens=300, shares=shares)
    engine.complete([Request(prompt=[*stem, 9], max_tokens=1)])
    # The bad one first: where texts of a step attend together its tokens lie at its beginning.
    prompts = [[7, *stem[:20]], [*stem, 1, 2], [*stem, 7, 2], [*stem, 3, 2], stem[:9]]
    numbers = [engine.submit(Request(prompt=prompt, max_tokens=2)) for prompt in prompts]
    ends = {output.number: output.finish for output in all_of(engine) if output.finish}
    assert [ends[number] for number in numbers] == ["error", "length", "error", "length", "length"]


def test_new_weights_in_mid_score_score_all_of_it() -> None:
    model, text = build(), [random.Random(3).randrange(VOCABULARY) for _ in range(60)]
    engine = small_engine(model, 30, step_tokens=8)
    scores = engine.score([text, [5] * 61], [1, 1])
    assert next(scores)[0] == 1  # and a few tokens of the other
    model.load_state_dict(build(seed=9).state_dict())
    engine.forget()
    [(_, found)] = scores
    logprobs = plain_logits(model, text).log_softmax(-1)
    wanted = [float(logprobs[at - 1, text[at]]) for at in range(1, 60)]
    assert found.logprobs == pytest.approx(wanted, abs=1e-4)


def test_a_request_that_was_preempted_reused_no_more_than_its_prompt() -> None:
    engine = small_engine(build(), 8)
    number = engine.submit(Request(prompt=[1] * 4, max_tokens=60))
    for _ in range(40):
        engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    engine.step()
    assert engine.scheduler.running[0].computed == 44
    assert engine.prompt_reused(number) == 0


def test_a_graph_tells_of_a_certain_token_what_any_way_tells() -> None:
    engine = small_engine(build(), 8)
    engine._wants_graphs = True
    engine._graphs = SimpleNamespace(run=lambda *_: ([[5]], [[0.0]], None))  # type: ignore[assignment]
    request = Request(prompt=[1, 2], max_tokens=2, logprobs=0)
    _, last = engine.generate([request])
    assert (last.id, last.logprob, last.top) == (5, 0.0, {})


def test_a_model_that_trains_evaluates_until_its_last_reader_is_done() -> None:
    model = build().train()
    engine = Engine(model, "cpu")
    short, long = (engine.generate([Request(prompt=[1], max_tokens=n)]) for n in (3, 9))
    next(short), next(long)
    list(short)
    assert not model.training
    list(long)
    assert model.training


def test_a_tiny_temperature_says_the_likeliest_in_any_way_of_drawing() -> None:
    engine = small_engine(build(), 30)
    ways = [{}, {"temperature": 1e-40}, {"temperature": 1e-36}, {"temperature": 1e-40, "top_k": 50}]
    requests = [Request(prompt=[3, 4], max_tokens=8, sampling=Sampling(**way)) for way in ways]
    said = [engine.complete([request])[0].ids for request in requests]
    assert said[1:] == said[:1] * 3


def test_scores_in_half_precision_are_near_those_of_a_full_pass_in_fp32() -> None:
    if death := bf16_failure():
        pytest.skip(f"a process that computes in bf16 here {death}")
    model, rng = build(init={"std": 0.1}), random.Random(6)
    texts = [rng.choices(range(VOCABULARY), k=40) for _ in range(8)]
    engine = Engine(model, "cpu", dtype=torch.bfloat16)
    differences = []
    for place, scores in engine.score(texts, [1] * 8):
        logprobs = plain_logits(model, texts[place]).log_softmax(-1)
        for at, found in enumerate(scores.logprobs, 1):
            differences.append(abs(found - float(logprobs[at - 1, texts[place][at]])))
    assert 0 < sum(differences) / len(differences) < 2e-2
