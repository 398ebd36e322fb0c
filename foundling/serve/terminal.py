"""Chat in a terminal: streaming, history within the context, Ctrl-C that stops an answer."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TextIO

from foundling.checkpoint.bundle import Bundle
from foundling.config.errors import UserError
from foundling.generate.prepare import Weights
from foundling.generate.request import Request
from foundling.generate.sampling import Sampling, derived_seed
from foundling.generate.text import TextEngine, open_engine
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

    def instruct(self, system: str) -> None:
        """Another system message from the next question on; empty: none."""
        self._system = [{"role": "system", "content": system}] if system else []

    def take_back(self) -> list[ChatMessage]:
        """Forget the last exchange; all turns until now, for `put_back`."""
        turns, self._turns = self._turns, self._turns[:-2]
        return turns

    def put_back(self, turns: Sequence[ChatMessage]) -> None:
        """These are the turns again."""
        self._turns = list(turns)

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
  /retry          answer the last message again, with another seed (at temperature 0: sampled)
  /why            how likely each token of the last answer was, and what else it could have been
  /system [TEXT]  set the system message, or show it
  /save FILE      write the conversation as JSON
  /reset          forget the conversation and start again
  /help           show this
  /quit           leave (Ctrl-D does too)
  Ctrl-C          stop an answer
  a line that ends in \\ goes on in the next; a line that begins with \"\"\" begins a message of
  many lines, and one that ends with it ends it"""
FENCE = '"""'
RETRY_TEMPERATURE = 0.8
"""Of a second answer where the first was the likeliest: there is only one such."""
ALTERNATIVES = 4
"""Tokens that /why names beside the one that was said."""
MOST_HISTORY = 1000
COLOURS = {"you": "\x1b[1;36m", "model": "\x1b[1;33m", "note": "\x1b[2m"}
PLAIN = "\x1b[0m"
UNPRINTABLE = "\u00b7"


def chat(
    bundle: Bundle,
    *,
    sampling: Sampling | None = None,
    system: str | None = None,
    max_tokens: int | None = None,
    weights: Weights | None = None,
    source: TextIO | None = None,
    sink: TextIO | None = None,
) -> None:
    """Talk to a model until the input ends; `source` and `sink` default to the terminal's own."""
    engine = open_engine(bundle.model, weights=weights, max_running=1, max_length=bundle.context)
    window = min(bundle.context, engine.longest)
    history = ChatHistory(bundle.tokenizer, window, system, longest=max_tokens)
    text = TextEngine(engine, bundle.tokenizer)
    source, sink = source or sys.stdin, sink or sys.stdout
    _Chat(bundle, text, sampling or Sampling(), history, source, sink).run()


