"""Proofs on the owner's own machine and config: that a stopped run, resumed, is the same run."""

from foundling.doctor.compare import Finding, compare_runs
from foundling.doctor.resume import prove_resume, rehearsal
from foundling.doctor.stream import data_findings, prove_stream

__all__ = [
    "Finding",
    "compare_runs",
    "data_findings",
    "prove_resume",
    "prove_stream",
    "rehearsal",
]
