"""`foundling convert`: a model from one layout into another, compared before it gets its name."""

import argparse
from pathlib import Path

from foundling.config.errors import ConfigError
from foundling.verbs.base import Options, Settings, Verb, print_json

LAYOUTS = ("native", "hf", "llama", "torch", "dcp")
DTYPES = ("fp32", "bf16", "fp16")


def _convert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", help="run, RUN@STEP, Hugging Face, Meta or DCP folder, or torch.save file"
    )
    parser.add_argument("target", type=Path, help="folder (torch: file) to write; must not exist")
    parser.add_argument("--to", choices=LAYOUTS, required=True, help="layout of the result")
    parser.add_argument("--dtype", choices=DTYPES, help="precision (default: as it is stored)")
    parser.add_argument(
        "--shape", help="preset, config or model that says what a bare source does not"
    )
    parser.add_argument("--shard-gb", type=_gigabytes, default=5.0, help="largest shard of hf, GB")
    parser.add_argument("--push", metavar="OWNER/NAME", help="then upload it to the hub (hf only)")
    parser.add_argument("--private", action="store_true", help="make the hub's repository private")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def _convert(options: Options, settings: Settings) -> None:
    if options.push and options.to != "hf":
        raise ConfigError("--push uploads Hugging Face folders; add --to hf.")
    if options.private and not options.push:
        raise ConfigError("--private has no effect without --push.")
    from foundling.checkpoint.convert.push import check_name, push
    from foundling.checkpoint.convert.run import convert
    from foundling.runtime.log import say

    if options.push:
        check_name(options.push)
    tell = (lambda text: None) if options.json else say
    source, found = convert(
        options.source,
        options.target,
        options.to,
        dtype=options.dtype,
        shape=options.shape,
        shard_bytes=int(options.shard_gb * 10**9),
        name=options.push or "",
        tell=tell,
    )
    address = push(options.target, options.push, private=options.private) if options.push else None
    if options.json:
        facts = {"source": source.kind, "step": source.step, "to": options.to}
        print_json({**facts, **vars(found), "pushed": address})
        return
    for note in source.notes:
        print(note)
    of_step = f" of step {source.step}" if source.kind == "native" else ""
    print(
        f"{options.target}: {found.tensors} tensors{of_step}, each as in the source; logits on"
        f" {found.tokens} tokens of text differ by at most {found.largest:.3g} (they reach"
        f" {found.scale:.3g}; source through {found.source_through}, result through"
        f" {found.result_through})"
    )
    if address:
        print(f"uploaded to {address}")


def _gigabytes(text: str) -> float:
    from foundling.verbs.base import above_zero

    return above_zero(text)


VERBS = {
    "convert": Verb(
        "a model from one layout into another, compared",
        _convert_options,
        _convert,
        lasts="read, written, read back and compared: seconds for each gigabyte",
    ),
}
