"""Scores one can believe: held-out bits per byte, the quiz, and the whole evaluation of a run."""
