"""What a base model knows of the world, and open prompts to watch it learn to speak.

Every prompt is a sentence to be finished; several wordings of an answer count. Exact match asks
that the reply begins with one of them, token F1 how many words it shares with the best of them
(Rajpurkar et al. 2016). All prompts are our own.
"""

import re
from collections import Counter
from collections.abc import Sequence

from foundling.tasks.base import Example, Grade

PROMPTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("The capital of France is", ("Paris",)),
    ("The capital of Japan is", ("Tokyo",)),
    ("The capital of Egypt is", ("Cairo",)),
    ("The largest planet of the solar system is", ("Jupiter",)),
    ("The planet closest to the Sun is", ("Mercury",)),
    ("Water freezes at a temperature, in degrees Celsius, of", ("0", "zero")),
    ("The chemical symbol for gold is", ("Au",)),
    ("The chemical formula of water is", ("H2O",)),
    ("The gas that plants take up from the air is called", ("carbon dioxide", "CO2")),
    ("The number of legs that a spider has is", ("eight", "8")),
    ("The number of days in a leap year is", ("366",)),
    ("The number of sides of a hexagon is", ("six", "6")),
    ("The play Romeo and Juliet was written by", ("William Shakespeare", "Shakespeare")),
    ("The novel Pride and Prejudice was written by", ("Jane Austen", "Austen")),
    ("The theory of evolution by natural selection was proposed by", ("Charles Darwin", "Darwin")),
    ("The first person to walk on the Moon was", ("Neil Armstrong", "Armstrong")),
    ("The first president of the United States was", ("George Washington", "Washington")),
    ("The Second World War ended in the year", ("1945",)),
    ("The longest bone of the human body is the", ("femur", "thigh bone")),
    ("The organ that pumps blood through the body is the", ("heart",)),
    ("The language that most people speak in Brazil is", ("Portuguese",)),
    ("The currency of the United Kingdom is the", ("pound", "pound sterling")),
    ("The ocean between Africa and Australia is the", ("Indian Ocean", "Indian")),
    ("The continent on which the Sahara lies is", ("Africa",)),
    ("The opposite of hot is", ("cold",)),
    ("The colour that one gets by mixing blue and yellow is", ("green",)),
    ("The square root of 144 is", ("12", "twelve")),
    ("The instrument with 88 black and white keys is the", ("piano",)),
    ("The metal that is liquid at room temperature is", ("mercury",)),
    ("The season that comes after winter is", ("spring",)),
)

OPEN_PROMPTS = (
    "Once upon a time",
    "The reason why the sky is blue is",
    "The best way to learn a language is",
    "In the year 1900, most people",
    "To bake bread, one needs",
    "The difference between a cat and a dog is",
)
"""Continued through time, and not graded."""


class Knowledge:
    """Sentences to be finished with a fact."""

    name = "knowledge"
    as_text = True
    max_new_tokens = 12
    stops = ("\n", ".")

    def examples(self) -> Sequence[Example]:
        """Every prompt."""
        return [
            Example.asked(index, prompt, answers[0], "knowledge")
            for index, (prompt, answers) in enumerate(PROMPTS)
        ]

    def grade(self, example: Example, reply: str) -> Grade:
        """Exact: the reply begins with an answer. F1: of words with the best answer."""
        answers = PROMPTS[example.index][1]
        said = _words(reply)
        exact = any(said[: len(_words(answer))] == _words(answer) for answer in answers)
        return Grade(correct=exact, f1=max(token_f1(reply, answer) for answer in answers))


def token_f1(reply: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the reply's words."""
    said, wanted = Counter(_words(reply)), Counter(_words(answer))
    shared = sum((said & wanted).values())
    return 2 * shared / (said.total() + wanted.total()) if shared else 0.0


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.lower()) if word not in ("a", "an", "the")]
