"""One object a task: what to ask, and how a reply is graded. No torch."""

from foundling.tasks.base import ChatMessage, Example, Grade, Score, Task
from foundling.tasks.core import CORE_TASKS, CoreBundle, CoreScore, core_score
from foundling.tasks.hamlet_quiz import FACTS, SUMS, UNKNOWN, HamletQuiz
from foundling.tasks.icl import IclTask, Question
from foundling.tasks.own import load_task_file
from foundling.tasks.registry import Registry, known_tasks

__all__ = [
    "CORE_TASKS",
    "FACTS",
    "SUMS",
    "UNKNOWN",
    "ChatMessage",
    "CoreBundle",
    "CoreScore",
    "Example",
    "Grade",
    "HamletQuiz",
    "IclTask",
    "Question",
    "Registry",
    "Score",
    "Task",
    "core_score",
    "known_tasks",
    "load_task_file",
]
