"""Speed of the engine at a model's shape: tokens/s of decoding, time to the first token.

What is timed is what serves: the scheduler, the cache and the kernels of `generate/`, with random
weights of the model's shape and random prompts (no prefix is shared). Decoding is timed from where
every request has its first token; a step's bytes are the weights and the keys it reads, and their
share of the measured copy rate (MBU) says how far decoding is from the memory's limit. No figure is
believed before greedy tokens of the timed engine are held against a decoder without cache.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.generate.engine import Engine
from foundling.generate.prepare import Weights
from foundling.generate.request import Request
from foundling.generate.sampling import Sampling
from foundling.generate.text import open_engine
from foundling.model.transformer import Transformer
from foundling.plan.hardware import Ceilings
from foundling.plan.params import count_params
from foundling.runtime.console import table
from foundling.runtime.device import synchronise

SAMPLINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=1.0),
    "top-p": Sampling(temperature=1.0, top_p=0.9),
}
CHECKED, CHECKED_PROMPT, CHECKED_TOKENS = 8, 100, 24
"""Requests whose tokens are held against the plain decoder, and their length at most."""
NEAR = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Logits closer than this may fall either way: bf16 has 8 bits, and the orders of sums differ."""


@dataclass(frozen=True, kw_only=True)
class GenerateTiming:
    """One batch size and way of sampling."""

    batch: int
    sampling: str
    tokens_per_s: float
    """Of decoding, all requests together; the median of the rounds."""
    step_s: float
    """From one token of a request to its next."""
    mbu: float | None
    """Bytes that a step must read, over its time, as a share of the measured copy rate."""
    matmul_share: float | None
    """Operations of its matrix products, over its time, as a share of the measured rate."""


@dataclass(frozen=True, kw_only=True)
class GenerateBench:
    """What the engine reaches with one model."""

    prompt: int
    new: int
    weights: str
    first_token_s: dict[int, float]
    """By length of the prompt, alone on the device."""
    timings: list[GenerateTiming]
    checked: int
    """Tokens that were held against the plain decoder."""
    near: int
    """Of those, where the best two were nearly equal and the other one was said."""
    wrong: int
    """Of those, what the plain decoder would not say."""


def random_model(config: ModelConfig, device: torch.device) -> Transformer:
    """A model of this shape with initial weights."""
    if not config.vocab_size:
        raise ConfigError("give --model.vocab-size: a model is timed without a tokenizer.")
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device=device)
    torch.manual_seed(1)
    with torch.no_grad():  # on the device: the trainer's own values are made on the host
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            if name.endswith("mix"):
                parameter.copy_(torch.tensor([1.0, 0.0]))
    return model


