"""`foundling doctor` and `rehearse`: is a machine fit, is a resumed run the same run."""

import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundling.cli.options import (
    JSON,
    TARGET,
    Option,
    Options,
    Verb,
    comma_list,
    config_of,
    count,
    default_run,
    positive,
    positive_float,
    positive_ints,
    print_json,
    print_lines,
    say_on_stderr,
)
from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from foundling.config.run import RunConfig
    from foundling.doctor.checks import DoctorRequest


_PROFILES = ("pods", "frontier", "infiniband")
"""Whole sets of variables, tried last."""
_DOCTOR_OPTIONS = (
    replace(TARGET, nargs="?"),
    Option("--run", "run directory to be (default: runs/TARGET)", Path),
    Option("--nproc", "start so many ranks here and look at them together", positive),
    Option("--thorough", "hash all data and checkpoints", bool),
    Option("--limit", "seconds for each check that may hang", positive_float, 60.0),
    JSON,
    Option(
        "--node",
        "only whether this node can write to --run and its GPUs answer, for a job's script;"
        " otherwise note it in RUN/bad_nodes and end with 71",
        bool,
        only_with=("run", "limit"),
    ),
    Option("--gpus", "GPUs that must answer", count, 0, requires="node"),
)


def _doctor(options: Options) -> None:
    from foundling.doctor.checks import asked_about
    from foundling.launch.environment import detect_environment, join_slurm
    from foundling.runtime.exits import OUTCOMES, EndOfRun

    if options.node:
        return _node(options)
    if options.settings and not options.target:
        raise ConfigError("settings need a TARGET that they belong to; name one.")
    config = config_of(options.target, options.settings) if options.target else None
    run = options.run or (default_run(options.target) if options.target else None)
    asked = asked_about(config, run, thorough=options.thorough, limit_s=options.limit)
    place = detect_environment(options.nproc)
    if place.kind == "rank":
        if options.nproc is not None:
            raise ConfigError("--nproc has no effect as a rank of a job; give it to the launcher.")
        join_slurm(place)
        code, sentence = _as_rank(asked, run, options)
        if OUTCOMES in os.environ:
            sentence = ""  # our launcher prints the sentence, rank 0 the table
    elif options.nproc is not None or place.kind == "node":
        code, sentence = _launched(config, run, options, place)
    else:
        code, sentence = _alone(asked, options)
    if code:
        raise EndOfRun(code, sentence)
    return None


def _node(options: Options) -> None:
    """The preflight of a node that a SLURM script runs before the training."""
    from foundling.launch.bad_nodes import preflight

    if options.run is None:
        raise ConfigError("--node needs --run RUN, the run directory that the job will write to.")
    preflight(options.run, options.gpus, options.limit)


def _profiles() -> dict[str, dict[str, str]]:
    from foundling.launch.slurm import environment, find_profile

    return {name: environment(find_profile(name), "", {}) for name in _PROFILES}


def _alone(asked: "DoctorRequest", options: Options) -> tuple[int, str]:
    from foundling.doctor.checks import results_json, verdict_of
    from foundling.doctor.examine import examine

    lines = []
    for line in examine(asked, _profiles()):
        lines.append(line)
        if not options.json:
            print(line, flush=True)
    if options.json:
        print_json(results_json([("", lines)]))
    return verdict_of(lines, is_job=False)


def _as_rank(asked: "DoctorRequest", run: Path | None, options: Options) -> tuple[int, str]:
    """Rank 0's exit code is the job's, the others' are their nodes'."""
    from foundling.doctor.checks import gathered, results_json, verdict_of
    from foundling.doctor.examine import examine_together
    from foundling.launch.bad_nodes import note_bad_node

    mine, everything = examine_together(asked, _profiles())
    bad = [line for line in mine if line.level == "fail" and line.of_node]
    if bad and run is not None and run.is_dir():
        note_bad_node(run, bad[0].text)
    if int(os.environ["RANK"]):
        return verdict_of(mine, is_job=True)
    if options.json:
        print_json(results_json(everything))
    else:
        print_lines(gathered(everything))
    return verdict_of([line for _, lines in everything for line in lines], is_job=True)