class _Chat:
    """One sitting."""

    def __init__(
        self,
        bundle: Bundle,
        text: TextEngine,
        sampling: Sampling,
        history: ChatHistory,
        source: TextIO,
        sink: TextIO,
    ) -> None:
        self._bundle, self._text, self._sampling = bundle, text, sampling
        self._source, self._sink = source, sink
        self._history = history
        self._question = ""
        """The last message."""
        self._retries = 0
        """Answers to it beside the first."""
        self._last: tuple[list[int], list[int]] | None = None
        """Prompt and tokens of the last answer; None where there is none, or an empty one."""
        self._on_terminal = source.isatty() and sink.isatty()
        self._colour = self._on_terminal and not os.environ.get("NO_COLOR")
        self._commands: dict[str, Callable[[str], None]] = {
            "/retry": self._retry,
            "/why": self._why,
            "/system": self._instruct,
            "/save": self._save,
            "/reset": self._reset,
            "/help": self._help,
        }

    def run(self) -> None:
        self._greet()
        while (read := self._read()) is not None:
            text, is_fenced = read
            try:
                if any("\ud800" <= character <= "\udfff" for character in text):
                    self._note("that holds half a character, which is no text; type it again.")
                elif text.startswith("/") and not is_fenced:
                    if not self._command(text):
                        break
                elif text:
                    self._question, self._retries = text, 0
                    self._reply()
            except KeyboardInterrupt:
                self._write("\n")
                self._note("stopped; /quit or Ctrl-D leaves.")
            except UserError as error:
                self._note(str(error))
        if self._on_terminal:
            self._write("\n")

    def _greet(self) -> None:
        if not self._bundle.is_chat:
            self._note("this run was never fine-tuned: it continues text, it does not answer.")
        if self._on_terminal:
            _enable_line_editing()
            config = self._bundle.config
            self._note(
                f"step {self._bundle.step:,}, {config.model.layers} layers, {config.model.dim}"
                f" wide, remembers {self._bundle.context:,} tokens.  /help shows the commands."
            )

    def _read(self) -> tuple[str, bool] | None:
        """The next message, of one line or of many, and whether it was fenced, so that it is no
        command; None when the user leaves."""
        lines: list[str] = []
        fenced = False
        while True:
            try:
                line = self._line("... > " if lines else "you > ")
            except KeyboardInterrupt:
                lines, fenced = [], False
                self._write("\n")
                self._note("/quit or Ctrl-D leaves.")
                continue
            if line is None:
                return ("\n".join(lines).strip(), fenced) if lines else None
            if not lines and line.lstrip().startswith(FENCE):
                line, fenced = line.lstrip().removeprefix(FENCE), True
            if fenced and line.rstrip().endswith(FENCE):
                lines.append(line.rstrip().removesuffix(FENCE))
                return "\n".join(lines).strip(), True
            goes_on = line.endswith("\\") and not fenced
            lines.append(line[:-1] if goes_on else line)
            if not fenced and not goes_on:
                return "\n".join(lines).strip(), False

    def _line(self, prompt: str) -> str | None:
        if not self._on_terminal:
            line = self._source.readline()
            return line.removesuffix("\n") if line else None
        try:
            # readline must know which characters take no room, or long lines wrap wrongly.
            return input(self._coloured("you", prompt, for_input=True))
        except EOFError:
            return None

    def _command(self, text: str) -> bool:
        """Obey; False ends the chat."""
        name, _, rest = text.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name in self._commands:
            self._commands[name](rest.strip())
        else:
            self._note(f"{name} is not a command; /help lists them.")
        return True

    def _reset(self, rest: str) -> None:
        self._history.reset()
        self._question, self._last = "", None
        self._note("a new conversation.")

    def _help(self, rest: str) -> None:
        self._write(HELP + "\n")

    def _retry(self, rest: str) -> None:
        if not self._question:
            self._note("there is no answer yet.")
            return
        if self._sampling.temperature == 0:
            self._note(f"temperature 0 has one answer only: this one is of {RETRY_TEMPERATURE:g}.")
        self._retries += 1
        last = self._last
        turns = self._history.take_back() if last else []
        try:
            self._reply()
        finally:
            if last and not self._last:  # nothing came: the answer before stands
                self._last = last
                self._history.put_back(turns)

    def _instruct(self, rest: str) -> None:
        if rest:
            self._history.instruct(rest)
        shown = [m["content"] for m in self._history.messages if m["role"] == "system"]
        self._note(f"system message: {printable(shown[0])}" if shown else "no system message.")

    def _save(self, rest: str) -> None:
        if not rest:
            self._note("give a file: /save talk.json")
            return
        try:
            path = Path(rest).expanduser()
            if path.exists():
                self._note(f"{path} exists; give another name.")
                return
            text = json.dumps({"messages": self._history.messages}, indent=2)
            path.write_text(text + "\n", encoding="utf-8")
            self._note(f"saved {len(self._history.messages)} messages to {path}.")
        except (OSError, RuntimeError, ValueError) as error:  # no such home, NUL in a name
            why = str(error.strerror if isinstance(error, OSError) else error).rstrip(".")
            self._note(f"{printable(rest)} cannot be written: {why}.")

    def _why(self, rest: str) -> None:
        """Score the last answer again and show every token with its alternatives."""
        if self._last is None:
            self._note("the last answer is empty." if self._question else "there is no answer yet.")
            return
        prompt, said = self._last
        [(_, scores)] = self._text.engine.score(
            [[*prompt, *said]], [len(prompt)], top=ALTERNATIVES + 1
        )
        for id, logprob, top in zip(said, scores.logprobs, scores.top, strict=True):
            others = [
                f"{self._shown(other)} {math.exp(chance):.1%}"
                for other, chance in top.items()
                if other != id
            ][:ALTERNATIVES]
            line = f"{math.exp(logprob):7.1%}  {self._shown(id):<14}"
            self._write(line + self._coloured("note", "or " + ", ".join(others)) + "\n")

    def _shown(self, id: int) -> str:
        return repr(self._bundle.tokenizer.decode([id]))

    def _reply(self) -> None:
        """Answer the last message."""
        self._last = None
        ids, dropped = self._history.ask(self._question)
        if not ids:
            self._note("that message is longer than the model can read; make it shorter.")
            return
        if dropped:
            told = "the oldest exchange was" if dropped == 1 else f"{dropped} old exchanges were"
            self._note(f"{told} dropped: the model reads no further back.")
        if self._on_terminal:
            self._write(self._coloured("model", "model > "))
        said = ""
        try:
            said = self._stream(ids).strip()
        finally:
            self._write("\n")
            self._history.answer(said)

    def _stream(self, ids: list[int]) -> str:
        """Generate and print a reply as it comes; Ctrl-C keeps what was said so far."""
        said: list[str] = []
        tokens: list[int] = []
        sampling = self._sampling
        if self._retries:
            sampling = replace(
                sampling,
                seed=derived_seed(sampling.seed, self._retries),
                temperature=sampling.temperature or RETRY_TEMPERATURE,
            )
        request = Request(
            prompt=ids,
            max_tokens=self._history.room(ids),
            sampling=sampling,
            stop_ids=self._bundle.tokenizer.stop_ids,
        )
        try:
            for piece in self._text.stream([(request, ())]):
                if piece.error:
                    self._note(piece.error)
                if piece.output is not None and piece.output.id is not None:
                    tokens.append(piece.output.id)
                said.append(piece.text)
                self._write(printable(piece.text))
        except KeyboardInterrupt:
            self._write(self._coloured("note", " [stopped]"))
        text = "".join(said)
        if text.strip():
            self._last = ids, tokens
        return text

    def _note(self, text: str) -> None:
        """Something that the program says; kept out of piped replies."""
        if self._on_terminal:
            self._write(self._coloured("note", f"  {text}") + "\n")
        else:
            print(text, file=sys.stderr)

    def _coloured(self, colour: str, text: str, for_input: bool = False) -> str:
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
    """Arrow keys at the prompt, and what was typed in earlier chats, where there is readline."""
    with contextlib.suppress(ImportError, OSError):
        import atexit
        import readline

        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        file = Path(state) / "foundling" / "chat_history"
        file.parent.mkdir(parents=True, exist_ok=True)
        readline.set_history_length(MOST_HISTORY)
        if file.exists():
            readline.read_history_file(file)
        else:
            file.touch(mode=0o600)

        def keep() -> None:
            with contextlib.suppress(OSError):
                readline.write_history_file(file)

        atexit.register(keep)
