"""foundling raises a language model from nothing, and cannot fool its owner.

Importing the package loads nothing else: each room is imported where it is used, so that `--help`
and `plan` answer at once and never touch torch.
"""

__version__ = "0.1.0"
