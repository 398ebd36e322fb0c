"""The conversation stays within what the model was trained to read."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from foundling.serve.terminal import ChatHistory
from foundling.tasks.base import ChatMessage


class Letters:
    """One token a letter and one marker a turn."""

    def prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        return [ord(c) for message in messages for c in "<" + message["content"]]


def said(history: ChatHistory) -> list[str]:
    return [message["content"] for message in history.messages]


def test_turns_are_kept_in_order_after_the_system_message() -> None:
    history = ChatHistory(Letters(), window=400, system="be kind")
    history.ask("hello")
    history.answer("good day")
    ids, dropped = history.ask("who are you")
    assert dropped == 0
    assert said(history) == ["be kind", "hello", "good day", "who are you"]
    assert [m["role"] for m in history.messages] == ["system", "user", "assistant", "user"]
    assert history.room(ids) == 400 - len(ids)
    history.reset()
    assert said(history) == ["be kind"]


def test_the_oldest_exchange_goes_first() -> None:
    history = ChatHistory(Letters(), window=40)
    for number in range(3):
        history.ask(f"question{number}")
        history.answer(f"reply{number}")
    _, dropped = history.ask("question3")
    assert dropped == 1
    assert said(history) == ["question2", "reply2", "question3"]


def test_a_message_that_never_fits_leaves_the_conversation_alone() -> None:
    history = ChatHistory(Letters(), window=40)
    history.ask("hello")
    history.answer("hi")
    assert history.ask("x" * 100) == ([], 0)
    assert said(history) == ["hello", "hi"]


def test_a_reply_that_never_came_takes_its_question_back() -> None:
    history = ChatHistory(Letters(), window=40)
    history.ask("hello")
    history.answer("")
    assert said(history) == []


@given(
    st.integers(8, 120),
    st.lists(st.tuples(st.text("ab", max_size=60), st.text("cd", max_size=60)), max_size=8),
)
def test_a_prompt_always_leaves_room_for_a_reply(
    window: int, exchanges: list[tuple[str, str]]
) -> None:
    history = ChatHistory(Letters(), window)
    for question, reply in exchanges:
        ids, _ = history.ask(question)
        if ids:
            assert history.room(ids) >= history.reserve > 0
            assert history.messages[0]["role"] == "user"
            history.answer(reply)
