"""Every verb but plan, config, train and demo: what it takes and which room does the work.

They stand apart from cli.py to keep that file a page of parsing and training; each function parses
nothing and computes nothing, it hands options to a room and prints what comes back.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundling.config.errors import ConfigError, RunError

DEVICES = ("auto", "cpu", "cuda", "mps")
Settings = Mapping[str, str]
Options = argparse.Namespace


@dataclass(frozen=True)
class Verb:
    """One thing the command line can do."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Options, Settings], None]
    takes_settings: bool = False


# --- data, tokenizer -----------------------------------------------------------------------------


def _build_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="hamlet, hamlet:chat, or .txt/.jsonl/.parquet or a folder")
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder of the tokenizer")
    parser.add_argument("-o", "--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--tokens", type=positive, help="stop after this many tokens for training")
    parser.add_argument("--val-share", type=share, default=0.02, help="share of rows held out")
    parser.add_argument("--seed", type=int, default=1, help="seed of Hamlet and of the shuffle")


def _build(options: Options, settings: Settings) -> None:
    from foundling.data import build, open_source
    from foundling.runtime.log import say, warn
    from foundling.tokenizer import Tokenizer

    if options.source in ("hamlet", "hamlet:chat") and options.tokens is None:
        raise ConfigError("hamlet never ends by itself; say how much with --tokens.")
    tokenizer = Tokenizer.load(options.tokenizer)
    source = open_source(options.source, seed=options.seed, val_share=options.val_share)
    manifest = build(
        source,
        tokenizer,
        options.output,
        name=source.name,
        kind=source.kind,
        max_tokens=options.tokens,
        val_share=options.val_share,
        seed=options.seed,
    )
    held_out = sum(shard.tokens for shard in manifest.val)
    bad = manifest.recipe["result"]["quarantined"]
    if not held_out:
        warn(f"{options.output} holds nothing out, so no run on it will have a held-out score.")
    say(
        f"{options.output}: {manifest.train_tokens:,} tokens in {len(manifest.train)} shards,"
        f" {held_out:,} held out, {bad} rows in quarantine"
    )


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", type=Path, help="folder of a built data set")
    parser.add_argument("--rows", type=positive, default=2, help="rows to show")
    parser.add_argument("--first", type=int, default=0, help="first row")
    parser.add_argument("--seq-len", type=positive, default=256, help="train.seq_len of the run")
    parser.add_argument(
        "--packing",
        choices=("concat", "bestfit"),
        default="bestfit",
        help="data.packing of the run",
    )
    parser.add_argument("--ids", action="store_true", help="add a table with every id")


def _inspect(options: Options, settings: Settings) -> None:
    from foundling.data import TOKENIZER_FOLDER, DataSet, inspect_rows
    from foundling.runtime.log import console
    from foundling.tokenizer import Tokenizer

    dataset = DataSet(options.data)
    tokenizer = Tokenizer.load(options.data / TOKENIZER_FOLDER)
    rows = dataset.units(options.seq_len, options.packing)
    if not 0 <= options.first < rows:
        raise ConfigError(f"--first {options.first} is outside the {rows} rows of {options.data}.")
    shown = inspect_rows(
        dataset,
        tokenizer,
        seq_len=options.seq_len,
        packing=options.packing,
        units=range(options.first, min(options.first + options.rows, rows)),
        ids=options.ids,
        colour=console().is_terminal,
    )
    marks = "bold" if console().is_terminal else "[in brackets]"
    console().print(
        f"{options.data}, train split: {marks} is what the loss counts, a bar begins a document",
        markup=False,
    )
    for part in shown:
        console().print(part)


def _tokenizer_train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="+", help="hamlet, hamlet:chat, or files")
    parser.add_argument("-o", "--output", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--vocab-size", type=positive, default=32768, help="tokens, special ones included"
    )
    parser.add_argument("--bytes", type=positive, default=100_000_000, help="text to learn from")
    parser.add_argument("--seed", type=int, default=1, help="seed of Hamlet")


def _tokenizer_train(options: Options, settings: Settings) -> None:
    from foundling.data import training_texts
    from foundling.runtime.log import say
    from foundling.tokenizer import train_tokenizer

    if (options.output / "tokenizer.json").exists():
        raise ConfigError(f"{options.output} holds a tokenizer already; give another folder.")
    texts = training_texts(options.source, max_bytes=options.bytes, seed=options.seed)
    tokenizer = train_tokenizer(texts, options.vocab_size)
    tokenizer.save(options.output)
    mark = tokenizer.fingerprint[:12]
    say(f"{options.output}: {tokenizer.vocab_size:,} tokens, fingerprint {mark}")


def _tokenizer_inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tokenizer", type=Path, help="folder or tokenizer.json")
    parser.add_argument("text", help="what to encode")
    parser.add_argument("--chat", action="store_true", help="treat the text as a user's message")


def _tokenizer_inspect(options: Options, settings: Settings) -> None:
    from foundling.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(options.tokenizer)
    message = {"role": "user", "content": options.text}
    ids = tokenizer.prompt([message]) if options.chat else tokenizer.encode(options.text)
    for identity in ids:
        print(f"{identity:>8}  {tokenizer.piece(identity)}")
    print(f"{len(ids)} tokens, {len(options.text.encode())} bytes")


# --- eval, generate, chat, report, runs ----------------------------------------------------------


