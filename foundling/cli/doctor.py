"""`foundling doctor` and `rehearse`: is a machine fit, is a resumed run the same run."""

import argparse
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundling.cli.options import (
    Options,
    Settings,
    Verb,
    above_zero,
    count,
    listed,
    positive,
    positives,
    print_json,
    resolved,
    run_name,
)
from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from foundling.config.run import RunConfig
    from foundling.doctor.checks import CheckResult, DoctorRequest


LIMIT_S = 60.0
PROFILES = ("pods", "frontier", "infiniband")
"""Whole sets of variables, tried last."""


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="?", help="preset, YAML file, or run directory")
    parser.add_argument("--run", type=Path, help="run directory to be (default: runs/TARGET)")
    parser.add_argument(
        "--nproc", type=positive, help="start so many ranks here and look at them together"
    )
    parser.add_argument(
        "--node",
        action="store_true",
        help="only whether this node can write to --run and its GPUs answer, for a job's script;"
        " otherwise note it in RUN/bad_nodes and end with 71",
    )
    parser.add_argument("--gpus", type=count, help="--node: GPUs that must answer (default: 0)")
    parser.add_argument(
        "--limit",
        type=above_zero,
        default=LIMIT_S,
        help="seconds for each check that may hang",
    )
    parser.add_argument("--thorough", action="store_true", help="hash all data and checkpoints")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _doctor(options: Options, settings: Settings) -> None:
    from foundling.launch.environment import join_slurm, surroundings
    from foundling.runtime.exits import OUTCOMES, EndOfRun

    if options.node:
        return _node(options, settings)
    if options.gpus is not None:
        raise ConfigError("--gpus has no effect without --node; give both.")
    if settings and not options.target:
        raise ConfigError("settings need a TARGET that they belong to; name one.")
    config = resolved(options.target, settings) if options.target else None
    run = _run(options)
    place = surroundings(options.nproc)
    if place.kind == "rank":
        if options.nproc is not None:
            raise ConfigError("--nproc has no effect as a rank of a job; give it to the launcher.")
        join_slurm(place)
        code, sentence = _as_rank(_doctor_request(config, run, options), run, options)
        if OUTCOMES in os.environ:
            sentence = ""  # our launcher prints the sentence, rank 0 the table
    elif options.nproc is not None or place.kind == "node":
        code, sentence = _launched(config, run, options, place)
    else:
        code, sentence = _alone(_doctor_request(config, run, options), options)
    if code:
        raise EndOfRun(code, sentence)
    return None


def _node(options: Options, settings: Settings) -> None:
    """The preflight of a node that a SLURM script runs before the training."""
    from foundling.launch.bad_nodes import preflight

    if options.run is None:
        raise ConfigError("--node needs --run RUN, the run directory that the job will write to.")
    others = {"TARGET": options.target, "--nproc": options.nproc, "a setting": settings}
    others |= {"--thorough": options.thorough, "--json": options.json}
    if given := [name for name, value in others.items() if value]:
        raise ConfigError(f"{given[0]} has no effect with --node; leave it out.")
    preflight(options.run, options.gpus or 0, options.limit)


def _run(options: Options) -> Path | None:
    if options.run or not options.target:
        run: Path | None = options.run
        return run
    path = Path(options.target)
    home = path if path.is_dir() else path.parent
    return home if (home / "run.json").is_file() else Path("runs") / run_name(options.target)


def _doctor_request(
    config: "RunConfig | None", run: Path | None, options: Options
) -> "DoctorRequest":
    from foundling.doctor.checks import asked_about

    return asked_about(config, run, thorough=options.thorough, limit_s=options.limit)


def _profiles() -> dict[str, dict[str, str]]:
    from foundling.launch.slurm import environment, find_profile

    return {name: environment(find_profile(name), "", {}) for name in PROFILES}


def _alone(asked: "DoctorRequest", options: Options) -> tuple[int, str]:
    from foundling.doctor.examine import examine

    lines = []
    for line in examine(asked, _profiles()):
        lines.append(line)
        if not options.json:
            print(line, flush=True)
    if options.json:
        print_json(_tree([("", lines)]))
    return _verdict(lines, is_job=False)


def _as_rank(asked: "DoctorRequest", run: Path | None, options: Options) -> tuple[int, str]:
    """Rank 0's exit code is the job's, the others' are their nodes'."""
    from foundling.doctor.checks import gathered
    from foundling.doctor.examine import examine_together
    from foundling.launch.bad_nodes import note_bad_node

    mine, everything = examine_together(asked, _profiles())
    bad = [line for line in mine if line.level == "fail" and line.of_node]
    if bad and run is not None and run.is_dir():
        note_bad_node(run, bad[0].text)
    if int(os.environ["RANK"]):
        return _verdict(mine, is_job=True)
    if options.json:
        print_json(_tree(everything))
    else:
        for line in gathered(everything):
            print(line)
    return _verdict([line for _, lines in everything for line in lines], is_job=True)


