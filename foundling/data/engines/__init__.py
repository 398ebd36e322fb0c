"""Where the tasks of phase 1 run: here, on a Ray cluster, or in a SLURM array.

Every engine does the same thing: it has the pieces of a board encoded into part files until it is
told that there is enough. Which engine it was leaves no trace in the data set.
"""

from foundling.data.engines.base import Engine, Specs, open_engine

__all__ = ["Engine", "Specs", "open_engine"]
