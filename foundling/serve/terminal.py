"""Chat in a terminal: streaming, history within the context, Ctrl-C that stops a reply."""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from foundling.checkpoint.bundle import Bundle
from foundling.generate.engine import Engine
from foundling.generate.sampling import Sampling
from foundling.serve.detokenize import TextStream
from foundling.tasks.base import ChatMessage

# The conversation so far, kept within the length that the model was trained for.
#
# Past that length a model has never seen its positions and its answers rot without a sign, so the
# oldest exchanges are dropped and the user is told. Rejected: cutting tokens off the front (a turn
# that begins in the middle is text the model has never seen either).


class Prompter(Protocol):
    """What is needed of a tokenizer."""

    def prompt(self, messages: Sequence[ChatMessage]) -> list[int]: ...


class ChatHistory:
    """An optional system message and alternating turns."""

    def __init__(
        self,
        tokenizer: Prompter,
        window: int,
        system: str | None = None,
        *,
        longest: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._window = window
        self._longest = window if longest is None else longest
        self._system: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
        self._turns: list[ChatMessage] = []
        self.reserve = min(64, window // 4)
        """Tokens kept free for a reply."""

    @property
    def messages(self) -> list[ChatMessage]:
        """Everything the model is going to read."""
        return [*self._system, *self._turns]

    def reset(self) -> None:
        """Forget every turn and keep the system message."""
        self._turns = []

    def ask(self, text: str) -> tuple[list[int], int]:
        """Add a question; returns the prompt's ids and how many exchanges were dropped for it.

        A message that does not fit even alone is not added, and the ids are empty.
        """
        message: ChatMessage = {"role": "user", "content": text}
        turns, dropped = [*self._turns, message], 0
        while True:
            ids = self._tokenizer.prompt([*self._system, *turns])
            if len(ids) + self.reserve <= self._window:
                self._turns = turns
                return ids, dropped
            if len(turns) == 1:
                return [], 0
            turns, dropped = turns[2:], dropped + 1

    def room(self, ids: Sequence[int]) -> int:
        """Tokens that a reply to the prompt `ids` may take."""
        return min(self._window - len(ids), self._longest)

    def answer(self, text: str) -> None:
        """Add the reply to the last question; an empty one takes the question back."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()


# Chat in a terminal: streaming, history, and Ctrl-C that stops a reply and not the program.
#
# Piped, it reads one message a line and prints one reply a line, so that it can be scripted and
# tested. Rejected: a full-screen interface (it would take away the terminal's own scrolling,
# copying and searching).

HELP = """\
  /reset   forget the conversation and start again
  /help    show this
  /quit    leave (Ctrl-D does too)
  Ctrl-C   stop a reply"""
COLOURS = {"you": "\x1b[1;36m", "model": "\x1b[1;33m", "note": "\x1b[2m"}
PLAIN = "\x1b[0m"
UNPRINTABLE = "\u00b7"


def chat(
    bundle: Bundle,
    *,
    sampling: Sampling | None = None,
    system: str | None = None,
    max_tokens: int | None = None,
    source: TextIO | None = None,
    sink: TextIO | None = None,
) -> None:
    """Talk to a model until the input ends; `source` and `sink` default to the terminal's own."""
    history = ChatHistory(bundle.tokenizer, bundle.context, system, longest=max_tokens)
    _Chat(bundle, sampling or Sampling(), history, source or sys.stdin, sink or sys.stdout).run()


class _Chat:
    """One sitting."""

    def __init__(
        self,
        bundle: Bundle,
        sampling: Sampling,
        history: ChatHistory,
        source: TextIO,
        sink: TextIO,
    ) -> None:
        self._bundle, self._sampling = bundle, sampling
        self._source, self._sink = source, sink
        self._engine = Engine(bundle.model, next(bundle.model.parameters()).device)
        self._history = history
        self._on_terminal = source.isatty() and sink.isatty()
        self._colour = self._on_terminal and not os.environ.get("NO_COLOR")
        self._commands: dict[str, Callable[[], bool]] = {
            "/reset": self._reset,
            "/help": self._help,
            "/quit": lambda: False,
            "/exit": lambda: False,
        }

    def run(self) -> None:
        self._greet()
        while (line := self._read()) is not None:
            text = line.strip()
            if text.startswith("/"):
                if not self._command(text):
                    break
            elif text:
                self._reply(text)
        if self._on_terminal:
            self._write("\n")

    def _greet(self) -> None:
        if self._bundle.config.train.stage != "finetune":
            self._note("this run was never fine-tuned: it continues text, it does not answer.")
        if self._on_terminal:
            _enable_line_editing()
            config = self._bundle.config
            self._note(
                f"step {self._bundle.step:,}, {config.model.layers} layers, {config.model.dim}"
                f" wide, remembers {self._bundle.context:,} tokens.  /help shows the commands."
            )

    def _read(self) -> str | None:
        """The next line; None when the user leaves."""
        if not self._on_terminal:
            return self._source.readline() or None
        while True:
            try:
                # readline must know which characters take no room, or long lines wrap wrongly.
                return input(self._paint("you", "you > ", for_input=True))
            except EOFError:
                return None
            except KeyboardInterrupt:
                self._write("\n")
                self._note("/quit or Ctrl-D leaves.")

    def _command(self, text: str) -> bool:
        """Obey; False ends the chat."""
        action = self._commands.get(text.split()[0])
        if action is None:
            self._note(f"{text.split()[0]} is not a command; /help lists them.")
            return True
        return action()

    def _reset(self) -> bool:
        self._history.reset()
        self._note("a new conversation.")
        return True

    def _help(self) -> bool:
        self._write(HELP + "\n")
        return True

    def _reply(self, text: str) -> None:
        ids, dropped = self._history.ask(text)
        if not ids:
            self._note("that message is longer than the model can read; make it shorter.")
            return
        if dropped:
            told = "the oldest exchange was" if dropped == 1 else f"{dropped} old exchanges were"
            self._note(f"{told} dropped: the model reads no further back.")
        if self._on_terminal:
            self._write(self._paint("model", "model > "))
        said = self._stream(ids)
        self._write("\n")
        self._history.answer(said.strip())

    def _stream(self, ids: list[int]) -> str:
        """Generate and print a reply as it comes; Ctrl-C keeps what was said so far."""
        tokenizer, stream = self._bundle.tokenizer, TextStream(self._bundle.tokenizer)
        said: list[str] = []

        def show(text: str) -> None:
            said.append(text)
            self._write(printable(text))

        def on_token(_row: int, token: int) -> None:
            show(stream.push(token))

        try:
            self._engine.generate(
                [ids], self._history.room(ids), self._sampling, tokenizer.stop_ids, on_token
            )
        except KeyboardInterrupt:
            self._write(self._paint("note", " [stopped]"))
        show(stream.close())
        return "".join(said)

    def _note(self, text: str) -> None:
        """Something that the program says; kept out of piped replies."""
        if self._on_terminal:
            self._write(self._paint("note", f"  {text}") + "\n")
        else:
            print(text, file=sys.stderr)

    def _paint(self, colour: str, text: str, for_input: bool = False) -> str:
        if not self._colour:
            return text
        begin, end = COLOURS[colour], PLAIN
        if for_input:
            begin, end = f"\x01{begin}\x02", f"\x01{end}\x02"
        return f"{begin}{text}{end}"

    def _write(self, text: str) -> None:
        self._sink.write(text)
        self._sink.flush()


def printable(text: str) -> str:
    """Text without control characters: a model must not be able to steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else UNPRINTABLE for c in text)


def _enable_line_editing() -> None:
    """Arrow keys and history at the prompt, where the platform has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