def _launched(
    config: "RunConfig | None", run: Path | None, options: Options, place: Any
) -> tuple[int, str]:
    """Start this machine's ranks. Their output is kept in a folder of its own, because a run that
    is trained at this moment is locked and may be looked at all the same."""
    from foundling.config.load import dump_yaml
    from foundling.launch.environment import check_nproc, visible_gpus
    from foundling.launch.launcher import LaunchSpec, launch
    from foundling.runtime.exits import EndOfRun, Exit

    words = ["foundling", "doctor", "--limit", str(options.limit)]
    words += ["--run", str(run)] if run else []
    words += ["--thorough"] * options.thorough + ["--json"] * options.json
    if options.nproc is not None and place.kind == "alone":
        check_nproc(options.nproc, uses_gpus=not config or config.train.device in ("auto", "cuda"))
    if place.kind == "node" and run is None:
        raise ConfigError("--run is needed across nodes: a folder that all of them see.")
    with tempfile.TemporaryDirectory(prefix="foundling-doctor-") as folder:
        shared = run / "doctor" if run and place.kind == "node" else None
        job = LaunchSpec(
            run=shared or Path(folder),
            processes=options.nproc or visible_gpus() or 1,
            place=place,
            command=tuple(words),
            settings=dump_yaml(config) if config else "",
            restarts=0,
        )
        try:
            launch(job)
        except EndOfRun as end:
            said = {
                Exit.USER: "checks failed; the lines above say what to do.",
                Exit.NODE: "a machine of the job is unfit; the lines above say which and why.",
            }
            return end.code, said.get(end.code, str(end))
    return 0, ""


_REHEARSE_OPTIONS = (
    TARGET,
    Option(
        "--only",
        "stages to run, of tiny,one,two,mesh (default: all), or proofs on the config as it is:"
        " resume (a resumed run is the same run), data (every world size reads the same rows)",
        comma_list,
        "",
    ),
    Option("--steps", "steps of each training", positive, 24),
    Option("--limit", "seconds that a stage may take", positive_float, 600.0),
    Option("--strict", "no go while a stage could not be run here", bool),
    Option("--nproc", "--only resume: processes (default: as `train`)", positive),
    Option("--worlds", "--only data: world sizes to compare with one", positive_ints, "2,3,8"),
    Option("--folder", "where the temporary runs go (default: /tmp)", Path),
    JSON,
)


def _rehearse(options: Options) -> None:
    from foundling.doctor.rehearse import rehearse, verdict

    for flag, word in (("nproc", "resume"), ("worlds", "data")):
        if flag in options.given and word not in options.only:
            raise ConfigError(f"--{flag} has no effect without --only {word}; give both.")
    config = config_of(options.target, options.settings)
    with tempfile.TemporaryDirectory(prefix="foundling-rehearse-", dir=options.folder) as home:
        points = []
        for point in rehearse(
            config,
            Path(home),
            say_on_stderr,
            limit_s=options.limit,
            steps=options.steps,
            only=options.only,
            processes=options.nproc,
            worlds=options.worlds,
        ):
            points.append(point)
            say_on_stderr(f"  {point.what}: {point.state}")
    is_go, last = verdict(points, strict=options.strict)
    if options.json:
        print_json({"go": is_go, "verdict": last, "points": [asdict(point) for point in points]})
    else:
        print_lines([*points, last])
    if not is_go:
        raise SystemExit(1)


VERBS = {
    "doctor": Verb(
        "see whether this machine, or job, is fit for a run",
        _DOCTOR_OPTIONS,
        _doctor,
        takes_settings=True,
        duration_hint=lambda o: (
            f"most checks take seconds, and one that hangs is ended after {o.limit:g} s"
        ),
    ),
    "rehearse": Verb(
        "roll a run out in stages and say go or no-go",
        _REHEARSE_OPTIONS,
        _rehearse,
        takes_settings=True,
        duration_hint=lambda o: (
            f"{len(o.only) or 4} stages of {o.steps} steps, each a minute or two and"
            f" {o.limit:g} s at most"
        ),
    ),
}
