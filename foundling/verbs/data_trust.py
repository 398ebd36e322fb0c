"""`foundling data verify`, `stats` and `inspect`: whether data can be trusted, and what it is."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from foundling.config.errors import ConfigError
from foundling.verbs.base import Options, Settings, Verb, count, positive, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType


@contextmanager
def _bytes_bar(folder: Path, what: str) -> Iterator[Callable[[int], None]]:
    """A bar of bytes for a terminal; nothing elsewhere."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from foundling.config.manifest import Manifest
    from foundling.runtime.log import console

    manifest = Manifest.load(folder)
    total = sum(shard.file_bytes for shard in (*manifest.train, *manifest.val))
    screen = console(stderr=True)
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda size: bar.update(task, advance=size)


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", type=Path, help="folder of a built data set")
    parser.add_argument(
        "--source", nargs="+", default=[], metavar="SPEC", help="what it was built from, in order"
    )
    parser.add_argument("--workers", type=count, default=0, help="threads; 0: all cores")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _verify(options: Options, settings: Settings) -> None:
    from foundling.data.verify import verify

    with _bytes_bar(options.data, "hashing") as progress:
        found = verify(
            options.data,
            specs=options.source,
            workers=options.workers,
            progress=progress,
        )
    if options.json:
        print_json(found.to_json())
    else:
        for words, sentences in (
            ("checked", found.checked),
            ("not checked", found.unchecked),
            ("WRONG", found.wrong),
        ):
            for sentence in sentences:
                print(f"{words:>12}  {sentence}")
    found.refuse()


def _stats_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", type=Path, help="folder of a built data set")
    parser.add_argument(
        "--seq-len", type=count, default=2048, help="what each packing cuts and pads; 0: leave out"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _stats(options: Options, settings: Settings) -> None:
    from foundling.data.stats import describe_stats, stats

    with _bytes_bar(options.data, "counting") as progress:
        found = stats(options.data, seq_len=options.seq_len, progress=progress)
    if options.json:
        return print_json(found)
    for line in describe_stats(found):
        print(line)
    return None


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", help="folder of a built data set, or any source")
    parser.add_argument("--rows", type=positive, default=2, help="rows to show")
    parser.add_argument("--first", type=count, default=0, help="first row")
    parser.add_argument("--val", action="store_true", help="show what is held out")
    parser.add_argument("--tokenizer", type=Path, help="for a source: folder of the tokenizer")
    parser.add_argument("--seq-len", type=positive, default=256, help="train.seq_len of the run")
    parser.add_argument(
        "--packing",
        choices=("concat", "bestfit", "pad"),
        default="bestfit",
        help="data.packing of the run",
    )
    parser.add_argument("--ids", action="store_true", help="add a table with every id")


def _inspect(options: Options, settings: Settings) -> None:
    from foundling.config.manifest import MANIFEST_NAME
    from foundling.runtime.log import console

    built = (Path(options.data) / MANIFEST_NAME).exists()
    if not built and options.tokenizer is None:
        raise ConfigError(
            f"{options.data} holds no {MANIFEST_NAME}; to see what a source would become, say with"
            " which --tokenizer."
        )
    title, shown = _built(options) if built else _unbuilt(options)
    marks = "bold" if console().is_terminal else "[in brackets]"
    console().print(
        f"{title}: {marks} is what the loss counts, a bar begins a document", markup=False
    )
    for part in shown:
        console().print(part)


def _built(options: Options) -> "tuple[str, list[RenderableType]]":
    """Rows of a data set."""
    from foundling.data import TOKENIZER_FOLDER, DataSet, inspect_rows
    from foundling.runtime.log import console
    from foundling.tokenizer import Tokenizer

    folder = Path(options.data)
    if options.tokenizer is not None:
        raise ConfigError(f"{folder} has its own tokenizer; leave --tokenizer out.")
    split = "val" if options.val else "train"
    dataset = DataSet(folder, split="val" if options.val else "train")
    tokenizer = Tokenizer.load(folder / TOKENIZER_FOLDER)
    if tokenizer.fingerprint != dataset.manifest.tokenizer:
        raise ConfigError(
            f"{folder / TOKENIZER_FOLDER} is not the tokenizer of the data set; see `foundling data"
            f" verify {folder}`."
        )
    rows = dataset.units(options.seq_len, options.packing)
    if not 0 <= options.first < rows:
        raise ConfigError(
            f"--first {options.first} is outside the {rows} {split} rows of {folder}."
        )
    shown = inspect_rows(
        dataset,
        tokenizer,
        seq_len=options.seq_len,
        packing=options.packing,
        units=range(options.first, min(options.first + options.rows, rows)),
        ids=options.ids,
        colour=console().is_terminal,
    )
    return f"{folder}, {split} split", shown


def _unbuilt(options: Options) -> "tuple[str, list[RenderableType]]":
    """What rows of a source would become."""
    from foundling.data import inspect_source, open_source
    from foundling.data.rows import VAL_SHARE, is_held_out, unusable
    from foundling.runtime.log import console
    from foundling.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(options.tokenizer)
    rows = iter(open_source(options.data))
    if options.val:
        rows = (
            row
            for row in rows
            if unusable(row, row.messages is not None) is None and is_held_out(row, VAL_SHARE)
        )
    shown = inspect_source(
        rows,
        tokenizer,
        first=options.first,
        count=options.rows,
        ids=options.ids,
        colour=console().is_terminal,
    )
    parts = list(shown)
    if not parts:
        raise ConfigError(f"{options.data} has no row {options.first} to show.")
    return str(options.data), parts


VERBS = {
    "data verify": Verb(
        "hash, check and re-tokenise a data set",
        _verify_options,
        _verify,
        lasts="every byte is read once, about a second for 500 MB; then the sample",
    ),
    "data stats": Verb(
        "count what a data set holds",
        _stats_options,
        _stats,
        lasts="about a second for five million tokens",
    ),
    "data inspect": Verb(
        "show rows with ids, boundaries and loss mask", _inspect_options, _inspect
    ),
}
