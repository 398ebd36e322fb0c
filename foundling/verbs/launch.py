"""`foundling launch ...`: a run as a job of a cluster."""

import argparse
from pathlib import Path

from foundling.verbs.base import Options, Settings, Verb, count, positive, resolved, run_name


def _slurm_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="preset, YAML file, or run directory")
    parser.add_argument("--nodes", type=positive, required=True, help="nodes")
    parser.add_argument("--time", required=True, help="limit of one life of the job, HH:MM:SS")
    parser.add_argument("--run", type=Path, help="run directory (default: runs/TARGET)")
    parser.add_argument("--profile", default="plain", help="kind of machine; `launch profiles`")
    parser.add_argument("--gpus-per-node", type=count, help="GPUs of a node (default: profile's)")
    parser.add_argument("--nproc", type=positive, help="processes a node (default: one a GPU)")
    parser.add_argument("--partition", default="", help="SLURM's partition")
    parser.add_argument("--account", default="", help="whom to charge")
    parser.add_argument("--container", default="", help="image: an apptainer .sif, or pyxis' name")
    parser.add_argument("--interface", default="", help="network interface, such as hsn0")
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="export this")
    parser.add_argument("--setup", action="append", default=[], metavar="LINE", help="run before")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="NAME=V", help="a further option of sbatch"
    )
    parser.add_argument("--python", default="", help="interpreter on the nodes (default: this one)")
    parser.add_argument("--grace", type=positive, default=300, help="seconds before the limit")
    parser.add_argument(
        "--max-restarts", type=count, default=9, help="tries after a crash, within one life"
    )
    parser.add_argument("--no-preflight", action="store_true", help="do not try the nodes first")
    parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")


def _slurm(options: Options, settings: Settings) -> None:
    from foundling.launch.profiles import find_profile
    from foundling.launch.slurm import SlurmJob, check_job, render, submit, variables
    from foundling.runtime.log import warn

    config = resolved(options.target, settings, tell=warn)
    run = options.run or Path("runs") / run_name(options.target)
    job = SlurmJob(
        name=run_name(options.target),
        run=run,
        nodes=options.nodes,
        time=options.time,
        profile=find_profile(options.profile),
        gpus_per_node=options.gpus_per_node,
        nproc=options.nproc,
        partition=options.partition,
        account=options.account,
        container=options.container,
        interface=options.interface,
        env=variables(options.env),
        setup=tuple(options.setup),
        sbatch=tuple(options.sbatch),
        python=options.python,
        grace_s=options.grace,
        restarts=options.max_restarts,
        preflight=not options.no_preflight,
    )
    check_job(job, config)
    if options.dry_run:
        print(render(job), end="")
        return
    number = submit(job, config)
    print(f"submitted job {number}: {run}; `foundling runs attach {run}` follows it")


def _no_options(parser: argparse.ArgumentParser) -> None:
    return None


def _profiles(options: Options, settings: Settings) -> None:
    from foundling.launch.profiles import PROFILES, environment

    for name, profile in PROFILES.items():
        print(f"{name}: {profile.about}")
        for key, value in environment(profile, "", {}).items():
            print(f"    {key}={value}")


def _preflight_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run directory that the job will write to")
    parser.add_argument("--gpus", type=count, default=0, help="GPUs that must answer")


def _preflight(options: Options, settings: Settings) -> None:
    from foundling.launch.nodes import preflight

    preflight(options.run, options.gpus)


VERBS = {
    "launch slurm": Verb(
        "submit a run that saves, requeues and resumes", _slurm_options, _slurm, True
    ),
    "launch profiles": Verb("list the kinds of machines known", _no_options, _profiles),
    "launch preflight": Verb(
        "see whether this node is fit for a job",
        _preflight_options,
        _preflight,
        lasts="seconds, and some more for each GPU",
    ),
}
