"""`python -m benchmarks.generate_hf`: `bench generate` beside transformers, in one process.

Ours is timed and checked first; when its model is gone, transformers' Llama of the same shape and
precision generates as many tokens after as many prompts, by `generate` with its dynamic cache and,
where this version has it, by continuous batching. The best of transformers' ways counts. A target
that is no Llama is refused. Decoding alone is timed: a run of one new token is taken off.
"""

import importlib
import importlib.util
import statistics
import time
from typing import Any

import torch

from benchmarks.with_transformers import llama_obstacle
from foundling.bench.generate import bench_generate, describe_generate
from foundling.cli.bench import sized_config
from foundling.cli.main import main_of
from foundling.cli.options import DEVICE, Option, Options, Verb, positive, positive_ints
from foundling.config.errors import CheckpointError, ConfigError
from foundling.config.model import ModelConfig
from foundling.profiling.ceilings import measure_ceilings
from foundling.runtime.device import choose_device, synchronise


def llama(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' model of the same shape, with random weights."""
    transformers: Any = importlib.import_module("transformers")

    torch.manual_seed(1)
    shape = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_width,
        intermediate_size=config.ffn_dim,
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=8192,
    )
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = transformers.LlamaForCausalLM(shape)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval()


def time_generate(model: Any, batch: int, prompt: int, new: int, rounds: int) -> float:
    """Tokens/s of decoding by `generate`, greedy."""
    device = next(model.parameters()).device
    ids = torch.randint(model.config.vocab_size, (batch, prompt), device=device)

    def seconds(count: int) -> float:
        synchronise(device)
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count,
                min_new_tokens=count, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        synchronise(device)
        return time.perf_counter() - start

    seconds(2)
    found = [seconds(new) - seconds(1) for _ in range(rounds)]
    return batch * (new - 1) / statistics.median(found)


def time_continuous(model: Any, batch: int, prompt: int, new: int) -> float | None:
    """Tokens/s by continuous batching, prompts included; None where this version has none, or it
    does not run here."""
    transformers: Any = importlib.import_module("transformers")

    if not hasattr(model, "generate_batch"):
        return None
    prompts = torch.randint(model.config.vocab_size, (batch, prompt)).tolist()
    settings = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    try:
        start = time.perf_counter()
        model.generate_batch(inputs=prompts, generation_config=settings)
        return batch * new / (time.perf_counter() - start)
    except Exception as error:  # whatever another's code raises: it is said and not counted
        print(f"transformers' continuous batching does not run here: {error}")
        return None


OPTIONS = (
    Option("target", "preset, YAML file, or run directory: a Llama's shape"),
    Option("--batch", "requests at a time", positive_ints, "1,8"),
    Option("--prompt", "tokens of their prompts", positive, 512),
    Option("--new", "new tokens of each", positive, 128),
    Option("--weights", "precision; by default bf16 on CUDA, else fp32", ("fp32", "bf16")),
    Option("--rounds", "of which the median counts", positive, 3),
    DEVICE,
    Option("--no-continuous", "leave transformers' continuous batching out", bool),
)


def _run(options: Options) -> None:
    config = sized_config(options).model
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("this needs transformers; install benchmarks/requirements.txt.")
    if obstacle := llama_obstacle(config):
        raise ConfigError(
            f"transformers' side is a Llama, and {obstacle}; take a Llama-like target."
        )
    device = choose_device(options.device, "fp32").device
    ours = bench_generate(
        config, device, batches=options.batch, prompt=options.prompt, new=options.new,
        samplings=["greedy"], weights=options.weights, first=[], rounds=options.rounds,
        ceilings=measure_ceilings(device, quick=True),
    )  # fmt: skip
    if ours.wrong:
        raise CheckpointError(
            f"{ours.wrong} of {ours.checked} tokens are not the plain decoder's: no speed is told."
        )
    print("\n".join(describe_generate(ours)))
    model = llama(config, device, torch.bfloat16 if ours.weights == "bf16" else torch.float32)
    for timing in ours.timings:
        theirs = time_generate(model, timing.batch, options.prompt, options.new, options.rounds)
        text = f"transformers' generate {theirs:,.1f} tokens/s"
        if not options.no_continuous:
            batched = time_continuous(model, timing.batch, options.prompt, options.new)
            text += "" if batched is None else f", continuous batching {batched:,.1f}"
            theirs = max(theirs, batched or 0.0)
        ratio = timing.tokens_per_s / theirs
        print(f"batch {timing.batch}: ours {timing.tokens_per_s:,.1f}, {text}: {ratio:.2f} times")


PROGRAM = Verb(
    "tokens/s of decoding here, beside transformers in the same process",
    OPTIONS,
    _run,
    True,
    duration_hint="a minute or more for each batch size",
)

if __name__ == "__main__":
    main_of("benchmarks.generate_hf", PROGRAM)
