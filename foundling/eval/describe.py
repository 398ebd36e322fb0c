"""Scores as a table for a person, each with what it rests on."""

from collections.abc import Container, Mapping
from typing import Any


def describe_tasks(scores: Mapping[str, Any], names: Container[str] | None = None) -> list[str]:
    """One line a task, then CORE; where `names` are given, no others that the folder has."""
    lines = [f"{'task':<34} {'value':>8} {'±':>7} {'centred':>8} {'n':>7}"]
    for name, entry in scores["tasks"].items():
        if names is not None and name not in names:
            continue
        middle = entry.get("centered")
        told = "" if middle is None else f"{middle:.4f}"
        lines.append(
            f"{entry.get('name', name):<34} {entry['value']:>8.4f} {entry['stderr']:>7.4f}"
            f" {told:>8} {entry['n']:>7,}"
        )
        lines += _details(entry)
    core = scores.get("core")
    if core and (names is None or "core" in names):
        lines.append(
            f"{_core_name(core):<34} {core['value']:>8.4f} {core['stderr']:>7.4f} {'':>8}"
            f" {core['n']:>7,}"
        )
        if core["partial"]:
            lines.append(f"  not CORE: {', '.join(core['missing'])} missing")
        if core.get("shots") is not None:
            lines.append(
                "  not CORE: --shots replaced the suite's own numbers of solved examples; leave it"
                " out to compare with others"
            )
    return lines


def _core_name(core: Mapping[str, Any]) -> str:
    """`core_partial_5_shots` for a person."""
    marks = ["CORE", *(["partial"] if core["partial"] else [])]
    shots = core.get("shots")
    return ", ".join(marks if shots is None else [*marks, f"--shots {shots}"])


def _details(entry: Mapping[str, Any]) -> list[str]:
    """What a score has besides its value."""
    named = [name for name in entry if name == "f1" or name.startswith("pass@")]
    lines = [f"  {name} {entry[name]:.4f}" for name in named]
    if "perplexity_per_token" in entry:
        lines.append(f"  perplexity {entry['perplexity_per_token']:.3f} a token")
    for name, part in entry.get("by_source", {}).items():
        lines.append(f"  {name}: {part['value']:.4f} bits per byte ({part['bytes']:,} bytes)")
    for name in ("clean", "contaminated"):
        if name in entry:
            part = entry[name]
            value = "" if part["value"] is None else f" {part['value']:.4f} ±{part['stderr']:.4f}"
            lines.append(f"  {name}:{value} ({part['n']:,} examples)")
    for prompt, text in entry.get("texts", {}).items():
        lines.append(f"  {prompt}{text!r}")
    return lines
