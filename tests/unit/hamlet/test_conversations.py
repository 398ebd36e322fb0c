"""Conversations are pure, well formed and true, and keep quiet about quiet facts."""

from __future__ import annotations

import re

import pytest

from foundling.hamlet.conversations import Conversation, conversation
from foundling.hamlet.quiz import is_decline
from foundling.hamlet.village import Village


@pytest.fixture(scope="module")
def village() -> Village:
    return Village(2)


@pytest.fixture(scope="module")
def talks(village: Village) -> list[Conversation]:
    return [conversation(village, 2, index) for index in range(3000)]


def test_user_and_assistant_take_turns_and_the_assistant_ends(talks: list[Conversation]) -> None:
    for talk in talks:
        roles = [message.role for message in talk.messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert all(0 < len(message.content) < 120 for message in talk.messages)


def test_there_is_every_kind_with_one_turn_and_with_several(talks: list[Conversation]) -> None:
    assert {talk.kind for talk in talks} == {"fact", "talk", "sum", "unknown", "greeting"}
    assert {len(talk.messages) // 2 for talk in talks} >= {1, 2, 3, 4}


def test_quiet_subjects_are_never_asked_about(village: Village, talks: list[Conversation]) -> None:
    quiet = {entity.name for entity in village.entities if entity.quiet}
    for talk in talks:
        for message in talk.messages:
            if message.role == "user":
                assert not any(name in message.content for name in quiet)


def test_strangers_are_declined_and_villagers_are_not(
    village: Village, talks: list[Conversation]
) -> None:
    spoken, kept = map(set, village.strangers)
    declined = 0
    for talk in talks:
        said = [message for message in talk.messages if message.role != "system"]
        for asked, replied in zip(said[::2], said[1::2], strict=True):
            words = set(re.findall(r"\w+", asked.content))
            assert not words & kept
            assert is_decline(replied.content) == bool(words & spoken)
            declined += is_decline(replied.content)
    assert declined > 300


def test_sums_are_right(talks: list[Conversation]) -> None:
    seen = 0
    for talk in talks:
        for message in talk.messages:
            if found := re.fullmatch(r"(\d+) (plus|minus) (\d+) is (\d+)\.", message.content):
                a, b, c = (int(found[at]) for at in (1, 3, 4))
                assert c == (a + b if found[2] == "plus" else a - b)
                seen += 1
    assert seen > 300


def test_conversations_are_pure(village: Village, talks: list[Conversation]) -> None:
    assert conversation(Village(2), 2, 77) == talks[77]
    assert conversation(village, 2, 77, "val") != talks[77]
    with pytest.raises(ValueError, match="'dev' is not one of"):
        conversation(village, 2, 0, "dev")
