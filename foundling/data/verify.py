"""`data verify`: everything about a data set that can be checked.

    the manifest       its own digest, names inside the folder, the tokenizer's fingerprint
    the shards         size and sha256, read again from disk
    the documents      counts, boundaries, BOS and EOS, ids within the vocabulary, the loss mask
    the source         its checksums are those of the recipe

A shard is opened only after its checksum was right: Arrow believes what a file says about itself,
and a flipped bit there can end the process.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from foundling.config.data_manifest import Manifest
from foundling.config.errors import DataError, UserError
from foundling.data.dataset import TOKENIZER_FOLDER
from foundling.data.open_source import VILLAGE, open_source
from foundling.data.readers.source import ReadOptions, Source
from foundling.data.shard import Progress, all_shards, damage, own_tokenizer
from foundling.tokenizer.tokenizer import Tokenizer


@dataclass
class Findings:
    """Filled by the checks of `data verify`, one after another."""

    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """What was left out and why; a check that is skipped in silence is a lie."""
    wrong: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return {"whole": not self.wrong, **asdict(self)}

    def refuse(self) -> None:
        """Raise what is wrong, if anything is: the first finding, and how many more there are."""
        if not self.wrong:
            return
        more = len(self.wrong) - 1
        also = f" ({more} more finding{'s' * (more > 1)} listed above)" if more else ""
        raise DataError(self.wrong[0].removesuffix(".") + also + ".")


def verify(
    folder: str | Path,
    *,
    specs: Sequence[str] = (),
    workers: int = 0,
    progress: Progress | None = None,
) -> Findings:
    """Check a data set; `specs` are its sources where the recipe does not say where they are.

    A manifest that cannot be believed is refused at once: without it there is nothing to compare
    with.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    found = Findings(checked=["the manifest agrees with its digest"])
    found.wrong += misnamed(folder, manifest)
    if found.wrong:
        found.unchecked.append("shards and source, because the manifest names other files")
        return found
    tokenizer = _tokenizer(folder, manifest, found)
    whole = _shards(folder, manifest, tokenizer, found, workers, progress)
    if tokenizer is None or not whole:
        found.unchecked.append("the source, because what was made of it is not whole")
    elif not manifest.complete:
        found.unchecked.append("the source, because the build has not reached its end")
    else:
        compare_with_source(folder, manifest, found, specs)
    return found


def misnamed(folder: Path, manifest: Manifest) -> list[str]:
    """A sentence for every shard name that is twice there or leads out of the folder."""
    wrong = []
    seen: set[str] = set()
    for info in all_shards(manifest):
        path = PurePosixPath(info.name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            wrong.append(f"{folder} has a manifest that names {info.name}, outside the data set.")
        elif info.name in seen:
            wrong.append(f"{folder} has a manifest that names {info.name} twice.")
        seen.add(info.name)
    return wrong


def _tokenizer(folder: Path, manifest: Manifest, found: Findings) -> Tokenizer | None:
    """The data set's own tokenizer, if it is the one its tokens were made with."""
    path = folder / TOKENIZER_FOLDER
    try:
        tokenizer = own_tokenizer(path, manifest)
    except DataError as error:
        found.wrong.append(str(error))
        return None
    found.checked.append(f"the tokenizer is {manifest.tokenizer[:12]}, as the manifest says")
    return tokenizer


def _shards(
    folder: Path,
    manifest: Manifest,
    tokenizer: Tokenizer | None,
    found: Findings,
    workers: int,
    progress: Progress | None,
) -> bool:
    """Hash and look through every shard, some at a time; True if all are whole."""
    infos = all_shards(manifest)
    wrong = damage(folder, manifest, lambda: tokenizer, workers=workers, progress=progress)
    found.wrong += wrong
    count, documents = len(infos), sum(info.documents for info in infos)
    size = sum(info.file_bytes for info in infos)
    found.checked.append(f"{count} shards hashed ({size:,} bytes), {documents:,} documents in them")
    unlisted = _unlisted(folder, manifest)
    if unlisted:
        found.unchecked.append(f"{len(unlisted)} shards that the manifest does not name")
    if tokenizer is None:
        found.unchecked.append("BOS and EOS, because the tokenizer is not the manifest's")
    return not wrong


def _unlisted(folder: Path, manifest: Manifest) -> list[Path]:
    """Shards that the manifest does not list: left by a build that goes on, or copied there."""
    listed = {folder / info.name for info in all_shards(manifest)}
    there = (path for split in ("train", "val") for path in (folder / split).glob("*.arrow"))
    return sorted(path for path in there if path not in listed)


# Whether the source of a data set is what the build read: files by their checksums.
#
# The recipe in the manifest says how each source was opened and what it was; it is opened in the
# same way and must say the same of itself. Rejected: tokenising a sample of it again and looking
# for that among the shuffled documents: two hundred lines against a change of tokens for
# others and makes checksums and manifest fit.


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
