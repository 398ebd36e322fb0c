"""foundling as a model of lm-evaluation-harness, so that its whole task list runs unconverted.

`harness.py` needs the package (the `lm-eval` extra) and is imported only where it is used; what
scores tokens does not.
"""

from foundling.eval.lm.scoring import TokenScorer
from foundling.eval.lm.spans import Span

__all__ = ["Span", "TokenScorer"]
