"""The demo: the whole life of a small model, as a list of ordinary commands.

Each step is a command line that a reader could type, run in this process so that torch is loaded
once. A step that is done is skipped and one that was killed continues, so the demo can be stopped
anywhere and started again.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foundling.cli.options import Option, Options
from foundling.config.data_manifest import MANIFEST_NAME
from foundling.config.errors import RunError
from foundling.runtime.console import say
from foundling.runtime.files import write_text_atomic
from foundling.runtime.run_dir import LineFile, RunDir
from foundling.runtime.run_reader import final_scores, step_lines

RunVerb = Callable[[Sequence[str]], None]
OPTIONS = (
    Option("--scale", "tiny takes a minute", ("full", "tiny"), "full"),
    Option("--seed", "seed of the village and the training", int, 1),
    Option("--folder", "where (default: runs/demo-[tiny-]SEED)", Path),
    Option("--serve", "then open the page to talk to it", bool),
)


def run(options: Options, run_verb: RunVerb) -> None:
    """`foundling demo`."""
    name = f"demo-{options.seed}" if options.scale == "full" else f"demo-tiny-{options.seed}"
    folder = options.folder or Path("runs") / name
    run_demo(folder, options.scale, options.seed, run_verb)
    if options.serve:
        run_verb(["serve", str(folder / "finetune"), "--open"])


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of everything."""

    vocab_size: int = 2048
    tokenizer_bytes: int = 4_000_000
    text_tokens: int = 3_400_000
    chat_tokens: int = 290_000
    val_share: float = 0.025
    questions: int = 500
    pretrain: dict[str, str] = field(default_factory=dict)
    finetune: dict[str, str] = field(default_factory=dict)


LONGEST_REPLY = 100
"""Tokens of a reply in the conversation at the end."""
SCALES = {
    "full": Scale(),
    # Too small to learn the village; the same walk through the same rooms, for tests.
    "tiny": Scale(
        vocab_size=512,
        tokenizer_bytes=200_000,
        text_tokens=160_000,
        chat_tokens=60_000,
        val_share=0.05,
        questions=40,
        pretrain={
            "model.vocab-size": "512",
            "model.dim": "64",
            "model.layers": "2",
            "model.heads": "2",
            "model.ffn-dim": "128",
            "train.horizon": "30",
            "checkpoint.every": "10",
            "eval.every": "10",
            "log.every": "5",
        },
        finetune={"train.horizon": "10", "checkpoint.every": "5"},
    ),
}
PROMPTS = ("About", "Question: Tell me", "One morning")


@dataclass(frozen=True)
class DemoStep:
    """One command of the walk."""

    title: str
    command: list[str]
    is_done: Callable[[], bool]


def run_demo(folder: Path, scale_name: str, seed: int, run_verb: RunVerb) -> None:
    """Raise a model in `folder`, from nothing to a transcript."""
    scale = SCALES[scale_name]
    _check_folder(folder, scale_name, seed)
    started = time.monotonic()
    for step in steps(folder, scale, seed):
        if step.is_done():
            say(f"# {step.title}: done already")
            continue
        say(f"\n# {step.title}\n$ foundling {shlex.join(step.command)}")
        began = time.monotonic()
        run_verb(step.command)
        seconds = time.monotonic() - began
        with LineFile(folder / "times.jsonl") as times:
            times.append({"step": step.title, "seconds": seconds})
        say(f"# {seconds:.0f} s")
    _transcript(folder, seed)
    _summary(folder, time.monotonic() - started)


def _check_folder(folder: Path, scale: str, seed: int) -> None:
    """A folder belongs to one scale and seed: what is done there is done for those."""
    wanted = {"scale": scale, "seed": seed}
    note = folder / "demo.json"
    if note.is_file() and json.loads(note.read_text()) != wanted:
        raise RunError(f"{folder} holds a demo of another scale or seed; give another --folder.")
    write_text_atomic(note, json.dumps(wanted) + "\n")


