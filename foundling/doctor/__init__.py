"""Before a run: is the machine, or the job, fit (examine); does the run start, fall, save and
resume in stages (rehearse); is a stopped run, resumed, the same run (resume, stream)."""
