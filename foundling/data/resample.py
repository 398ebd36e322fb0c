"""Whether the source of a data set is what the build read: files by their checksums.

The recipe in the manifest says how each source was opened and what it was; it is opened in the same
way and must say the same of itself. Rejected: tokenising a sample of it again and looking for that
among the shuffled documents: two hundred lines against somebody who exchanges tokens for others and
makes checksums and manifest fit.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from foundling.config.errors import UserError
from foundling.config.manifest import Manifest
from foundling.data.findings import Findings
from foundling.data.sources import ReadOptions, Source, open_source

VILLAGE = ("hamlet", "hamlet:chat")
"""Sources that are everywhere."""


def compare_with_source(
    folder: Path, manifest: Manifest, found: Findings, specs: Sequence[str]
) -> None:
    """Add to `found` whether the sources are what they were."""
    if _is_as_before(folder, manifest, specs, found):
        names = ", ".join(str(recipe.get("source")) for recipe in recipes_of(manifest))
        found.checked.append(f"the source ({names}) is what the build read, as its recipe says")


def recipes_of(manifest: Manifest) -> list[dict[str, Any]]:
    """What each source of a data set was."""
    recipe = manifest.recipe.get("source", {})
    parts = recipe if isinstance(recipe, list) else recipe.get("sources", [recipe])
    return [part for part in parts if isinstance(part, dict) and part]


def _is_as_before(folder: Path, manifest: Manifest, specs: Sequence[str], found: Findings) -> bool:
    """Whether all sources are there and are what the recipe says; if not, `found` says why."""
    recipes = recipes_of(manifest)
    if not recipes:
        found.unchecked.append("the source, because the manifest does not say what it was")
        return False
    if specs and len(specs) != len(recipes):
        names = ", ".join(str(recipe.get("source")) for recipe in recipes)
        found.wrong.append(
            f"{folder} was built from {len(recipes)} sources ({names}) and --source names"
            f" {len(specs)}; name each once, in this order."
        )
        return False
    for number, recipe in enumerate(recipes):
        spec = specs[number] if specs else str(recipe.get("source"))
        asked = bool(specs) or spec in VILLAGE
        why = _changed(spec, recipe) if asked or Path(spec).exists() else "is not here"
        if why and asked:
            found.wrong.append(f"{folder} {why}")
            return False
        if why:
            # A file of that name may be here by chance; only a named source can be wrong.
            found.unchecked.append(
                f"the source, because {spec} is not here; say with --source where it is"
            )
            return False
    return True


def _changed(spec: str, recipe: dict[str, Any]) -> str:
    """How the sentence about a source ends that is not what the recipe says; empty if it is."""
    try:
        now = json.loads(json.dumps(_open(spec, recipe).recipe))
    except UserError as error:
        return f"has a source that cannot be read again: {error}"
    if now == recipe:
        return ""
    return (
        f"was built from something else than {spec} holds now ({_difference(now, recipe)});"
        " bring the old source back or build the data set again."
    )


def _open(spec: str, recipe: dict[str, Any]) -> Source:
    """As the build opened it."""
    known = {field.name for field in fields(ReadOptions)}
    read = {key: value for key, value in recipe.get("read", {}).items() if key in known}
    if "where" in read:
        read["where"] = tuple(read["where"])
    given = {key: recipe[key] for key in ("seed", "val_share") if key in recipe}
    return open_source(
        spec, documents=recipe.get("documents"), options=ReadOptions(**read), **given
    )


def _difference(now: dict[str, Any], then: dict[str, Any]) -> str:
    """The first thing that differs between two recipes, in a few words."""
    files, before = now.get("files"), then.get("files")
    if isinstance(files, dict) and isinstance(before, dict) and files != before:
        if len(files) != len(before):
            return f"{len(files)} files, not {len(before)}"
        for number, stated in before.items():
            if list(files.get(number, ())) != list(stated):
                return f"{stated[0]} has changed"
    keys = (key for key in {**then, **now} if now.get(key) != then.get(key))
    return f"{next(keys, 'something')} differs"
