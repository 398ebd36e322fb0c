"""`foundling checkpoint ...`: what checkpoints a run has, whether they are whole, which stay."""

import argparse
from typing import TYPE_CHECKING, Any

from foundling.config.errors import CheckpointError
from foundling.verbs.base import Options, Settings, Verb, print_json

if TYPE_CHECKING:
    from foundling.checkpoint import Sighting


def _list_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory, or a folder or address of checkpoints")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _list(options: Options, settings: Settings) -> None:
    from foundling.checkpoint import home_of_target, survey

    found = list(survey(home_of_target(options.run)))
    if options.json:
        return print_json([_fields(sighting) for sighting in found])
    if not found:
        print(f"no checkpoints in {options.run}")
    for sighting in found:
        print(_line(sighting))
    return None


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="run directory, RUN@STEP or one checkpoint")
    parser.add_argument("--all", action="store_true", help="every checkpoint of the run")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _verify(options: Options, settings: Settings) -> None:
    from foundling.checkpoint import check_target

    seen: list[Sighting] = []
    for sighting in check_target(options.target, all_of_them=options.all):
        seen.append(sighting)
        if not options.json:
            print(_line(sighting), flush=True)
    if options.json:
        print_json([_fields(sighting) for sighting in seen])
    damaged = [sighting for sighting in seen if sighting.state == "damaged"]
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} of {len(seen)} checkpoints of {options.target} cannot be used (step"
            f" {', '.join(str(sighting.step) for sighting in damaged)}); `train` goes on from the"
            " newest whole one."
        )


def _pin_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="RUN@STEP or RUN/checkpoints/step-N")


def _pin(options: Options, settings: Settings) -> None:
    from foundling.checkpoint import named_checkpoint, pin

    home, step = named_checkpoint(options.checkpoint)
    pin(home, step)
    print(f"step {step} of {home} stays, whatever checkpoint.keep says")


def _unpin(options: Options, settings: Settings) -> None:
    from foundling.checkpoint import named_checkpoint, pinned, unpin

    home, step = named_checkpoint(options.checkpoint)
    if step not in pinned(home):
        raise CheckpointError(f"step {step} of {home} is not pinned.")
    unpin(home, step)
    print(f"step {step} of {home} goes when checkpoint.keep says so")


def _fields(sighting: "Sighting") -> dict[str, Any]:
    return {**vars(sighting), "path": str(sighting.path)}


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _line(sighting: "Sighting") -> str:
    size = _size(sighting.bytes) if sighting.bytes else ""
    notes = ["pinned"] if sighting.pinned else []
    notes += [f"score {sighting.score:g}"] if sighting.score is not None else []
    notes += [sighting.reason] if sighting.reason else [str(sighting.path)]
    return f"step {sighting.step:<9} {sighting.state:<9} {size:>8}  {', '.join(notes)}"


VERBS = {
    "checkpoint list": Verb("list a run's checkpoints", _list_options, _list),
    "checkpoint verify": Verb(
        "read checkpoints and compare checksums",
        _verify_options,
        _verify,
        lasts="every byte is read once, about a second for a gigabyte",
    ),
    "checkpoint pin": Verb("never delete a checkpoint", _pin_options, _pin),
    "checkpoint unpin": Verb("let the keep rules decide again", _pin_options, _unpin),
}
