"""The chat, piped and in a real terminal."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from chat_fakes import FakeBundle, Speaker

from foundling.checkpoint.bundle import Bundle
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.config.train import TrainConfig
from foundling.generate.sampling import Sampling
from foundling.model.transformer import Transformer
from foundling.serve import terminal
from foundling.serve.terminal import chat


def silent(_place: int) -> None: ...


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, Speaker]]:
    def run(
        messages: str,
        replies: Sequence[str],
        *,
        bundle: FakeBundle | None = None,
        before_token: Callable[[int], None] = silent,
        **more: Any,
    ) -> tuple[str, Speaker]:
        speaker = Speaker(replies, before_token)
        monkeypatch.setattr(terminal, "open_engine", lambda model, **more: speaker)
        sink = io.StringIO()
        found = cast(Bundle, bundle or FakeBundle())
        chat(found, source=io.StringIO(messages), sink=sink, **more)
        return sink.getvalue(), speaker

    return run


Talk = Callable[..., tuple[str, Speaker]]


def test_a_reply_a_line_with_history(talk: Talk) -> None:
    out, speaker = talk("hello\n\nand you?\n", ["good day", "née in the village"])
    assert out == "good day\nnée in the village\n"
    assert speaker.prompts == ["<hello", "<hello<good day<and you?"]


def test_a_reply_is_as_long_as_it_may_be(talk: Talk) -> None:
    out, speaker = talk("hello\n", ["a long reply"], max_tokens=6)
    assert out == "a long\n"
    assert speaker.rooms == [6]


def test_a_context_beyond_what_caches_are_laid_out_for_is_talked_in() -> None:
    model = Transformer(ModelConfig(vocab_size=256, dim=8, layers=1, heads=1, ffn_dim=8))
    bundle = FakeBundle(config=RunConfig(train=TrainConfig(seq_len=20_000)), model=model)
    sink = io.StringIO()
    says_all = Sampling(logit_bias={0: 1e4})
    chat(cast(Bundle, bundle), sampling=says_all, source=io.StringIO("hello\n"), sink=sink)
    assert sink.getvalue() == "\n"


def test_reset_help_quit_and_an_unknown_command(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    out, speaker = talk("one\n/reset\ntwo\n/help\n/what\n/quit\nthree\n", ["1", "2", "3"])
    assert speaker.prompts == ["<one", "<two"]
    assert "/reset" in out
    assert "/what is not a command" in capsys.readouterr().err


def test_the_system_message_survives_a_reset(talk: Talk) -> None:
    _, speaker = talk("one\n/reset\ntwo\n", ["1", "2"], system="be kind")
    assert speaker.prompts == ["<be kind<one", "<be kind<two"]


def test_a_message_of_many_lines(talk: Talk) -> None:
    _, speaker = talk('one \\\ntwo\n"""three\n\nfour"""\n', ["1", "2"])
    assert speaker.prompts == ["<one \ntwo", "<one \ntwo<1<three\n\nfour"]


def test_retry_asks_again_with_another_seed(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    out, speaker = talk(
        "/retry\none\n/retry\n/retry\n", ["1", "2", "3"], sampling=Sampling(temperature=1.0)
    )
    assert out == "1\n2\n3\n"
    assert speaker.prompts == ["<one"] * 3
    assert len(set(speaker.seeds)) == 3
    assert "there is no answer yet" in capsys.readouterr().err


def test_retry_at_temperature_0_is_sampled(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    _, speaker = talk("one\n/retry\ntwo\n", ["1", "2", "3"])
    assert speaker.temperatures == [0, 0.8, 0]
    assert speaker.prompts == ["<one", "<one", "<one<2<two"]
    assert "this one is of 0.8" in capsys.readouterr().err


def test_after_an_empty_answer_retry_and_why_mean_that_one(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    out, speaker = talk("one\ntwo\n/why\n/retry\nthree\n", ["1", "", "again", "3"])
    assert speaker.prompts[1:] == ["<one<1<two", "<one<1<two", "<one<1<two<again<three"]
    assert out == "1\n\nagain\n3\n"
    assert "the last answer is empty" in capsys.readouterr().err


def test_a_retry_that_brings_nothing_leaves_the_answer_before(talk: Talk) -> None:
    begun = iter([None, KeyboardInterrupt, None])

    def interrupt(place: int) -> None:
        if place == 0 and (raised := next(begun)):
            raise raised

    out, speaker = talk("one\n/retry\n/why\ntwo\n", ["1", "2", "3"], before_token=interrupt)
    assert speaker.prompts[-1] == "<one<1<two"
    assert "50.0%  '1'" in out


def test_why_shows_each_token_with_its_alternatives(talk: Talk) -> None:
    out, _ = talk("one\n/why\n", ["ab"])
    assert out.splitlines()[1:] == [
        "  50.0%  'a'           or '?' 25.0%",
        "  50.0%  'b'           or '?' 25.0%",
    ]


def test_the_system_message_can_be_changed_and_the_talk_saved(
    talk: Talk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.json"
    _, speaker = talk(f"/system be brief\none\n/save {file}\n/save {file}\n/save\n", ["1"])
    assert speaker.prompts == ["<be brief<one"]
    assert json.loads(file.read_text())["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
    ]
    told = capsys.readouterr().err
    assert "system message: be brief" in told
    assert "exists; give another name" in told
    assert "give a file" in told


def test_whatever_goes_wrong_is_a_sentence_and_the_chat_goes_on(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Speaker, "score", interrupted)
    lines = ["/save ~nobody-is-called-so/f", "/save " + "a" * 300, "/save a\0b", "a\udcffb"]
    out, speaker = talk("\n".join(["one", "/why", *lines, "two", ""]), ["1", "2"])
    assert speaker.prompts == ["<one", "<one<1<two"]
    assert out == "1\n\n2\n"
    told = capsys.readouterr().err
    assert told.count("cannot be written") == 3
    assert "stopped" in told
    assert "half a character" in told


def test_a_fence_is_one_at_the_ends_of_lines_only(talk: Talk) -> None:
    _, speaker = talk(
        'what is """ for?\nnext\n"""\n/etc is\na """ folder\n"""\n"""b"""\n', ["1"] * 4
    )
    said = [prompt.rpartition("<")[2] for prompt in speaker.prompts]
    assert said == ['what is """ for?', "next", '/etc is\na """ folder', "b"]


def test_old_turns_are_dropped_with_a_notice(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    train = TrainConfig(seq_len=32)
    bundle = FakeBundle(config=RunConfig(train=train))
    _, speaker = talk(
        "first message\nsecond message\n" + "x" * 40 + "\n", ["a reply", "ok"], bundle=bundle
    )
    assert speaker.prompts == ["<first message", "<second message"]
    assert speaker.rooms == [32 - 14, 32 - 15]
    err = capsys.readouterr().err
    assert "the oldest exchange was dropped" in err
    assert "longer than the model can read" in err


def test_ctrl_c_keeps_what_was_said_and_goes_on(talk: Talk) -> None:
    def interrupt(place: int) -> None:
        if place == 4:
            raise KeyboardInterrupt

    out, speaker = talk("hello\nmore\n", ["good day to you", "yes"], before_token=interrupt)
    assert out == "good [stopped]\nyes\n"
    assert speaker.prompts[1] == "<hello<good<more"


def test_control_characters_do_not_reach_the_terminal(talk: Talk) -> None:
    out, _ = talk("hi\nyes\n", ["\x1b[2Jgone\x07", "ok"])
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "gone" in out


def test_a_run_without_fine_tuning_says_so(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    talk("hi\n", ["the the"], bundle=FakeBundle(is_chat=False))
    assert "never fine-tuned" in capsys.readouterr().err


CHILD = """
import sys, time
sys.path.insert(0, {folder!r})
from chat_fakes import FakeBundle, Speaker
from foundling.serve.terminal import chat; from foundling.serve import terminal
speaker = Speaker(["slowly spoken words " * 40, "done"], lambda place: time.sleep(0.1))
terminal.open_engine = lambda model, **more: speaker
chat(FakeBundle())
print("LEFT", speaker.prompts)
"""


class Screen:
    """The far side of a pseudo-terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.text = descriptor, ""

    def wait_for(self, wanted: str, times: int = 1, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while self.text.count(wanted) < times:
            assert time.monotonic() < end, f"{wanted!r} never came: {self.text!r}"
            if select.select([self._descriptor], [], [], 0.2)[0]:
                self.text += os.read(self._descriptor, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())


@pytest.mark.full  # a real terminal and real time: not beside a second busy test process
def test_in_a_terminal_ctrl_c_stops_a_reply_and_ctrl_d_leaves() -> None:
    ours, theirs = pty.openpty()
    code = CHILD.format(folder=str(Path(__file__).parent))
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb"}
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    screen = Screen(ours)
    try:
        screen.wait_for("you > ")
        screen.type("hello\n")
        screen.wait_for("model > s")
        child.send_signal(signal.SIGINT)
        screen.wait_for("[stopped]")
        screen.wait_for("you > ", times=2)
        screen.type("again\n")
        screen.wait_for("model > done")
        screen.wait_for("you > ", times=3)
        screen.type("\x04")
        screen.wait_for("LEFT")
        screen.wait_for("<hello<s")
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    assert "<hello<s" in screen.text.partition("LEFT")[2]
