"""Hamlet, the built-in world: a seeded village, what is written in it, said in it and asked about
it.

It needs no download, comes in any amount and its truth is known, so a model raised on it can be
held to the best loss that any model could reach and to questions with exact answers.
"""
