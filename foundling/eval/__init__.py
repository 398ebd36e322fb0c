"""Scores one can believe: held-out bits per byte, the quiz, and the whole evaluation of a run."""

from foundling.eval.bpb import (
    BpbScore,
    KindScore,
    LossScore,
    headline,
    held_out_bpb,
    held_out_loss,
)
from foundling.eval.evaluate import describe_scores, evaluate
from foundling.eval.quiz import QuizScore, Reply, run_quiz, summarise

__all__ = [
    "BpbScore",
    "KindScore",
    "LossScore",
    "QuizScore",
    "Reply",
    "describe_scores",
    "evaluate",
    "headline",
    "held_out_bpb",
    "held_out_loss",
    "run_quiz",
    "summarise",
]
