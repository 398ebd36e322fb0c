"""`foundling generate`, `chat`, `serve` and `convert`: a model at work, or in another layout."""

import threading
import webbrowser
from pathlib import Path
from typing import Any

from foundling.cli.options import (
    DEVICE,
    JSON,
    MODEL,
    WEIGHTS,
    Option,
    Options,
    Verb,
    free_text,
    positive,
    positive_float,
    print_json,
)
from foundling.config.errors import ConfigError

SAMPLING = (
    Option("--top-k", "keep the k likeliest; 0 keeps all", int, 0),
    Option("--top-p", "keep this much probability", float, 1.0),
    Option("--min-p", "keep p >= this share of the best", float, 0.0),
    Option("--repetition-penalty", "above 1 says less again; 1 is none", float, 1.0),
    Option("--seed", "seed of the sampling", int, 0),
)
_LOADING = "the model is loaded first, 5 s to a minute by its size"
_GENERATE_OPTIONS = (
    MODEL,
    Option("prompt", "texts to continue", free_text, nargs="+"),
    Option("--max-tokens", "longest continuation", positive, 100),
    Option("--chat", "prompts are a user's messages", bool),
    Option("--stop", "text that ends it (repeatable)", free_text, nargs="append"),
    Option("--temperature", "0 is greedy", float, 0.8),
    *SAMPLING,
    DEVICE,
    WEIGHTS,
)


def _generate(options: Options) -> None:
    from foundling.generate.text import TextModel
    from foundling.runtime.console import warn

    bundle = _bundle(options)
    if bundle.is_chat and not options.chat:
        warn("this run was fine-tuned to answer; --chat asks it, without it text is continued.")
    model = TextModel(bundle.model, bundle.tokenizer, bundle.context, weights=options.weights)
    how = {**_sampling(options), "max_tokens": options.max_tokens, "stop": options.stop}
    if len(options.prompt) == 1:
        [prompt] = options.prompt
        asked = [{"role": "user", "content": prompt}] if options.chat else prompt
        print("" if options.chat else prompt, end="", flush=True)
        for text in model.stream(asked, **how):
            print(text, end="", flush=True)
        print()
    elif options.chat:
        for prompt in options.prompt:
            print(model.chat(prompt, **how))
    else:
        for prompt, text in zip(options.prompt, model.generate(options.prompt, **how), strict=True):
            print(prompt + text)


_CHAT_OPTIONS = (
    MODEL,
    Option("--system", "system message", free_text),
    Option("--max-tokens", "longest reply (default: what fits)", positive),
    Option("--temperature", "0 is greedy", float, 0.0),
    *SAMPLING,
    DEVICE,
    WEIGHTS,
)


def _chat(options: Options) -> None:
    from foundling.generate.sampling import Sampling
    from foundling.serve.terminal import chat

    chat(
        _bundle(options),
        sampling=Sampling(**_sampling(options)),
        weights=options.weights,
        system=options.system,
        max_tokens=options.max_tokens,
    )


def _bundle(options: Options) -> Any:
    from foundling.checkpoint.bundle import load_bundle
    from foundling.runtime.device import choose_device

    return load_bundle(options.model, choose_device(options.device, "fp32").device)


def _sampling(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("temperature", *(o.key for o in SAMPLING))}


# `foundling serve`: models behind OpenAI's API, and a page to talk to them.

_MOST_MODELS = 2
_SERVE_OPTIONS = (
    Option("source", "run, RUN@STEP, or a model from elsewhere; two at most", nargs="+"),
    Option("--open", "open the page in a browser", bool),
    Option("--port", "0 takes a free one", int, 8000),
    Option("--host", "address to listen at", default="127.0.0.1"),
    Option("--follow", "take each newer checkpoint of a run", bool),
    DEVICE,
    WEIGHTS,
    Option("--cache-gb", "keys and values (default: what is free)", positive_float),
    Option("--max-length", "tokens of prompt and answer (default: as trained)", positive),
    Option("--max-running", "answers written at a time (default: 64, on CUDA 256)", positive),
    Option("--max-waiting", "answers on their way; more get 429", positive, 256),
    Option("--timeout", "seconds that an answer may take", positive_float, 600.0),
    Option("--max-body-mb", "largest body of a request, MB", positive_float, 4.0),
    Option(
        "--api-keys",
        "keys, one a line (or FOUNDLING_API_KEYS); without, none is asked for",
        Path,
        metavar="FILE",
    ),
    Option("--allow-host", "a name that the server is reached by", nargs="append", metavar="NAME"),
    Option("--allow-origin", "pages of this origin may ask (CORS)", nargs="append", metavar="URL"),
    Option("--log-prompts", "print what is asked", bool),
    Option("--quiet", "no line for each request", bool),
)