def steps(folder: Path, scale: Scale, seed: int) -> list[DemoStep]:
    """The commands of a whole life, in order."""
    tokenizer, text, chat = folder / "tokenizer", folder / "text", folder / "chat"
    pretrain, finetune = folder / "pretrain", folder / "finetune"
    build = {"tokenizer": tokenizer, "val-share": scale.val_share, "seed": seed}
    pretraining = {
        "data.sources": json.dumps({str(text): 1}),
        "train.seed": seed,
        "eval.prompts": json.dumps(PROMPTS),
        **scale.pretrain,
    }
    finetuning = {
        "data.sources": json.dumps({str(chat): 1, str(text): 1}),
        "train.start": pretrain,
        "train.seed": seed,
        "eval.prompts": json.dumps(["Hello!"]),
        **scale.pretrain,
        **scale.finetune,
    }
    learned = {"vocab-size": scale.vocab_size, "bytes": scale.tokenizer_bytes, "seed": seed}
    questions = {"questions": scale.questions}
    return [
        DemoStep(
            "a tokenizer learns the village's words",
            _command("tokenizer train hamlet hamlet:chat", output=tokenizer, **learned),
            (tokenizer / "tokenizer.json").is_file,
        ),
        DemoStep(
            "documents become shards",
            _command("data build hamlet", output=text, tokens=scale.text_tokens, **build),
            (text / MANIFEST_NAME).is_file,
        ),
        DemoStep(
            "conversations become shards",
            _command("data build hamlet:chat", output=chat, tokens=scale.chat_tokens, **build),
            (chat / MANIFEST_NAME).is_file,
        ),
        DemoStep("the plan", _command("plan hamlet", **pretraining), lambda: _finished(pretrain)),
        DemoStep(
            "pretraining",
            _command("train hamlet", run=pretrain, nproc=1, **pretraining),
            lambda: _finished(pretrain),
        ),
        DemoStep(
            "fine-tuning",
            _command("train hamlet-chat", run=finetune, nproc=1, **finetuning),
            lambda: _finished(finetune),
        ),
        DemoStep(
            "the pretrained model's scores",
            ["eval", str(pretrain), *_command("", **questions)],
            lambda: bool(final_scores(RunDir(pretrain))),
        ),
        DemoStep(
            "the fine-tuned model's scores",
            ["eval", str(finetune), *_command("", **questions)],
            lambda: bool(final_scores(RunDir(finetune))),
        ),
        DemoStep(
            "the report",
            ["report", str(finetune), *_command("", output=folder / "report.html")],
            (folder / "report.html").is_file,
        ),
    ]


def _command(words: str, **options: object) -> list[str]:
    flags = ((f"--{name}", str(value)) for name, value in options.items())
    return [*words.split(), *(word for pair in flags for word in pair)]


def _finished(run: Path) -> bool:
    directory = RunDir(run)
    return directory.exists and directory.read_info()["status"] == "finished"


def _transcript(folder: Path, seed: int) -> None:
    """Ask the model about its village, and print its answers and the right ones."""
    from foundling.checkpoint.bundle import load_bundle
    from foundling.generate.text import TextModel
    from foundling.hamlet.quiz import questions_demo
    from foundling.hamlet.village import Village

    bundle = load_bundle(folder / "finetune")
    model = TextModel(bundle.model, bundle.tokenizer, bundle.context)
    lines: list[str] = []
    history: list[dict[str, str]] = []
    for question in questions_demo(Village(seed)):
        history = history if question.follows else []
        history.append({"role": "user", "content": question.prompt})
        reply = model.chat(history, max_tokens=LONGEST_REPLY)
        history.append({"role": "assistant", "content": reply})
        mark = "" if not question.value else "  (right)" if question.grade(reply) else "  (wrong)"
        if question.kind == "unknown":
            mark = "  (right: no such person)" if question.grade(reply) else "  (wrong)"
        lines += [f"   you  {question.prompt}", f"hamlet  {reply}{mark}", ""]
    say("\n# a conversation\n")
    say("\n".join(lines))
    (folder / "transcript.txt").write_text("\n".join(lines))


def _summary(folder: Path, seconds: float) -> None:
    base = final_scores(RunDir(folder / "pretrain"))
    quiz = final_scores(RunDir(folder / "finetune"))["quiz"]
    floor = base["full_floor_bpb"]
    above = f"{base['full_bpb'] - floor:.4f} above the floor of {floor:.4f}"
    training = sum(_training_seconds(folder / name) for name in ("pretrain", "finetune"))
    figures = {
        "held-out bits per byte, pretrained": f"{base['full_bpb']:.4f}, {above}",
        "quiz": f"{quiz['accuracy']:.1%} of {quiz['n']} right (± {quiz['stderr']:.1%})",
        "facts found in documents only": f"{quiz['documents_only']:.1%} right",
        "unknown people declined": f"{quiz['unknown_declined']:.1%}",
        "known people wrongly declined": f"{quiz['known_wrongly_declined']:.1%}",
        "seconds spent in training steps": f"{training:.0f}",
        "seconds of this command": f"{seconds:.0f}",
    }
    say("# what came of it\n")
    for label, value in figures.items():
        say(f"{label:>40}  {value}")
    # The path by which this very command was found, because .venv/bin may not be on PATH.
    program = os.path.relpath(sys.argv[0]) if sys.argv[0].endswith("/foundling") else "foundling"
    say(f"\nTalk to it:       {program} chat {folder / 'finetune'}")
    say(f"Open its page:    {program} serve {folder / 'finetune'} --open")
    say(f"Open the report:  xdg-open {folder / 'report.html'}")


def _training_seconds(run: Path) -> float:
    return float(sum(line["step_s"] for line in step_lines(RunDir(run))))
