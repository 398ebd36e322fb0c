"""Hamlet, the built-in world: a seeded village, what is written in it, said in it and asked about
it.

It needs no download, comes in any amount and its truth is known, so a model raised on it can be
held to the best loss that any model could reach and to questions with exact answers.
"""

from foundling.hamlet.conversations import Conversation, Message, conversation
from foundling.hamlet.documents import KINDS, Document, derive, document, parse
from foundling.hamlet.grammar import Derivation
from foundling.hamlet.quiz import Question, is_decline, questions_demo, quiz
from foundling.hamlet.village import Entity, Fact, Village

__all__ = [
    "KINDS",
    "Conversation",
    "Derivation",
    "Document",
    "Entity",
    "Fact",
    "Message",
    "Question",
    "Village",
    "conversation",
    "derive",
    "document",
    "is_decline",
    "parse",
    "questions_demo",
    "quiz",
]
