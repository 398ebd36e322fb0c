"""One object a task: what to ask, and how a reply is graded. No torch."""

from foundling.tasks.base import ChatMessage, Example, Grade, Score, Task
from foundling.tasks.hamlet_quiz import FACTS, SUMS, UNKNOWN, HamletQuiz

__all__ = [
    "FACTS",
    "SUMS",
    "UNKNOWN",
    "ChatMessage",
    "Example",
    "Grade",
    "HamletQuiz",
    "Score",
    "Task",
]
