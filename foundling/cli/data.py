"""`foundling data ...`: build, inspect and verify data sets."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundling.cli.options import (
    Options,
    Settings,
    Verb,
    check_force,
    count,
    file_options,
    listed,
    positive,
    print_json,
    refuse_given,
    share,
)
from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from foundling.config.data_manifest import Manifest
    from foundling.data.open_source import Specs
    from foundling.eval.contamination import Contamination


SCHEMAS = ("auto", "text", "messages", "sharegpt", "alpaca", "prompt-completion", "preference")
FILTERS = ("gopher-quality", "gopher-repetition", "c4-quality", "fineweb-quality", "minhash")


def _build_options(parser: argparse.ArgumentParser) -> None:
    from foundling.data.hub.recipes import RECIPE_TOKENIZER

    parser.add_argument(
        "source",
        nargs="*",
        help="hamlet, hamlet:chat, files, folders or patterns of text, JSONL, JSON, CSV, Parquet or"
        " Arrow (.gz, .zst, .xz, .bz2 too), hf://datasets/OWNER/NAME[@config][:split], or a recipe",
    )
    parser.add_argument(
        "--list",
        nargs="?",
        const="recipes",
        choices=("recipes", "mixtures"),
        help="list the recipes, or published mixtures as configs, and build nothing",
    )
    parser.add_argument(
        "--tokenizer", help=f"folder, or hf://OWNER/NAME (for a recipe: {RECIPE_TOKENIZER})"
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="folder to write (for a recipe: data/NAME)"
    )
    parser.add_argument("--tokens", type=positive, help="stop after this many tokens for training")
    parser.add_argument("--documents", type=positive, help="read only so many rows of each source")
    parser.add_argument("--val-share", type=share, default=0.02, help="share of rows held out")
    parser.add_argument("--seed", type=int, default=1, help="seed of Hamlet and of the shuffle")
    reading_options(parser)
    parser.add_argument(
        "--keep-duplicates", action="store_true", help="keep documents that came before"
    )
    parser.add_argument(
        "--decontaminate",
        nargs="+",
        default=[],
        metavar="PATH",
        help="evaluation sets: a document that shares 13 words in a row with one is left out",
    )
    parser.add_argument(
        "--filter",
        action="append",
        choices=FILTERS,
        default=[],
        help="quality filter or removal of near-duplicates by datatrove, before the build",
    )
    parser.add_argument(
        "--max-bad", type=share, default=0.05, help="share of unusable rows that stops the build"
    )
    parser.add_argument(
        "--shard-tokens", type=positive, default=100_000_000, help="tokens of a shard at most"
    )
    parser.add_argument(
        "--follow", action="store_true", help="write shards in waves, for training that follows"
    )
    parser.add_argument("--workers", type=positive, help="processes (default: one a core)")
    parser.add_argument(
        "--engine",
        choices=("local", "ray", "slurm"),
        default="local",
        help="where the work is done; ray and slurm need a folder that every machine sees",
    )


def reading_options(parser: argparse.ArgumentParser) -> None:
    """What a user may say about the rows of a source."""
    parser.add_argument("--text", default="", metavar="COLUMN", help="column of the text")
    parser.add_argument(
        "--template", default="", help=r"text built from columns, such as '{title}\n\n{body}'"
    )
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="EXPR",
        help="keep rows for which this holds: score>=3, language=en, source!=x, title~regex",
    )
    parser.add_argument("--schema", choices=SCHEMAS, default="auto", help="form of the rows")
    parser.add_argument(
        "--max-chars", type=positive, default=10_000_000, help="longer rows go to quarantine"
    )
    parser.add_argument(
        "--stream", action="store_true", help="store nothing of a remote source on the way"
    )
    parser.add_argument(
        "--allow-broken-files",
        action="store_true",
        help="use what comes before the place where a file breaks off (default: refuse the file)",
    )


def _build(options: Options, settings: Settings) -> None:
    if options.list:
        return _list(options)
    if not options.source:
        raise ConfigError("say what to build from; `foundling data build --list` names recipes.")
    from foundling.data.build.build import build_from_specs
    from foundling.runtime.console import say

    output = _output(options)
    manifest = build_from_specs(
        _specs(options),
        options.tokenizer,
        output,
        filters=options.filter,
        max_tokens=options.tokens,
        shard_tokens=options.shard_tokens,
        keep_duplicates=options.keep_duplicates,
        decontaminate=options.decontaminate,
        follow=options.follow,
        max_bad=options.max_bad,
        allow_broken_files=options.allow_broken_files,
        workers=options.workers,
        engine=options.engine,
    )
    say(_summary(output, manifest))
    return None


def _list(options: Options) -> None:
    """The data sets that have a name, or mixtures of them."""
    from foundling.data.hub.recipes import MIXTURES, RECIPES, mixture_text
    from foundling.runtime.console import say

    if options.source:
        raise ConfigError(f"--list builds nothing, so {options.source[0]} has no effect with it.")
    if options.list == "mixtures":
        for name in MIXTURES:
            say(f"# {name}\n{mixture_text(name)}")
        return
    for recipe in RECIPES.values():
        about = f"{recipe.about}\n    {recipe.uri}  ({recipe.licence})"
        say(f"{recipe.name:<18}{recipe.kind}  {recipe.size}\n    {about}")


def _output(options: Options) -> Path:
    """Where to write: -o, or a folder named after the recipe."""
    if options.output is not None:
        return Path(options.output)
    from foundling.data.hub.recipes import recipe_of

    if len(options.source) == 1 and recipe_of(options.source[0]) is not None:
        return Path("data") / str(options.source[0]).replace(":", "-").replace("@", "-")
    raise ConfigError("say where to write with -o FOLDER.")


def _specs(options: Options) -> "Specs":
    from foundling.data.open_source import Specs

    names = ("text", "template", "schema", "max_chars", "stream")
    reading = {name: getattr(options, name) for name in names}
    return Specs(
        specs=tuple(options.source),
        options={**reading, "where": tuple(options.where)},
        seed=options.seed,
        documents=options.documents,
        val_share=options.val_share,
    )


def _summary(output: Path, manifest: "Manifest") -> str:
    """One line about a finished data set."""
    held_out = sum(shard.tokens for shard in manifest.val)
    result = manifest.recipe.get("result", {})
    text = (
        f"{output}: {manifest.train_tokens:,} tokens in {len(manifest.train)} shards,"
        f" {held_out:,} held out, {result.get('quarantined', 0):,} rows in quarantine"
    )
    for counted, words in (
        ("duplicates", "duplicates dropped"),
        ("overlapping", "left out for overlap with evaluation sets"),
        ("filtered", "filtered out"),
        ("rejected", "rejected answers left out"),
        ("lost", "rows lost where files break off"),
    ):
        if result.get(counted):
            text += f", {result[counted]:,} {words}"
    return text


@contextmanager
def _bytes_bar(folder: Path, what: str) -> Iterator[Callable[[int], None]]:
    """A bar of bytes for a terminal; nothing elsewhere."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from foundling.config.data_manifest import Manifest
    from foundling.runtime.console import console

    manifest = Manifest.load(folder)
    total = sum(shard.file_bytes for shard in (*manifest.train, *manifest.val))
    screen = console(stderr=True)
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda size: bar.update(task, advance=size)


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data", type=Path, help="built data set; for --against also a file or folder of text"
    )
    parser.add_argument(
        "--source", nargs="+", metavar="SPEC", help="what it was built from, in order"
    )
    parser.add_argument("--workers", type=count, help="threads (default: all cores)")
    parser.add_argument(
        "--against", metavar="TASKS", help="look for 13 words in a row of these tasks: core,gsm8k"
    )
    parser.add_argument(
        "--tokenizer", help="--against: reads the tokens of the data set (default: the one in it)"
    )
    parser.add_argument("--bundle", help="--against: evaluation bundle of CORE, zip or folder")
    parser.add_argument("--task-data", help="--against: folder with the files of tasks")
    parser.add_argument(
        "--task-file", action="append", default=[], help="--against: Python file with your tasks"
    )
    file_options(parser, "--against: write the examples found, for `eval --contaminated`")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _verify(options: Options, settings: Settings) -> None:
    from foundling.config.data_manifest import MANIFEST_NAME
    from foundling.data.verify import verify

    check_force(options)
    tasks = _tasks_to_find(options)
    found, overlap = None, None
    if tasks is None or (options.data / MANIFEST_NAME).exists():
        with _bytes_bar(options.data, "hashing") as progress:
            found = verify(
                options.data,
                specs=options.source or (),
                workers=options.workers or 0,
                progress=progress,
            )
    else:
        because = f"on {options.data}, which is not a built data set"
        refuse_given(options, ("source", "workers", "tokenizer"), because)
    if tasks is not None and not (found and found.wrong):
        overlap = _look_for(tasks, options)
    if options.json:
        both = {"against": overlap.to_json()} if overlap else {}
        print_json({**(found.to_json() if found else {}), **both})
    else:
        kinds = (("checked", "checked"), ("unchecked", "not checked"), ("wrong", "WRONG"))
        for kind, words in kinds if found else ():
            for sentence in getattr(found, kind):
                print(f"{words:>12}  {sentence}")
        for line in overlap.lines() if overlap else ():
            print(line)
    if found:
        found.refuse()


