"""`foundling selftest ...`: proofs on the owner's own config and machine."""

import argparse
import tempfile
from pathlib import Path

from foundling.verbs.base import Options, Settings, Verb, listed, positive, resolved

WORLDS = "2,3,8"


def _resume_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="preset, YAML file, or run directory")
    parser.add_argument("--steps", type=positive, default=20, help="steps to train (or to compare)")
    parser.add_argument(
        "--data-only", action="store_true", help="train nothing, compare the stream of batches"
    )
    parser.add_argument(
        "--worlds", default=WORLDS, help="--data-only: numbers of processes to compare with one"
    )
    parser.add_argument("--nproc", type=positive, help="processes (default: as `train`)")
    parser.add_argument("--folder", type=Path, help="where the temporary runs go (default: /tmp)")


def _resume(options: Options, settings: Settings) -> None:
    from foundling.doctor import data_findings, prove_resume, rehearsal
    from foundling.runtime.log import say

    config = resolved(options.target, settings)
    claim = "a resumed run is the same run"
    if options.data_only:
        claim = "the stream of batches is the same for every reader"
        worlds = [positive(word) for word in listed(options.worlds)]
        findings = data_findings(config, worlds=worlds, steps=options.steps)
    else:
        short = rehearsal(config, options.steps)
        with tempfile.TemporaryDirectory(prefix="foundling-selftest-", dir=options.folder) as home:
            findings = prove_resume(short, Path(home), say, processes=options.nproc)
    for finding in findings:
        say(f"  {finding}")
    failed = [finding.what for finding in findings if not finding.same]
    if failed:
        say(f"FAILED: it is not so that {claim} ({', '.join(failed)})")
        raise SystemExit(1)
    say(f"passed: {claim}")


VERBS = {
    "selftest resume": Verb(
        "prove that a stopped and resumed run is the same run",
        _resume_options,
        _resume,
        takes_settings=True,
        lasts=lambda o: (
            f"{o.steps} steps in several short runs, a line after each; a start of `train` takes"
            " 5 s and more"
        ),
    )
}
