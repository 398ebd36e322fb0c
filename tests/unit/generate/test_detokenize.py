"""Streamed text: whole characters, and in the end the same text."""

from hypothesis import given
from hypothesis import strategies as st

from foundling.generate.detokenize import REPLACEMENT, TextStream


class Bytes:
    """Every token is one byte: each character beyond ASCII is cut."""

    def decode(self, ids: list[int], skip_special: bool = False) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class Words:
    """A tokenizer that drops the space before the first word of whatever it decodes."""

    words = ("\u2581I", "\u2581am", "\u2581here", ".", "<s>")

    def decode(self, ids: list[int], skip_special: bool = False) -> str:
        words = [self.words[index] for index in ids if index != 4 or not skip_special]
        text = "".join(words).replace("\u2581", " ")
        return text.removeprefix(" ")


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_arrives_whole(text: str) -> None:
    stream = TextStream(Bytes())
    parts = [stream.push(byte) for byte in text.encode()]
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in part for part in parts)
    assert "".join(parts) + stream.close() == text


@given(st.binary(max_size=40))
def test_broken_bytes_end_up_as_decoding_them_at_once_would(data: bytes) -> None:
    stream = TextStream(Bytes())
    parts = [stream.push(byte) for byte in data]
    assert "".join(parts) + stream.close() == data.decode("utf-8", errors="replace")


def test_an_unfinished_character_waits_for_its_last_byte() -> None:
    stream = TextStream(Bytes())
    assert [stream.push(byte) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert stream.push("é".encode()[0]) == ""
    assert stream.close() == REPLACEMENT
    assert stream.close() == ""


def test_spaces_between_words_survive() -> None:
    stream = TextStream(Words())
    assert [stream.push(index) for index in range(4)] == ["I", " am", " here", "."]


def test_the_space_after_a_prompt_or_a_special_token_survives() -> None:
    stream = TextStream(Words(), prompt=[4, 0])
    assert [stream.push(index) for index in (1, 4, 2)] == [" am", "", " here"]
    begun = TextStream(Words(), prompt=[4])
    assert begun.push(0) == "I"
    inside = TextStream(Bytes(), prompt="é".encode()[:1])
    assert inside.push(ord("a")) == "a"


def test_a_stop_string_waits_for_the_least_length() -> None:
    stream = TextStream(Bytes(), ["b"], min_tokens=2)
    assert [stream.push(byte) for byte in b"abab"] == ["a", "b", "a", ""]
    assert stream.stop == "b"
