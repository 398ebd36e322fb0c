"""From one command to many processes: torchrun on a machine, SLURM on a cluster, detached runs, and
what is done with run directories from outside (stop, copy, throw away). Imports no torch."""

from foundling.launch.place import Place, expand_nodes, join_slurm, processes_here, surroundings
from foundling.launch.start import Job, here, launch

__all__ = [
    "Job",
    "Place",
    "expand_nodes",
    "here",
    "join_slurm",
    "launch",
    "processes_here",
    "surroundings",
]