def _tasks_to_find(options: Options) -> Any:
    """The tasks of --against; None without."""
    from foundling.runtime.files import refuse_existing
    from foundling.tasks.registry import Registry

    if options.against is None:
        theirs = "tokenizer bundle task_data task_file output"
        return refuse_given(options, theirs.split(), "without --against")
    if options.output and not options.force:
        refuse_existing(options.output)
    registry = Registry(bundle=options.bundle, folder=options.task_data)
    for path in options.task_file:
        registry.add_file(path)
    return registry.find(listed(options.against))


def _look_for(tasks: Any, options: Options) -> "Contamination":
    """Which examples of these tasks stand in the data."""
    from foundling.eval.contamination import look_for, texts_of, write_contaminated
    from foundling.runtime.console import say

    texts = texts_of(str(options.data), options.tokenizer)
    found = look_for(tasks, texts, None if options.json else say)
    if options.output:
        write_contaminated(options.output, str(options.data), found)
    return found


def _stats(options: Options) -> None:
    from foundling.data.statistics import describe_stats, stats

    refuse_given(options, ["rows", "first", "val", "tokenizer", "packing", "ids"], "with --stats")
    folder = Path(options.data)
    seq_len = 2048 if options.seq_len is None else options.seq_len
    with _bytes_bar(folder, "counting") as progress:
        found = stats(folder, seq_len=seq_len, progress=progress)
    print_json(found) if options.json else print("\n".join(describe_stats(found)))


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", help="folder of a built data set, or any source")
    parser.add_argument("--rows", type=positive, help="rows to show (default: 2)")
    parser.add_argument("--first", type=count, help="first row (default: 0)")
    parser.add_argument("--val", action="store_true", help="show what is held out")
    parser.add_argument("--tokenizer", type=Path, help="for a source: folder of the tokenizer")
    parser.add_argument(
        "--seq-len",
        type=count,
        help="train.seq_len of the run (default: 256); with --stats what each packing cuts and"
        " pads (default: 2048; 0: leave out)",
    )
    parser.add_argument(
        "--packing",
        choices=("concat", "bestfit", "pad"),
        help="data.packing of the run (default: bestfit)",
    )
    parser.add_argument("--ids", action="store_true", help="add a table with every id")
    parser.add_argument("--stats", action="store_true", help="count what a data set holds instead")
    parser.add_argument("--json", action="store_true", help="print what --stats counts as JSON")


