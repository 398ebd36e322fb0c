"""`foundling data ...` and `fetch`: build, inspect, verify and download data sets."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundling.cli.options import (
    FORCE,
    JSON,
    TASK_FILES,
    Option,
    Options,
    Verb,
    bytes_bar,
    comma_list,
    count,
    fraction,
    free_text,
    output_option,
    positive,
    print_json,
    print_lines,
    refuse_given,
)
from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from foundling.config.data_manifest import Manifest
    from foundling.data.readers.source import ReadOptions
    from foundling.eval.contamination import Contamination


_SCHEMAS = ("auto", "text", "messages", "sharegpt", "alpaca", "prompt-completion", "preference")
_FILTERS = ("gopher-quality", "gopher-repetition", "c4-quality", "fineweb-quality", "minhash")
READING = (
    Option("--text", "column of the text", free_text, "", metavar="COLUMN"),
    Option("--schema", "form of the rows", _SCHEMAS, "auto"),
    Option(
        "--where",
        "keep rows for which this holds: score>=3, language=en, source!=x, title~regex",
        nargs="append",
        metavar="EXPR",
    ),
    Option("--template", r"text built from columns, such as '{title}\n\n{body}'", free_text, ""),
    Option("--max-chars", "longer rows go to quarantine", positive, "10M"),
    Option("--stream", "store nothing of a remote source on the way", bool),
    Option("--allow-broken-files", "use a file up to where it breaks off, if it does", bool),
)
"""What a user may say about the rows of a source."""
_BUILD_OPTIONS = (
    Option(
        "source",
        "hamlet, hamlet:chat, files, folders or patterns of text, JSONL, JSON, CSV, Parquet or"
        " Arrow (.gz, .zst, .xz, .bz2 too), hf://datasets/OWNER/NAME[@config][:split], or a recipe",
        nargs="*",
    ),
    output_option("folder to write (for a recipe: data/NAME)", metavar="DIR"),
    Option("--tokenizer", "folder, or hf://OWNER/NAME (for a recipe: GPT-2's)"),
    Option("--tokens", "stop after this many tokens for training", positive),
    Option("--documents", "read only so many rows of each source", positive),
    Option("--val-share", "share of rows held out", fraction, 0.02),
    Option("--seed", "seed of Hamlet and of the shuffle", int, 1),
    *READING,
    Option("--filter", "quality filter of datatrove, before the build", _FILTERS, nargs="append"),
    Option("--keep-duplicates", "keep documents that came before", bool),
    Option(
        "--decontaminate",
        "evaluation sets: a document that shares 13 words in a row with one is left out",
        nargs="+",
        metavar="PATH",
    ),
    Option("--max-bad", "share of unusable rows that stops the build", fraction, 0.05),
    Option("--shard-tokens", "tokens of a shard at most", positive, "100M"),
    Option("--workers", "processes (default: one a core)", positive),
    Option(
        "--engine",
        "where the work is done; ray and slurm need a folder that every machine sees",
        ("local", "ray", "slurm"),
        "local",
    ),
    Option("--follow", "write shards in waves, for training that follows", bool),
    Option(
        "--list",
        "list the recipes or published mixtures, and build nothing",
        ("recipes", "mixtures"),
        nargs="?",
        metavar="WHAT",
        only_with=(),
    ),
)


def _build(options: Options) -> None:
    if options.list:
        return _list(options.list)
    if not options.source:
        raise ConfigError("say what to build from; `foundling data build --list` names recipes.")
    from foundling.data.build.build import build_from_specs
    from foundling.data.open_source import Specs
    from foundling.runtime.console import say

    folder = _folder(options)
    names = ("text", "template", "schema", "max_chars", "stream")
    reading = {name: getattr(options, name) for name in names}
    manifest = build_from_specs(
        Specs(
            specs=tuple(options.source),
            options={**reading, "where": tuple(options.where)},
            seed=options.seed,
            documents=options.documents,
            val_share=options.val_share,
        ),
        options.tokenizer,
        folder,
        filters=options.filter,
        max_tokens=options.tokens,
        shard_tokens=options.shard_tokens,
        keep_duplicates=options.keep_duplicates,
        decontaminate=options.decontaminate or [],
        follow=options.follow,
        max_bad=options.max_bad,
        allow_broken_files=options.allow_broken_files,
        workers=options.workers,
        engine=options.engine,
    )
    return say(_summary(folder, manifest))


def _list(what: str) -> None:
    """The data sets that have a name, or mixtures of them."""
    from foundling.data.hub.recipes import MIXTURES, RECIPES, mixture_text
    from foundling.runtime.console import say

    if what == "mixtures":
        for name in MIXTURES:
            say(f"# {name}\n{mixture_text(name)}")
        return
    for recipe in RECIPES.values():
        about = f"{recipe.about}\n    {recipe.uri}  ({recipe.licence})"
        say(f"{recipe.name:<18}{recipe.kind}  {recipe.size}\n    {about}")


def _folder(options: Options) -> Path:
    """Where to write: -o, or a folder named after the recipe."""
    if options.output is not None:
        return Path(options.output)
    from foundling.data.hub.recipes import recipe_of

    if len(options.source) == 1 and recipe_of(options.source[0]) is not None:
        return Path("data") / str(options.source[0]).replace(":", "-").replace("@", "-")
    raise ConfigError("say where to write with -o FOLDER.")


def read_options(options: Options) -> "ReadOptions":
    """The options of `READING`."""
    from foundling.data.readers.source import ReadOptions

    return ReadOptions(**{**options.fields_of(ReadOptions), "where": tuple(options.where)})


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


def _bytes_of(folder: Path) -> int:
    from foundling.config.data_manifest import Manifest

    manifest = Manifest.load(folder)
    return sum(shard.file_bytes for shard in (*manifest.train, *manifest.val))


_VERIFY_OPTIONS = (
    Option("data", "built data set; for --against also a file or folder of text", Path),
    Option("--source", "what it was built from, in order", nargs="+", metavar="SPEC"),
    Option("--workers", "threads (default: all cores)", count),
    JSON,
    Option("--against", "look for 13 words in a row of these tasks: core,gsm8k", comma_list),
    Option("--tokenizer", "reads the data set (default: the one in it)", requires="against"),
    *(replace(option, requires="against") for option in TASK_FILES),
    output_option("write what was found, for `eval --contaminated`", requires="against"),
    FORCE,
)


def _verify(options: Options) -> None:
    from foundling.config.data_manifest import MANIFEST_NAME
    from foundling.data.verify import verify

    tasks = _tasks_to_find(options)
    found, overlap = None, None
    if tasks is None or (options.data / MANIFEST_NAME).exists():
        with bytes_bar(_bytes_of(options.data), "hashing") as progress:
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
        overlap = _find_overlap(tasks, options)
    if options.json:
        both = {"against": overlap.to_json()} if overlap else {}
        print_json({**(found.to_json() if found else {}), **both})
    else:
        kinds = (("checked", "checked"), ("unchecked", "not checked"), ("wrong", "WRONG"))
        for kind, words in kinds if found else ():
            for sentence in getattr(found, kind):
                print(f"{words:>12}  {sentence}")
        print_lines(overlap.lines() if overlap else ())
    if found:
        found.refuse()


def _tasks_to_find(options: Options) -> Any:
    """The tasks of --against; None without."""
    from foundling.runtime.files import refuse_existing
    from foundling.tasks.registry import Registry

    if options.against is None:
        return None
    if options.output and not options.force:
        refuse_existing(options.output)
    registry = Registry(bundle=options.bundle, folder=options.task_data)
    for path in options.task_file:
        registry.add_file(path)
    return registry.find(options.against)


def _find_overlap(tasks: Any, options: Options) -> "Contamination":
    """Which examples of these tasks stand in the data."""
    from foundling.eval.contamination import look_for, texts_of, write_contaminated
    from foundling.runtime.console import say

    texts = texts_of(str(options.data), options.tokenizer)
    found = look_for(tasks, texts, None if options.json else say)
    if options.output:
        write_contaminated(options.output, str(options.data), found)
    return found


_INSPECT_OPTIONS = (
    Option("data", "folder of a built data set, or any source"),
    Option("--rows", "rows to show", positive, 2),
    Option("--first", "first row", count, 0),
    Option("--val", "show what is held out", bool),
    Option("--tokenizer", "for a source: folder of the tokenizer", Path),
    Option(
        "--seq-len",
        "train.seq_len of the run (default: 256); with --stats what each packing cuts and pads"
        " (default: 2048; 0: leave out)",
        count,
    ),
    Option("--packing", "data.packing of the run", ("concat", "bestfit", "pad"), "bestfit"),
    Option("--ids", "add a table with every id", bool),
    Option("--stats", "count what a data set holds instead", bool, only_with=("seq_len",)),
    Option("--json", "print as JSON", bool, requires="stats"),
)


def _stats(options: Options) -> None:
    from foundling.data.statistics import describe_stats, stats

    folder = Path(options.data)
    seq_len = 2048 if options.seq_len is None else options.seq_len
    with bytes_bar(_bytes_of(folder), "counting") as progress:
        found = stats(folder, seq_len=seq_len, progress=progress)
    print_json(found) if options.json else print_lines(describe_stats(found))


def _inspect(options: Options) -> None:
    if options.stats:
        return _stats(options)
    if options.seq_len == 0:
        raise ConfigError("--seq-len 0 must be above zero; only --stats can leave packings out.")
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
    title, shown = (_rows_of_data_set if built else _rows_of_source)(options)
    marks = "bold" if console().is_terminal else "[in brackets]"
    console().print(
        f"{title}: {marks} is what the loss counts, a bar begins a document", markup=False
    )
    for part in shown:
        console().print(part)
    return None


def _rows_of_data_set(options: Options) -> "tuple[str, list[RenderableType]]":
    """Rows of a data set."""
    from foundling.data.dataset import TOKENIZER_FOLDER, DataSet
    from foundling.data.inspect_rows import inspect_rows
    from foundling.data.shard import own_tokenizer
    from foundling.runtime.console import console

    folder = Path(options.data)
    if options.tokenizer is not None:
        raise ConfigError(f"{folder} has its own tokenizer; leave --tokenizer out.")
    dataset = DataSet(folder, split="val" if options.val else "train")
    shown = inspect_rows(
        dataset,
        own_tokenizer(folder / TOKENIZER_FOLDER, dataset.manifest),
        seq_len=options.seq_len or 256,
        packing=options.packing,
        first=options.first,
        count=options.rows,
        ids=options.ids,
        colour=console().is_terminal,
    )
    return f"{folder}, {dataset.split} split", shown


def _rows_of_source(options: Options) -> "tuple[str, list[RenderableType]]":
    """What rows of a source would become."""
    from foundling.data.inspect_rows import inspect_source
    from foundling.data.open_source import open_source
    from foundling.runtime.console import console
    from foundling.tokenizer.tokenizer import Tokenizer

    because = f"on {options.data}, which is not a built data set and so not packed"
    refuse_given(options, ("seq_len", "packing"), because)
    parts = list(
        inspect_source(
            open_source(options.data),
            Tokenizer.load(options.tokenizer),
            first=options.first,
            count=options.rows,
            only_held_out=options.val,
            ids=options.ids,
            colour=console().is_terminal,
        )
    )
    if not parts:
        raise ConfigError(f"{options.data} has no row {options.first} to show.")
    return str(options.data), parts


_FETCH_OPTIONS = (
    Option(
        "source",
        "a recipe, hf://datasets/OWNER/NAME[@config][:split], or for the tokenizer of a model"
        " hf://OWNER/NAME[#revision]",
    ),
    Option("--shards", "only the first so many files", positive),
    Option("--tokens", "about so many tokens, and a tenth more", positive),
    Option(
        "--where",
        "of source code by ids: only files that pass, such as language=Python",
        nargs="append",
        metavar="FILTER",
    ),
    Option("--workers", "files on their way at once", positive, 8),
    output_option("of a tokenizer: folder to write (default: hub's cache)", metavar="DIR"),
)


def _fetch(options: Options) -> None:
    from foundling.data.hub.opening import fetch_tokenizer
    from foundling.data.hub.recipes import PREFIX, parse_uri
    from foundling.runtime.console import say

    spec = options.source
    if spec.startswith(PREFIX) and parse_uri(spec).kind == "model":
        because = f"on {spec}, of which the tokenizer is fetched"
        refuse_given(options, ("shards", "tokens", "where", "workers"), because)
        folder, names = fetch_tokenizer(options.source, options.output)
        return say(f"{folder}: {', '.join(names)}")
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
    with bytes_bar(plan.size, plan.spec) as progress:
        folder = fetch_ahead(plan, workers=options.workers, progress=progress)
    if plan.recipe and plan.recipe.blobs:

        def report(name: str, documents: int, tokens: float) -> None:
            say(f"{name}: {documents:,} documents, about {compact(tokens)} tokens so far")

        held = f", about {compact(fetch_blobs(plan, report, tuple(options.where)))} tokens"
    say(f"fetched and checked: {len(plan.files):,} files{held} in {folder}")


def _has_blobs(spec: str) -> bool:
    from foundling.data.hub.recipes import recipe_of

    known = recipe_of(spec)
    return known is not None and known[0].blobs


VERBS = {
    "data build": Verb(
        "turn text or chats into shards",
        _BUILD_OPTIONS,
        _build,
        duration_hint="its speed, and the time left where the end is known, are shown every 10 s",
    ),
    "data verify": Verb(
        "hash, check and re-tokenise a data set, and look for tasks in it",
        _VERIFY_OPTIONS,
        _verify,
        duration_hint=lambda o: (
            "every byte is read once, about a second for 500 MB; then the sample"
            + (", and the text word by word, minutes for a gigabyte" if o.against else "")
        ),
    ),
    "data inspect": Verb(
        "show rows with ids, boundaries and loss mask, or count what a data set holds",
        _INSPECT_OPTIONS,
        _inspect,
        duration_hint=lambda o: "about a second for five million tokens" if o.stats else "",
    ),
    "fetch": Verb(
        "download a data set or a model's tokenizer ahead, checked",
        _FETCH_OPTIONS,
        _fetch,
        duration_hint="the time left is shown as files come",
    ),
}