def _serve(options: Options) -> None:
    if len(options.source) > _MOST_MODELS:
        raise ConfigError(
            f"{len(options.source)} models are given; {_MOST_MODELS} are served at most."
        )
    if not 0 <= options.port < 1 << 16:
        raise ConfigError(f"--port {options.port} is none; give one from 0 to 65,535.")
    for origin in options.allow_origin:
        if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
            raise ConfigError(f"--allow-origin {origin} is no origin, such as https://example.org.")
    try:
        from foundling.serve.server import ServeOptions, read_keys, serve
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}; install it with pip.") from None
    from foundling.runtime.device import choose_device
    from foundling.serve.access import Admission, Limits
    from foundling.serve.served_model import EngineLimits

    engine = EngineLimits(
        device=choose_device(options.device, "fp32").device,
        weights=options.weights,
        cache_bytes=round((options.cache_gb or 0) * 1e9),
        max_running=options.max_running or 0,
        max_length=options.max_length or 0,
    )
    hosts = frozenset(name.lower() for name in (*options.allow_host, options.host))
    admission = Admission(
        keys=read_keys(options.api_keys), hosts=hosts, origins=frozenset(options.allow_origin)
    )
    limits = Limits(
        body_bytes=round(options.max_body_mb * 1e6),
        answer_s=options.timeout,
        sequences=options.max_waiting,
    )
    serve(
        options.source,
        ServeOptions(
            engine=engine,
            host=options.host,
            port=options.port,
            follow=options.follow,
            admission=admission,
            limits=limits,
            logs=not options.quiet,
            logs_prompts=options.log_prompts,
            when_ready=lambda address: _ready(address, opens=options.open),
        ),
    )


def _ready(address: str, *, opens: bool) -> None:
    print(
        f"open {address} in a browser, or point a client at {address}/v1; Ctrl-C ends", flush=True
    )
    if opens:
        # It may wait for the browser, and the server's loop must not.
        threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()


# `foundling convert`: a model from one layout into another, compared before it gets its name.

_LAYOUTS = ("native", "hf", "llama", "torch", "dcp")
_CONVERT_OPTIONS = (
    Option("source", "run, RUN@STEP, Hugging Face, Meta or DCP folder, or torch.save file"),
    Option("output", "folder (torch: file) to write; must not exist", Path),
    Option("--to", "layout of the result", _LAYOUTS, required=True, metavar="LAYOUT"),
    Option("--dtype", "precision; by default as it is stored", ("fp32", "bf16", "fp16")),
    Option("--shape", "preset, config or model that says what a bare source does not"),
    Option("--shard-gb", "largest shard of hf, GB", positive_float, 5.0),
    Option("--push", "then upload it to the hub (hf only)", metavar="OWNER/NAME"),
    Option("--private", "make the hub's repository private", bool, requires="push"),
    JSON,
)


def _convert(options: Options) -> None:
    if options.push and options.to != "hf":
        raise ConfigError("--push uploads Hugging Face folders; add --to hf.")
    from foundling.checkpoint.convert.convert import convert
    from foundling.checkpoint.convert.publish import check_name, push
    from foundling.runtime.console import say

    if options.push:
        check_name(options.push)
    tell = (lambda text: None) if options.json else say
    source, found = convert(
        options.source,
        options.output,
        options.to,
        dtype=options.dtype,
        shape=options.shape,
        shard_bytes=int(options.shard_gb * 10**9),
        name=options.push or "",
        tell=tell,
    )
    address = push(options.output, options.push, private=options.private) if options.push else None
    if options.json:
        facts = {"source": source.kind, "step": source.step, "to": options.to}
        print_json({**facts, **vars(found), "pushed": address})
        return
    for note in source.notes:
        print(note)
    of_step = f" of step {source.step}" if source.kind == "native" else ""
    print(
        f"{options.output}: {found.tensors} tensors{of_step}, each as in the source; logits on"
        f" {found.tokens} tokens of text differ by at most {found.largest:.3g} (they reach"
        f" {found.scale:.3g}; source through {found.source_through}, result through"
        f" {found.result_through})"
    )
    if address:
        print(f"uploaded to {address}")


VERBS = {
    "generate": Verb("continue prompts", _GENERATE_OPTIONS, _generate, duration_hint=_LOADING),
    "chat": Verb("talk to a model in the terminal", _CHAT_OPTIONS, _chat, duration_hint=_LOADING),
    "serve": Verb(
        "answer over HTTP as OpenAI's API does, with a page",
        _SERVE_OPTIONS,
        _serve,
        duration_hint=_LOADING,
    ),
    "convert": Verb(
        "a model from one layout into another, compared",
        _CONVERT_OPTIONS,
        _convert,
        duration_hint="read, written, read back and compared: seconds for each gigabyte",
    ),
}
