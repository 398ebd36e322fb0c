"""Is one model better than another, or did the examples only happen to fall that way?"""

from foundling.eval.compare.report import compare, describe_verdict
from foundling.eval.compare.sources import Evaluated, find_evaluated

__all__ = ["Evaluated", "compare", "describe_verdict", "find_evaluated"]
