"""Before a run: is the machine, or the job, fit (examine); does the run start, fall, save and
resume in stages (rehearse); is a stopped run, resumed, the same run (resume, stream)."""

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
