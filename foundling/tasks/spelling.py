"""Spelling and counting: what a model that sees tokens knows of the letters inside them.

The words are ours, the questions are drawn by a seed, and the answers need no file.
"""

import random
import re
from collections.abc import Sequence

from foundling.tasks.base import Example, Grade

_WORDS = (
    " apple anchor barley basket beacon blanket bottle bramble bridge button candle carpet"
    " castle cellar cherry chimney cinnamon clover copper cotton cradle curtain dagger daughter"
    " drizzle elbow emerald engine feather ferry fiddle forest fountain garden ginger granite"
    " hammer harbour hazel hedgehog honey horizon island ivory jacket journey juniper kettle"
    " kingdom kitten ladder lantern lavender letter lobster magpie marble meadow mirror morning"
    " mushroom needle noodle nutmeg orchard otter oyster paddle pebble pepper pillow planet"
    " pocket pottery puddle quarry rabbit raisin ribbon river saddle saffron sparrow spinning"
    " squirrel stitch summer swallow tassel thistle thunder timber trumpet turnip umbrella"
    " valley velvet village violet wagon walnut whistle willow window winter wrinkle yellow"
    " zipper committee bookkeeper"
)
WORDS = tuple(_WORDS.split())
SEED = 7
KIND = "letters"


class Spelling:
    """Spell a word: its letters, in order, whatever stands between them."""

    name = "spelling"
    max_new_tokens = 64

    def __init__(self, n: int = 100) -> None:
        words = random.Random(SEED).sample(WORDS, min(n, len(WORDS)))
        self._examples = [
            Example.asked(
                number, f"Spell the word '{word}', letter by letter.", "-".join(word), KIND, word
            )
            for number, word in enumerate(words)
        ]

    def examples(self) -> Sequence[Example]:
        """Every word."""
        return self._examples

    def grade(self, example: Example, reply: str) -> Grade:
        """The single letters of the reply must be those of the word."""
        single = re.findall(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])", reply)
        said = "".join(single).lower()
        return Grade(correct=said == example.answer.replace("-", ""))


class Counting:
    """Count a letter in a word."""

    name = "counting"
    max_new_tokens = 48

    def __init__(self, n: int = 200) -> None:
        draw = random.Random(SEED + 1)
        self._examples = []
        for number in range(n):
            word = draw.choice(WORDS)
            letter = draw.choice(sorted(set(word)) if number % 4 else "abcdefghijklmnopqrstuvwxyz")
            asked = f"How many times does the letter '{letter}' occur in the word '{word}'?"
            key = f"{number}-{letter}-{word}"
            count = str(word.count(letter))
            self._examples.append(Example.asked(number, asked, count, KIND, key))

    def examples(self) -> Sequence[Example]:
        """Every question."""
        return self._examples

    def grade(self, example: Example, reply: str) -> Grade:
        """The last number, in digits or as a word, must be the count."""
        names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
        found = re.findall(r"\d+|\b(?:" + "|".join(names) + r")\b", reply.lower())
        said = names.index(found[-1]) if found and found[-1] in names else None
        if found and said is None:
            said = int(found[-1])
        return Grade(correct=said == int(example.answer))