def bench_generate(
    config: ModelConfig,
    device: torch.device,
    *,
    batches: Sequence[int],
    prompt: int,
    new: int,
    samplings: Sequence[str],
    weights: Weights | None,
    first: Sequence[int],
    rounds: int = 3,
    ceilings: Ceilings | None,
    compiled: bool | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> GenerateBench:
    """Time decoding of `new` tokens after prompts of `prompt` tokens, and first tokens of the
    prompts that the model has positions for."""
    last = config.max_positions or sum([prompt, new, *first])
    if prompt + new > last:
        raise ConfigError(
            f"--prompt {prompt:,} and --new {new:,} are more than the model's {last:,} positions."
        )
    first = sorted({min(length, last - 1) for length in first})
    model = random_model(config, device)
    engine = open_engine(
        model, weights=weights, compiled=compiled, max_running=max(batches),
        max_length=max(prompt + new, *(length + 1 for length in first), 0), shares=False,
    )  # fmt: skip
    rng = random.Random(0)
    checked, near, wrong = check_tokens(
        engine, config, min(prompt, CHECKED_PROMPT), rng, min(new, CHECKED_TOKENS)
    )
    tell(f"{checked} tokens checked, {wrong} wrong, {near} nearly equal")
    firsts = {length: _first_token(engine, config, length, rng, rounds) for length in first}
    size = model.head_weight.element_size() if weights != "int8" else 1
    timings = []
    for batch in batches:
        for name in samplings:
            found = sorted(
                _decode(engine, config, batch, prompt, new, SAMPLINGS[name], rng)
                for _ in range(rounds + 1)
            )
            step_s = found[len(found) // 2]
            timings.append(
                GenerateTiming(
                    batch=batch,
                    sampling=name,
                    tokens_per_s=batch / step_s,
                    step_s=step_s,
                    **_shares(config, batch, prompt + new / 2, step_s, size, ceilings, model),
                )
            )
            tell(f"batch {batch}, {name}: {batch / step_s:,.0f} tokens/s")
    return GenerateBench(
        prompt=prompt,
        new=new,
        weights=weights or ("bf16" if size == 2 else "fp32"),
        first_token_s=firsts,
        timings=timings,
        checked=checked,
        near=near,
        wrong=wrong,
    )


def _some_ids(config: ModelConfig, count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(config.vocab_size) for _ in range(count)]


def check_tokens(
    engine: Engine, config: ModelConfig, prompt: int, rng: random.Random, new: int
) -> tuple[int, int, int]:
    """(tokens compared, nearly equal, wrong) of greedy decoding against the model without cache."""
    requests = [
        Request(prompt=_some_ids(config, rng.randint(1, prompt), rng), max_tokens=new)
        for _ in range(CHECKED)
    ]
    said = engine.complete(requests)
    compared = near = wrong = 0
    tie = NEAR.get(engine.model.head_weight.dtype, NEAR[torch.float32])
    for request, completion in zip(requests, said, strict=True):
        text = torch.tensor([[*request.prompt, *completion.ids]], device=engine.device)
        with torch.inference_mode():
            logits = engine.model(text)[0, len(request.prompt) - 1 : -1].float()
        chosen = logits.gather(1, text[0, len(request.prompt) :, None])[:, 0]
        gaps = logits.amax(-1) - chosen
        compared += len(gaps)
        near += int(((gaps > 0) & (gaps <= tie)).sum())
        wrong += int((gaps > tie).sum())
    return compared, near, wrong


def _first_token(
    engine: Engine, config: ModelConfig, length: int, rng: random.Random, rounds: int
) -> float:
    """Seconds from a prompt to its first token, as the only request."""
    found = []
    for _ in range(rounds + 2):  # the first compile
        request = Request(prompt=_some_ids(config, length, rng), max_tokens=1)
        synchronise(engine.device)
        start = time.perf_counter()
        engine.complete([request])
        found.append(time.perf_counter() - start)
    return sorted(found[2:])[rounds // 2]


def _decode(
    engine: Engine, config: ModelConfig, batch: int, prompt: int, new: int,
    sampling: Sampling, rng: random.Random,
) -> float:  # fmt: skip
    """Seconds of a step of decoding, from where every request has its first token."""
    for _ in range(batch):
        engine.submit(
            Request(prompt=_some_ids(config, prompt, rng), max_tokens=new, sampling=sampling)
        )
    said = 0
    while engine.scheduler.waiting or said < batch:
        said += len(engine.step())
    said = 0
    synchronise(engine.device)
    start = time.perf_counter()
    while len(engine.scheduler.running) == batch:
        said += len(engine.step())
    synchronise(engine.device)
    seconds = time.perf_counter() - start
    while engine.has_work:
        engine.step()
    if not said:
        raise ConfigError(
            f"--new {new} is too few for {batch} requests: the first has said all before the last"
            " has begun, and there is no step to time; give more, or a smaller --batch."
        )
    return seconds * batch / said


def _shares(
    config: ModelConfig, batch: int, context: float, step_s: float, weight_bytes: int,
    ceilings: Ceilings | None, model: Transformer,
) -> dict[str, float | None]:  # fmt: skip
    if ceilings is None:
        return {"mbu": None, "matmul_share": None}
    products = count_params(config).matrices_and_head
    windows = [config.window_of(layer) for layer in range(config.layers)]
    seen = sum(min(context, window) if window else context for window in windows)
    kv_bytes = 2 * config.num_kv_heads * config.head_width * model.head_weight.element_size()
    moved = products * weight_bytes + batch * seen * kv_bytes
    dtype = "bf16" if model.head_weight.dtype == torch.bfloat16 else "fp32"
    rates = [rate.flops_per_s for rate in ceilings.matmul if rate.dtype == dtype]
    return {
        "mbu": moved / step_s / ceilings.copy_bytes_per_s,
        "matmul_share": 2 * products * batch / step_s / max(rates) if rates else None,
    }


def describe_generate(found: GenerateBench) -> list[str]:
    """The table, and what it rests on."""
    rows = [["batch", "sampling", "tokens/s", "ms a step", "of memory", "of products"]]
    rows += [
        [
            str(one.batch),
            one.sampling,
            f"{one.tokens_per_s:,.1f}",
            f"{1e3 * one.step_s:.2f}",
            "" if one.mbu is None else f"{one.mbu:.0%}",
            "" if one.matmul_share is None else f"{one.matmul_share:.0%}",
        ]
        for one in found.timings
    ]
    firsts = ", ".join(f"{n:,}: {1e3 * s:.1f} ms" for n, s in found.first_token_s.items())
    return [
        *table(rows),
        f"prompts of {found.prompt:,} tokens, {found.new:,} new ones; weights in {found.weights}",
        f"first token after a prompt of {firsts}",
        f"{found.checked} greedy tokens beside a decoder without cache: {found.wrong} wrong,"
        f" {found.near} where the best two were nearly equal",
    ]