def _eval_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory, checkpoint, or RUN@STEP")
    parser.add_argument("--questions", type=count, default=500, help="size of the quiz; 0: none")
    parser.add_argument("--data", default=None, help="data set to measure on, not the run's own")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to compute")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")


def _eval(options: Options, settings: Settings) -> None:
    from foundling.checkpoint import load_bundle
    from foundling.eval import describe_scores, evaluate
    from foundling.runtime.device import choose
    from foundling.runtime.files import write_text_atomic
    from foundling.runtime.log import say

    choice = choose(options.device, "fp32")
    bundle = load_bundle(options.run, choice.device)
    scores = evaluate(
        bundle,
        device=choice.device,
        data_path=options.data,
        quiz_questions=options.questions,
        say=None if options.json else say,
    )
    # What the report shows is the whole evaluation of the run on its own data, and nothing less.
    is_whole = options.data is None and options.questions
    if is_whole and (Path(options.run) / "run.json").is_file():
        write_text_atomic(Path(options.run) / "eval.json", json.dumps(scores, indent=2) + "\n")
    if options.json:
        return print_json(scores)
    for line in describe_scores(scores):
        print(line)
    return None


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory, checkpoint, or RUN@STEP")
    parser.add_argument("prompt", nargs="+", help="texts to continue")
    parser.add_argument("--max-tokens", type=positive, default=100, help="longest continuation")
    parser.add_argument("--chat", action="store_true", help="prompts are a user's messages")
    _sampling_options(parser, temperature=0.8)


def _generate(options: Options, settings: Settings) -> None:
    from foundling.generate import answer_chats, continue_texts
    from foundling.runtime.log import warn

    bundle = _bundle(options)
    if bundle.config.train.stage == "finetune" and not options.chat:
        warn("this run was fine-tuned to answer; --chat asks it, without it text is continued.")
    limits = {"max_new_tokens": options.max_tokens, "sampling": _sampling(options)}
    if options.chat:
        chats = [[{"role": "user", "content": prompt}] for prompt in options.prompt]
        texts = answer_chats(bundle.model, bundle.tokenizer, chats, **limits)
    else:
        texts = continue_texts(bundle.model, bundle.tokenizer, options.prompt, **limits)
    for prompt, text in zip(options.prompt, texts, strict=True):
        print(text if options.chat else prompt + text)


def _chat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory, checkpoint, or RUN@STEP")
    parser.add_argument("--system", default=None, help="system message")
    _sampling_options(parser, temperature=0.0)


def _chat(options: Options, settings: Settings) -> None:
    from foundling.serve import chat

    chat(_bundle(options), sampling=_sampling(options), system=options.system)


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


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", type=Path, help="run directories")
    parser.add_argument("-o", "--output", type=Path, help="file (default: RUN/report.html)")


def _report(options: Options, settings: Settings) -> None:
    from foundling.report import write_report
    from foundling.runtime.rundir import RunDir

    print(write_report([RunDir(path).require() for path in options.run], options.output))


def _runs_list_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="where to look")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _runs_list(options: Options, settings: Settings) -> None:
    from foundling.report import list_runs

    if not options.folder.is_dir():
        raise RunError(f"{options.folder} is not a folder; give the one that holds your runs.")
    runs = list_runs(options.folder)
    if options.json:
        return print_json(runs)
    if not runs:
        print(f"no runs in {options.folder}")
    for run in runs:
        print(f"{run['status']:<10} {run['stage']:<9} step {run['step']:<8} {run['path']}")
    return None


def _runs_show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _runs_show(options: Options, settings: Settings) -> None:
    from foundling.report import describe_run, show_run
    from foundling.runtime.rundir import RunDir

    shown = show_run(RunDir(options.run).require())
    if options.json:
        return print_json(shown)
    for line in describe_run(shown):
        print(line)
    return None


def count(text: str) -> int:
    """A whole number as people write it."""
    from foundling.config.resolve import whole_number

    return whole_number(text)


def positive(text: str) -> int:
    """A whole number above zero."""
    value = count(text)
    if value < 1:
        raise ConfigError(f"{text} must be above zero.")
    return value


def listed(text: str | None) -> list[str]:
    """A list as people write it: a,b,c."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def above_zero(text: str) -> float:
    """A number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ConfigError(f"{text} is not a number above zero.")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise ConfigError(f"{text} is no share; give a number from 0 up to 1.")
    return value


def print_json(value: Any) -> None:
    """For scripts."""
    print(json.dumps(value, indent=2))


FILE_VERBS: dict[str, Verb] = {
    "tokenizer train": Verb(
        "learn a vocabulary from text", _tokenizer_train_options, _tokenizer_train
    ),
    "tokenizer inspect": Verb(
        "show how a text is cut", _tokenizer_inspect_options, _tokenizer_inspect
    ),
    "data build": Verb("turn text or chats into shards", _build_options, _build),
    "data inspect": Verb(
        "show rows with ids, boundaries and loss mask", _inspect_options, _inspect
    ),
    "eval": Verb("held-out bits per byte and the quiz", _eval_options, _eval),
    "generate": Verb("continue prompts", _generate_options, _generate),
    "chat": Verb("talk to a model in the terminal", _chat_options, _chat),
    "report": Verb("write one HTML page about runs", _report_options, _report),
    "runs list": Verb("list the runs in a folder", _runs_list_options, _runs_list),
    "runs show": Verb("show one run", _runs_show_options, _runs_show),
}
