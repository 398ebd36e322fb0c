"""`foundling generate`, `chat`: what can be done with a trained model."""

import argparse
from typing import Any

from foundling.verbs.base import DEVICES, Options, Settings, Verb, free_text, positive


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run, RUN@STEP, or a model from elsewhere")
    parser.add_argument("prompt", nargs="+", type=free_text, help="texts to continue")
    parser.add_argument("--max-tokens", type=positive, default=100, help="longest continuation")
    parser.add_argument("--chat", action="store_true", help="prompts are a user's messages")
    _sampling_options(parser, temperature=0.8)


def _generate(options: Options, settings: Settings) -> None:
    from foundling.generate import answer_chats, continue_texts
    from foundling.runtime.log import warn

    bundle = _bundle(options)
    if bundle.config.train.stage == "finetune" and not options.chat:
        warn("this run was fine-tuned to answer; --chat asks it, without it text is continued.")
    limits = {
        "max_new_tokens": options.max_tokens,
        "sampling": _sampling(options),
        "context": bundle.context,
    }
    if options.chat:
        chats = [[{"role": "user", "content": prompt}] for prompt in options.prompt]
        texts = answer_chats(bundle.model, bundle.tokenizer, chats, **limits)
    else:
        texts = continue_texts(bundle.model, bundle.tokenizer, options.prompt, **limits)
    for prompt, text in zip(options.prompt, texts, strict=True):
        print(text if options.chat else prompt + text)


def _chat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run, RUN@STEP, or a model from elsewhere")
    parser.add_argument("--system", type=free_text, help="system message")
    parser.add_argument("--max-tokens", type=positive, help="longest reply (default: what fits)")
    _sampling_options(parser, temperature=0.0)


def _chat(options: Options, settings: Settings) -> None:
    from foundling.serve import chat

    limits = {"system": options.system, "max_tokens": options.max_tokens}
    chat(_bundle(options), sampling=_sampling(options), **limits)


def _bundle(options: Options) -> Any:
    from foundling.checkpoint import load_bundle
    from foundling.runtime.device import choose

    return load_bundle(options.run, choose(options.device, "fp32").device)


def _sampling_options(parser: argparse.ArgumentParser, *, temperature: float) -> None:
    parser.add_argument("--temperature", type=float, default=temperature, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest; 0 keeps all")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep this much probability")
    parser.add_argument("--min-p", type=float, default=0.0, help="keep p >= this share of the best")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to compute")


def _sampling(options: Options) -> Any:
    from foundling.generate import Sampling

    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    return Sampling(**{name: getattr(options, name) for name in names})


VERBS = {
    "generate": Verb(
        "continue prompts",
        _generate_options,
        _generate,
        lasts="the model is loaded first, 5 s to a minute by its size",
    ),
    "chat": Verb(
        "talk to a model in the terminal",
        _chat_options,
        _chat,
        lasts="the model is loaded first, 5 s to a minute by its size",
    ),
}