def _launched(
    config: "RunConfig | None", run: Path | None, options: Options, place: Any
) -> tuple[int, str]:
    """Start this machine's ranks. Their output is kept in a folder of its own, because a run that
    is trained at this moment is locked and may be looked at all the same."""
    from foundling.config.load import dump_yaml
    from foundling.launch.environment import refuse_crowd, visible_gpus
    from foundling.launch.launcher import LaunchSpec, launch
    from foundling.runtime.exits import EndOfRun, Exit

    words = ["foundling", "doctor", "--limit", str(options.limit)]
    words += ["--run", str(run)] if run else []
    words += ["--thorough"] * options.thorough + ["--json"] * options.json
    if options.nproc is not None and place.kind == "alone":
        refuse_crowd(options.nproc, uses_gpus=not config or config.train.device in ("auto", "cuda"))
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


def _tree(by_rank: "list[tuple[str, Any]]") -> dict[str, Any]:
    from foundling.doctor.checks import worst

    every = [line for _, lines in by_rank for line in lines]
    return {
        "level": worst(every),
        "ranks": [
            {"who": who, "lines": [asdict(line) for line in lines]} for who, lines in by_rank
        ],
    }


def _verdict(lines: "list[CheckResult]", *, is_job: bool) -> tuple[int, str]:
    """Exit code and last sentence: 71 where a machine of a job is unfit, 2 for the rest."""
    from foundling.runtime.exits import Exit

    bad = [line for line in lines if line.level == "fail"]
    if not bad:
        return Exit.OK, ""
    plural = "s" if len(bad) > 1 else ""
    sentence = f"{len(bad)} check{plural} failed: {', '.join(dict.fromkeys(b.check for b in bad))}."
    if is_job and any(line.of_node for line in bad):
        return Exit.NODE, sentence
    return Exit.USER, sentence


def _rehearse_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="preset, YAML file, or run directory")
    parser.add_argument(
        "--only",
        help="stages to run, of tiny,one,two,mesh (default: all), or proofs on the config as it is:"
        " resume (a resumed run is the same run), data (every world size reads the same rows)",
    )
    parser.add_argument(
        "--nproc", type=positive, help="--only resume: processes (default: as `train`)"
    )
    parser.add_argument(
        "--worlds",
        type=positives,
        help="--only data: numbers of processes to compare with one (default: 2,3,8)",
    )
    parser.add_argument("--steps", type=positive, default=24, help="steps of each training")
    parser.add_argument(
        "--limit", type=above_zero, default=600.0, help="seconds that a stage may take"
    )
    parser.add_argument(
        "--strict", action="store_true", help="no go while a stage could not be run here"
    )
    parser.add_argument("--folder", type=Path, help="where the temporary runs go (default: /tmp)")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _rehearse(options: Options, settings: Settings) -> None:
    from foundling.doctor.rehearse import WORLDS, rehearse, verdict
    from foundling.runtime.console import console

    only = listed(options.only)
    for flag, word in (("nproc", "resume"), ("worlds", "data")):
        if getattr(options, flag) and word not in only:
            raise ConfigError(f"--{flag} has no effect without --only {word}; give both.")

    def say(text: str) -> None:
        console(stderr=True).print(text, markup=False)

    config = resolved(options.target, settings)
    with tempfile.TemporaryDirectory(prefix="foundling-rehearse-", dir=options.folder) as home:
        points = []
        for point in rehearse(
            config,
            Path(home),
            say,
            limit_s=options.limit,
            steps=options.steps,
            only=only,
            processes=options.nproc,
            worlds=options.worlds or WORLDS,
        ):
            points.append(point)
            say(f"  {point.what}: {point.state}")
    is_go, last = verdict(points, strict=options.strict)
    if options.json:
        print_json({"go": is_go, "verdict": last, "points": [asdict(point) for point in points]})
    else:
        for point in points:
            print(point)
        print(last)
    if not is_go:
        raise SystemExit(1)


DOCTOR_VERBS = {
    "doctor": Verb(
        "see whether this machine, or job, is fit for a run",
        _options,
        _doctor,
        takes_settings=True,
        duration_hint=lambda o: (
            f"most checks take seconds, and one that hangs is ended after {o.limit:g} s"
        ),
    ),
    "rehearse": Verb(
        "roll a run out in stages and say go or no-go",
        _rehearse_options,
        _rehearse,
        takes_settings=True,
        duration_hint=lambda o: (
            f"{len(listed(o.only)) or 4} stages of {o.steps} steps, each a minute or two and"
            f" {o.limit:g} s at most"
        ),
    ),
}
