"""A job rendered by `launch slurm`, on a real SLURM of two nodes: three time limits, a cancelled
job, and a node that fails its preflight."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.full.one_machine_slurm import job_field, missing, one_machine_slurm, wait_for_state
from tests.full.tiny_runs import (
    ROOT,
    assert_same,
    build_data,
    flags,
    foundling,
    steps_of,
    steps_per_second,
)

Environment = dict[str, str]
LIFE_S = 120
"""A time limit; SLURM's shortest, of a minute, is too short for a start on a busy machine."""


def slurm() -> dict[str, Any]:
    """A rendered job through three time limits to completion, a cancelled job, a bad node."""
    lack = missing()
    assert not lack, f"this machine lacks {lack}"
    home = ROOT / "runs" / "full" / "slurm"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    text = build_data(home)
    with one_machine_slurm(home / "daemons") as environment:
        environment["PYTHONPATH"] = str(ROOT)
        return {
            "limits": _limits(home, text, environment),
            "cancelled": _cancelled(home, text, environment),
            "bad node": _bad_node(home, text, environment),
            "joined": _joined(home, text, environment),
        }


def _submit(run: Path, text: Path, steps: int, env: Environment, *more: str) -> str:
    words = ["launch", "slurm", "hamlet", "--run", str(run), "--grace", "20"]
    words += ["--gpus-per-node", "0", "--env", "MASTER_ADDR=127.0.0.1", *more]
    said = foundling(*words, *flags(text, steps), env=env)
    found = re.search(r"submitted job (\d+)", said)
    assert found, said
    return found[1]


def _limits(home: Path, text: Path, env: Environment) -> dict[str, Any]:
    """Two nodes of a rank each: killed by nothing, stopped three times by SLURM's own signal."""
    rate = steps_per_second(home, text)
    # A life has about three quarters of its time after its start and before its end.
    steps = int(rate * LIFE_S * 0.75 * 3.2)
    run = home / "limits"
    job = _submit(run, text, steps, env, "--nodes", "2", "--nproc", "1", "--time", "2:00")
    wait_for_state(env, job, ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), 1200)
    log = (run / "logs" / f"slurm-{job}.log").read_text()
    assert job_field(env, job, "JobState") == "COMPLETED", log[-3000:]
    restarts = int(job_field(env, job, "Restarts"))
    signalled = re.findall(r"saved at step (\d+) after SIGUSR1", log)
    assert restarts >= 3, f"only {restarts} limits came; steps {steps}"
    assert len(set(signalled)) == restarts, (signalled, restarts)
    whole = home / "whole"
    foundling("train", "hamlet", "--run", str(whole), "--nproc", "2", *flags(text, steps))
    assert_same(whole, run)
    return {"steps": steps, "limits": restarts, "saved at": sorted(set(map(int, signalled)))}


def _cancelled(home: Path, text: Path, env: Environment) -> dict[str, Any]:
    """scancel: saved, not requeued, and the next submission goes on from there."""
    run, steps = home / "cancelled", max(200, steps_of(home / "limits") // 4)
    words = ("--nodes", "2", "--nproc", "1", "--time", "20:00")
    job = _submit(run, text, steps, env, *words)
    last = time.monotonic() + 120
    while steps_of(run) < 20:
        assert time.monotonic() < last, "the job did not begin"
        time.sleep(0.2)
    subprocess.run(["scancel", job], env=env, check=True)
    wait_for_state(env, job, ("CANCELLED",), 120)
    time.sleep(35)  # KillWait: nothing of the job is left, and it has not come back
    assert job_field(env, job, "JobState") == "CANCELLED"
    assert job_field(env, job, "Restarts") == "0"
    saved = max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-????????"))
    assert saved == steps_of(run), f"saved at step {saved} of {steps_of(run)}"
    again = _submit(run, text, steps, env, *words)
    wait_for_state(env, again, ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), 600)
    assert job_field(env, again, "JobState") == "COMPLETED"
    assert steps_of(run) == steps
    return {"saved at": saved, "steps": steps}


def _bad_node(home: Path, text: Path, env: Environment) -> dict[str, Any]:
    """The first node that SLURM picks fails its preflight: the job comes back without it."""
    run, steps = home / "bad_node", 50
    wrapper = home / "python"
    # A machine of one cannot have a broken half: the interpreter says that n1 is one.
    wrapper.write_text(
        "#!/bin/bash\n"
        'if [ "$SLURMD_NODENAME" = n1 ] && [ "$4" = --node ]; then\n'
        f'  echo "n1 now its GPUs do not answer" >> {run}/bad_nodes; exit 71\nfi\n'
        f'exec {sys.executable} "$@"\n'
    )
    wrapper.chmod(0o755)
    words = ("--nodes", "1", "--nproc", "2", "--time", "20:00", "--python", str(wrapper))
    job = _submit(run, text, steps, env, *words)
    wait_for_state(env, job, ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), 600)
    log = (run / "logs" / f"slurm-{job}.log").read_text()
    assert job_field(env, job, "JobState") == "COMPLETED", log
    assert job_field(env, job, "ExcNodeList") == "n1"
    assert job_field(env, job, "NodeList") == "n2"
    return {"excluded": "n1", "completed on": "n2"}


def _joined(home: Path, text: Path, env: Environment) -> dict[str, Any]:
    """srun with a task for every rank and no launcher of ours: four ranks on two nodes join."""
    run, steps = home / "joined", 20
    words = ["srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "-m", "foundling"]
    words += ["train", "hamlet", "--run", str(run), *flags(text, steps)]
    environment = {**env, "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert steps_of(run) == steps
    logs = sorted(path.name for path in run.glob("logs/*/try-0/rank-*.log"))
    assert logs[0] == "rank-00000.log"
    return {"ranks": 4, "steps": steps}
