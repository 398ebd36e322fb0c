"""From one command to many processes: torchrun on a machine, SLURM on a cluster, detached runs, and
what is done with run directories from outside (stop, copy, throw away). Imports no torch."""
