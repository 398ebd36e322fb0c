"""`foundling generate`, `chat`, `convert` and `fetch`: a model at work, and from the hub."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from foundling.cli.options import (
    DEVICES,
    Options,
    Settings,
    Verb,
    above_zero,
    free_text,
    positive,
    print_json,
    refuse_given,
)
from foundling.config.errors import ConfigError

WEIGHTS = ("fp32", "bf16", "int8")


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run, RUN@STEP, or a model from elsewhere")
    parser.add_argument("prompt", nargs="+", type=free_text, help="texts to continue")
    parser.add_argument("--max-tokens", type=positive, default=100, help="longest continuation")
    parser.add_argument("--chat", action="store_true", help="prompts are a user's messages")
    parser.add_argument(
        "--stop", action="append", default=[], type=free_text, help="text that ends it (repeatable)"
    )
    _sampling_options(parser, temperature=0.8)


def _generate(options: Options, settings: Settings) -> None:
    from foundling.generate.text import TextModel
    from foundling.runtime.console import warn

    bundle = _bundle(options)
    if bundle.is_chat and not options.chat:
        warn("this run was fine-tuned to answer; --chat asks it, without it text is continued.")
    model = TextModel(bundle.model, bundle.tokenizer, bundle.context, weights=options.weights)
    how = {name: getattr(options, name) for name in SAMPLING}
    how |= {"max_tokens": options.max_tokens, "stop": options.stop}
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


def _chat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run, RUN@STEP, or a model from elsewhere")
    parser.add_argument("--system", type=free_text, help="system message")
    parser.add_argument("--max-tokens", type=positive, help="longest reply (default: what fits)")
    _sampling_options(parser, temperature=0.0)


def _chat(options: Options, settings: Settings) -> None:
    from foundling.generate.sampling import Sampling
    from foundling.serve.terminal import chat

    sampling = Sampling(**{name: getattr(options, name) for name in SAMPLING})
    limits = {"system": options.system, "max_tokens": options.max_tokens}
    chat(_bundle(options), sampling=sampling, weights=options.weights, **limits)


def _bundle(options: Options) -> Any:
    from foundling.checkpoint.bundle import load_bundle
    from foundling.runtime.device import choose_device

    return load_bundle(options.run, choose_device(options.device, "fp32").device)


def _sampling_options(parser: argparse.ArgumentParser, *, temperature: float) -> None:
    parser.add_argument("--temperature", type=float, default=temperature, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest; 0 keeps all")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep this much probability")
    parser.add_argument("--min-p", type=float, default=0.0, help="keep p >= this share of the best")
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="above 1 says less again; 1 is none"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to compute")
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="precision of the weights (default: bf16 on CUDA, else fp32)",
    )


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


MODEL_VERBS = {
    "generate": Verb(
        "continue prompts",
        _generate_options,
        _generate,
        duration_hint="the model is loaded first, 5 s to a minute by its size",
    ),
    "chat": Verb(
        "talk to a model in the terminal",
        _chat_options,
        _chat,
        duration_hint="the model is loaded first, 5 s to a minute by its size",
    ),
}


# `foundling convert`: a model from one layout into another, compared before it gets its name.

LAYOUTS = ("native", "hf", "llama", "torch", "dcp")
DTYPES = ("fp32", "bf16", "fp16")


def _convert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", help="run, RUN@STEP, Hugging Face, Meta or DCP folder, or torch.save file"
    )
    parser.add_argument("target", type=Path, help="folder (torch: file) to write; must not exist")
    parser.add_argument("--to", choices=LAYOUTS, required=True, help="layout of the result")
    parser.add_argument("--dtype", choices=DTYPES, help="precision (default: as it is stored)")
    parser.add_argument(
        "--shape", help="preset, config or model that says what a bare source does not"
    )
    parser.add_argument("--shard-gb", type=above_zero, default=5.0, help="largest shard of hf, GB")
    parser.add_argument("--push", metavar="OWNER/NAME", help="then upload it to the hub (hf only)")
    parser.add_argument("--private", action="store_true", help="make the hub's repository private")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def _convert(options: Options, settings: Settings) -> None:
    if options.push and options.to != "hf":
        raise ConfigError("--push uploads Hugging Face folders; add --to hf.")
    if options.private and not options.push:
        raise ConfigError("--private has no effect without --push.")
    from foundling.checkpoint.convert.convert import convert
    from foundling.checkpoint.convert.publish import check_name, push
    from foundling.runtime.console import say

    if options.push:
        check_name(options.push)
    tell = (lambda text: None) if options.json else say
    source, found = convert(
        options.source,
        options.target,
        options.to,
        dtype=options.dtype,
        shape=options.shape,
        shard_bytes=int(options.shard_gb * 10**9),
        name=options.push or "",
        tell=tell,
    )
    address = push(options.target, options.push, private=options.private) if options.push else None
    if options.json:
        facts = {"source": source.kind, "step": source.step, "to": options.to}
        print_json({**facts, **vars(found), "pushed": address})
        return
    for note in source.notes:
        print(note)
    of_step = f" of step {source.step}" if source.kind == "native" else ""
    print(
        f"{options.target}: {found.tensors} tensors{of_step}, each as in the source; logits on"
        f" {found.tokens} tokens of text differ by at most {found.largest:.3g} (they reach"
        f" {found.scale:.3g}; source through {found.source_through}, result through"
        f" {found.result_through})"
    )
    if address:
        print(f"uploaded to {address}")


CONVERT_VERBS = {
    "convert": Verb(
        "a model from one layout into another, compared",
        _convert_options,
        _convert,
        duration_hint="read, written, read back and compared: seconds for each gigabyte",
    ),
}


# `foundling fetch`: a data set or the tokenizer of a model, ahead of time.


def _fetch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        help="a recipe, hf://datasets/OWNER/NAME[@config][:split], or for the tokenizer of a model"
        " hf://OWNER/NAME[#revision]",
    )
    parser.add_argument("--shards", type=positive, help="only the first so many files")
    parser.add_argument("--tokens", type=positive, help="about so many tokens, and a tenth more")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="FILTER",
        help="of source code by ids: only files that pass, such as language=Python",
    )
    parser.add_argument("--workers", type=positive, help="files on their way at once (default: 8)")
    parser.add_argument(
        "-o", "--output", type=Path, help="of a tokenizer: folder to write (default: hub's cache)"
    )


def _fetch(options: Options, settings: Settings) -> None:
    from foundling.data.hub.recipes import PREFIX, parse_uri

    spec = options.source
    if spec.startswith(PREFIX) and parse_uri(spec).kind == "model":
        because = f"on {spec}, of which the tokenizer is fetched"
        refuse_given(options, ("shards", "tokens", "where", "workers"), because)
        return _fetch_tokenizer(options)
    refuse_given(options, ["output"], f"on {spec}: data stays in the hub's cache")
    return _fetch_data(options)


def _fetch_data(options: Options) -> None:
    from foundling.data.hub.opening import fetch_ahead, fetch_blobs, plan_fetch
    from foundling.report.markup import compact
    from foundling.runtime.console import say

    if options.where and not _has_blobs(options.source):
        raise ConfigError(
            f"{options.source} is fetched by whole files, so --where has no effect here; give it to"
            " `data build`."
        )
    plan = plan_fetch(options.source, shards=options.shards, tokens=options.tokens)
    held = "" if plan.recipe and plan.recipe.blobs else f", about {compact(plan.tokens)} tokens"
    say(
        f"{plan.spec}: {len(plan.files):,} of {plan.of:,} files, {plan.size / 1e9:,.2f} GB{held}"
        + (f" ({plan.recipe.licence})" if plan.recipe else "")
    )
    with _progress(plan.size, plan.spec) as progress:
        folder = fetch_ahead(plan, workers=options.workers or 8, progress=progress)
    if plan.recipe and plan.recipe.blobs:

        def report(name: str, documents: int, tokens: float) -> None:
            say(f"{name}: {documents:,} documents, about {compact(tokens)} tokens so far")

        held = f", about {compact(fetch_blobs(plan, report, tuple(options.where)))} tokens"
    say(f"fetched and checked: {len(plan.files):,} files{held} in {folder}")


def _has_blobs(spec: str) -> bool:
    from foundling.data.hub.recipes import recipe_of

    known = recipe_of(spec)
    return known is not None and known[0].blobs


def _fetch_tokenizer(options: Options) -> None:
    from foundling.data.hub.opening import fetch_tokenizer
    from foundling.runtime.console import say

    folder, names = fetch_tokenizer(options.source, options.output)
    say(f"{folder}: {', '.join(names)}")


@contextlib.contextmanager
def _progress(size: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; elsewhere a line now and then."""
    import threading
    import time

    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from foundling.runtime.console import console, say

    lock = threading.Lock()
    began = said = time.monotonic()
    arrived = 0
    shown = console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=shown, disable=not shown.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=size)

        def count(here: int) -> None:
            nonlocal arrived, said
            with lock:
                arrived += here
                bar.update(task, completed=arrived)
                now = time.monotonic()
                if not shown.is_terminal and now - said > 10 and size:
                    said = now
                    left = (now - began) * (size - arrived) / max(arrived, 1)
                    say(f"{what}: {arrived / 1e9:,.2f} of {size / 1e9:,.2f} GB, {left:,.0f} s left")

        yield count


FETCH_VERBS = {
    "fetch": Verb(
        "download a data set or a model's tokenizer ahead, checked",
        _fetch_options,
        _fetch,
        duration_hint="the time left is shown as files come",
    )
}
