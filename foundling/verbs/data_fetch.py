"""`foundling data fetch`, `data recipes` and `tokenizer fetch`: from the hub, ahead of time."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from foundling.config.errors import ConfigError
from foundling.verbs.base import Options, Settings, Verb, positive


def _fetch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a recipe, or hf://datasets/OWNER/NAME[@config][:split]")
    parser.add_argument("--shards", type=positive, help="only the first so many files")
    parser.add_argument("--tokens", type=positive, help="about so many tokens, and a tenth more")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="FILTER",
        help="of source code by ids: only files that pass, such as language=Python",
    )
    parser.add_argument("--workers", type=positive, default=8, help="files on their way at once")


def _fetch(options: Options, settings: Settings) -> None:
    from foundling.data.hub.ahead import fetch_ahead, fetch_blobs, plan_fetch
    from foundling.runtime.log import say

    if options.where and not _has_blobs(options.source):
        raise ConfigError(
            f"{options.source} is fetched by whole files, so --where has no effect here; give it to"
            " `data build`."
        )
    plan = plan_fetch(options.source, shards=options.shards, tokens=options.tokens)
    held = "" if plan.recipe and plan.recipe.blobs else f", about {_short(plan.tokens)} tokens"
    say(
        f"{plan.spec}: {len(plan.files):,} of {plan.of:,} files, {plan.size / 1e9:,.2f} GB{held}"
        + (f" ({plan.recipe.licence})" if plan.recipe else "")
    )
    with _progress(plan.size, plan.spec) as progress:
        folder = fetch_ahead(plan, workers=options.workers, progress=progress)
    if plan.recipe and plan.recipe.blobs:

        def told(name: str, documents: int, tokens: float) -> None:
            say(f"{name}: {documents:,} documents, about {_short(tokens)} tokens so far")

        held = f", about {_short(fetch_blobs(plan, told, tuple(options.where)))} tokens"
    say(f"fetched and checked: {len(plan.files):,} files{held} in {folder}")


def _has_blobs(spec: str) -> bool:
    from foundling.data.hub import recipe_of

    known = recipe_of(spec)
    return known is not None and known[0].blobs


def _recipes_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mixtures", action="store_true", help="published mixtures, as configs")


def _recipes(options: Options, settings: Settings) -> None:
    from foundling.data.hub.recipes import MIXTURES, RECIPES, mixture_text
    from foundling.runtime.log import say

    if options.mixtures:
        for name in MIXTURES:
            say(f"# {name}\n{mixture_text(name)}")
        return
    for recipe in RECIPES.values():
        say(f"{recipe.name:<18}{recipe.kind}  {recipe.size}")
        for line in (recipe.about, f"{recipe.uri}  ({recipe.licence})"):
            say(f"    {line}")


def _tokenizer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="hf://OWNER/NAME[#revision] of a model")
    parser.add_argument("-o", "--output", type=Path, help="folder to write (default: hub's cache)")


def _tokenizer(options: Options, settings: Settings) -> None:
    from foundling.data.hub.ahead import fetch_tokenizer
    from foundling.runtime.log import say

    folder, names = fetch_tokenizer(options.source, options.output)
    say(f"{folder}: {', '.join(names)}")


def _short(tokens: float) -> str:
    """A number as people say it."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{letter}"
    return f"{tokens:.0f}"


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

    from foundling.runtime.log import console, say

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


VERBS = {
    "data fetch": Verb(
        "download a data set ahead, checked",
        _fetch_options,
        _fetch,
        lasts="the time left is shown as files come",
    ),
    "data recipes": Verb("list data sets that have a name", _recipes_options, _recipes),
    "tokenizer fetch": Verb(
        "download a model's tokenizer",
        _tokenizer_options,
        _tokenizer,
        lasts="some megabytes, seconds on most networks",
    ),
}