def _inspect(options: Options, settings: Settings) -> None:
    if options.stats:
        return _stats(options)
    refuse_given(options, ["json"], "without --stats")
    if options.seq_len == 0:
        raise ConfigError("--seq-len 0 must be above zero; only --stats can leave packings out.")
    for name, default in {"rows": 2, "first": 0, "seq_len": 256, "packing": "bestfit"}.items():
        setattr(options, name, getattr(options, name) or default)
    from foundling.config.data_manifest import MANIFEST_NAME
    from foundling.runtime.console import console

    built = (Path(options.data) / MANIFEST_NAME).exists()
    if not built and options.tokenizer is None:
        from foundling.data.hub.recipes import is_remote
        from foundling.data.open_source import open_source

        if not is_remote(options.data):
            open_source(options.data)  # what is not there, or holds no rows, is refused as that
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
    return None


def _built(options: Options) -> "tuple[str, list[RenderableType]]":
    """Rows of a data set."""
    from foundling.data.dataset import TOKENIZER_FOLDER, DataSet
    from foundling.data.inspect_rows import inspect_rows
    from foundling.runtime.console import console
    from foundling.tokenizer.tokenizer import Tokenizer

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
    from foundling.data.inspect_rows import inspect_source
    from foundling.data.open_source import open_source
    from foundling.data.readers.source import VAL_SHARE, is_held_out, unusable
    from foundling.runtime.console import console
    from foundling.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(options.tokenizer)
    rows = iter(open_source(options.data))
    if options.val:
        rows = (
            row
            for row in rows
            if unusable(row, row.messages is not None) is None and is_held_out(row, VAL_SHARE)
        )
    parts = list(
        inspect_source(
            rows,
            tokenizer,
            first=options.first,
            count=options.rows,
            ids=options.ids,
            colour=console().is_terminal,
        )
    )
    if not parts:
        raise ConfigError(f"{options.data} has no row {options.first} to show.")
    return str(options.data), parts


VERBS = {
    "data build": Verb(
        "turn text or chats into shards",
        _build_options,
        _build,
        duration_hint="its speed, and the time left where the end is known, are shown every 10 s",
    ),
    "data verify": Verb(
        "hash, check and re-tokenise a data set, and look for tasks in it",
        _verify_options,
        _verify,
        duration_hint=lambda o: (
            "every byte is read once, about a second for 500 MB; then the sample"
            + (", and the text word by word, minutes for a gigabyte" if o.against else "")
        ),
    ),
    "data inspect": Verb(
        "show rows with ids, boundaries and loss mask, or count what a data set holds",
        _inspect_options,
        _inspect,
        duration_hint=lambda o: "about a second for five million tokens" if o.stats else "",
    ),
}
