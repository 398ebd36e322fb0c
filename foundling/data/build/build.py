"""Sources to a data set, in three phases, with the same bytes from every executor.

1. Every piece of the sources becomes part files: encoded, split, hashed; in any order, by any
   number of workers, here or on a cluster (encode.py, executor.py).
2. What stays is decided in the order of the parts: duplicates, overlap with evaluation sets, the
   budget of tokens (scheduler.py, select.py).
3. What stays is shuffled as a whole and written as shards, and last of all the manifest
(shard_writer.py).

Work in progress lives in `.build` inside the folder; killed at any instant and started again, a
build goes on and ends with the same files. A folder that holds something else is never touched.

    DIR/manifest.json           written last: a folder without it is not a data set
    DIR/train/shard-00000.arrow ...
    DIR/val/shard-00000.arrow ...
    DIR/tokenizer/              what the tokens were made with
    DIR/quarantine.jsonl        rows that could not be used, with place and reason
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from foundling.config.data_manifest import MANIFEST_NAME, Manifest, ShardInfo
from foundling.config.errors import ConfigError, DataError
from foundling.data.build import encode
from foundling.data.build.decontaminate import Overlap, evaluation_texts
from foundling.data.build.encode import EncodeJob
from foundling.data.build.executor import ENGINES, EngineName, Executor, Here, Workers
from foundling.data.build.scheduler import BuildProgress, Progress, Scheduler, total_pieces
from foundling.data.build.select import Duplicates, Selection
from foundling.data.build.shard_writer import (
    BadRows,
    ShardWriter,
    reason_of,
    wave_end,
    write_quarantine,
)
from foundling.data.dataset import TOKENIZER_FOLDER
from foundling.data.open_source import VILLAGE, Specs
from foundling.data.readers.source import InMemorySource, Row, as_sources
from foundling.runtime.console import warn
from foundling.runtime.files import fsync_dir, naming_full_disk, refuse_file, write_text_atomic
from foundling.runtime.lock import RunLock
from foundling.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from foundling.data.readers.source import Source

WORK_FOLDER = ".build"
QUARANTINE = "quarantine.jsonl"
SMALL_TOKENS = 300_000
"""A budget below this is done before worker processes have started."""
CHARS_A_TOKEN = 8
"""More than any text has: a small budget needs no large part."""


def build(
    sources: "Source | Sequence[Source] | Iterable[Row]",
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    name: str | None = None,
    kind: Literal["text", "chat"] | None = None,
    shard_tokens: int = 100_000_000,
    val_share: float = 0.02,
    max_tokens: int | None = None,
    seed: int = 1,
    recipe: dict[str, Any] | None = None,
    keep_duplicates: bool = False,
    decontaminate: Sequence[str] = (),
    follow: bool = False,
    max_bad: float = 0.05,
    allow_broken_files: bool = False,
    workers: int = 1,
    engine: EngineName = "local",
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """Build a data set, go on with one that was interrupted, or return the finished one.

    `max_tokens` stops after that many tokens for training; `val_share` holds out rows whose source
    does not decide; `decontaminate` names evaluation sets whose text must not be in it; `follow`
    writes shards in waves, for training that starts before the end. `recipe` (default: the
    sources' own) says what the rows are, and a folder that was begun with another recipe or other
    settings is refused. What follows changes no byte and may differ from start to start: `max_bad`
    (the share of unusable rows that stops the build), `allow_broken_files` (a file that breaks off
    does not stop it; what is lost counts as unusable), `workers` and `engine`.
    """
    opened = as_sources(sources, name, kind, recipe)
    overlap = Overlap.of(evaluation_texts(decontaminate)) if decontaminate else None
    plan = _plan(opened, name, recipe, tokenizer)
    settings = plan["build"]
    settings.update(
        shard_tokens=shard_tokens, val_share=val_share, max_tokens=max_tokens, seed=seed
    )
    # Only what was asked for is named, so that older data sets are still known by their plan.
    if keep_duplicates:
        settings["keep_duplicates"] = True
    if overlap is not None:
        settings["decontaminated"] = overlap.digest
    if follow:
        settings["follow"] = True
    plan = json.loads(json.dumps(plan))
    folder = Path(folder)
    begun = _begun(folder, plan)
    if begun is not None and begun.complete:
        shutil.rmtree(folder / WORK_FOLDER, ignore_errors=True)
        return begun
    _claim(folder, plan, begun is not None)
    with RunLock(folder / WORK_FOLDER):
        bad = BadRows(max_bad, max_tokens, allow_broken_files)
        work = _Build(folder, opened, tokenizer, plan, bad, begun, progress)
        if overlap is not None:
            overlap.save(work.overlap_file)
        in_process = (
            isinstance(opened[0], InMemorySource) or (max_tokens or SMALL_TOKENS) < SMALL_TOKENS
        )
        return work.run(engine, 1 if in_process and engine == "local" else workers)


def build_from_specs(
    specs: Specs,
    tokenizer: str | Path | None,
    folder: Path,
    *,
    filters: Sequence[str] = (),
    max_tokens: int | None = None,
    workers: int | None = None,
    engine: EngineName = "local",
    **settings: Any,
) -> Manifest:
    """`build` from sources by their names, with progress shown and warnings of what it lacks.

    `tokenizer` is a folder or hf://OWNER/NAME, and may be None where all sources are recipes;
    `filters` are datatrove's; `workers` None takes one a core. The rest is as of `build`.
    """
    from foundling.data.hub.recipes import is_remote

    named = _tokenizer_folder(tokenizer, specs.specs)
    if set(specs.specs) & set(VILLAGE) and max_tokens is None and specs.documents is None:
        raise ConfigError("hamlet never ends by itself; say how much with --tokens.")
    if specs.options.get("stream") and not any(map(is_remote, specs.specs)):
        raise ConfigError("--stream has no effect on files of this machine; leave it out.")
    opened, count = Tokenizer.load(named), _worker_count(workers, engine)
    sources: Sequence[Any] = specs.open()
    if filters:
        from foundling.data.build.quality import filtered

        sources = filtered(sources, filters, folder, count)
    with BuildProgress() as meter, naming_full_disk(folder):
        manifest = build(
            sources,
            opened,
            folder,
            max_tokens=max_tokens,
            val_share=specs.val_share,
            seed=specs.seed,
            workers=count,
            engine=engine,
            progress=meter.show,
            **settings,
        )
    _warn_of_lack(folder, manifest, max_tokens)
    return manifest


def _tokenizer_folder(name: str | Path | None, specs: Sequence[str]) -> Path:
    """The folder of the tokenizer, fetched where it is not on this machine."""
    from foundling.data.hub.recipes import RECIPE_TOKENIZER, recipe_of

    if name is None and all(recipe_of(spec) is not None for spec in specs):
        name = RECIPE_TOKENIZER
    if name is None:
        raise ConfigError(
            "name a tokenizer with --tokenizer; `foundling tokenizer train` makes one."
        )
    if not str(name).startswith("hf://"):
        return Path(name)
    from foundling.data.hub.opening import fetch_tokenizer

    folder, _ = fetch_tokenizer(str(name), None)
    return folder


def _worker_count(asked: int | None, engine: EngineName) -> int:
    if asked:
        most = 4 * max(os.cpu_count() or 1, 16)
        if engine == "local" and asked > most:
            raise ConfigError(
                f"--workers {asked} is more than this machine can use; give at most {most}, best"
                " one a core."
            )
        return asked
    if hasattr(os, "sched_getaffinity"):  # what a container or a job may use, not what there is
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _warn_of_lack(folder: Path, manifest: Manifest, max_tokens: int | None) -> None:
    if max_tokens is not None and manifest.train_tokens < max_tokens:
        warn(
            f"{folder} has {manifest.train_tokens:,} tokens where --tokens asks for"
            f" {max_tokens:,}: the source holds no more; add sources, or plan for repeats."
        )
    if unknown := manifest.recipe.get("result", {}).get("unknown_tokens"):
        warn(
            f"{unknown:,} tokens of {folder} are the tokenizer's unknown token, and the text that"
            " they stand for is lost; give a tokenizer that has tokens for it."
        )
    if not manifest.val:
        warn(f"{folder} holds nothing out, so no run on it will have a held-out score.")


def _plan(
    sources: "Sequence[Source]",
    name: str | None,
    recipe: dict[str, Any] | None,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Everything that decides the bytes."""
    if recipe is None:
        recipes = [source.recipe for source in sources]
        recipe = recipes[0] if len(recipes) == 1 else {"sources": recipes}
    settings = {
        "name": name or "+".join(dict.fromkeys(source.name for source in sources)),
        "kind": sources[0].kind,
        "tokenizer": tokenizer.fingerprint,
    }
    return {"source": recipe, "build": settings}


def _begun(folder: Path, plan: dict[str, Any]) -> Manifest | None:
    """The manifest of the same build, if it is there; another build's is refused."""
    if not (folder / MANIFEST_NAME).exists():
        return None
    manifest = Manifest.load(folder)
    if {key: manifest.recipe.get(key) for key in plan} != plan:
        raise DataError(
            f"{folder} already holds the data set {manifest.name!r}, built from something else or"
            " with other settings; choose another folder or remove it."
        )
    return manifest


def _claim(folder: Path, plan: dict[str, Any], ours: bool) -> None:
    """Make the folder this build's own, or see that it already is."""
    claim = folder / WORK_FOLDER / "plan.json"
    if claim.is_file():
        if json.loads(claim.read_text(encoding="utf-8")) != plan:
            raise DataError(
                f"{folder} holds an unfinished build of something else or with other settings;"
                " choose another folder or remove it."
            )
        return
    refuse_file(folder)
    # A kill may come before the claim is written: an empty work folder has no owner.
    others = folder.is_dir() and any(entry.name != WORK_FOLDER for entry in folder.iterdir())
    if others and not ours:
        raise DataError(f"{folder} is not empty and holds no data set; choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(claim, json.dumps(plan, indent=2) + "\n")


class _Build:
    """One start of a build, holding the folder's lock."""

    def __init__(
        self,
        folder: Path,
        sources: "Sequence[Source]",
        tokenizer: Tokenizer,
        plan: dict[str, Any],
        bad_rows: BadRows,
        begun: Manifest | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.folder, self.work = folder, folder / WORK_FOLDER
        self.sources, self.tokenizer, self.plan = sources, tokenizer, plan
        self.progress, self.bad_rows = progress, bad_rows
        self.settings = plan["build"]
        self.budget: int | None = self.settings["max_tokens"]
        self.overlap_file = self.work / "overlap.npy"
        self.job = self._job()
        self.scheduler = Scheduler(sources, self.job, self.work / "parts")
        one_of_each = not self.settings.get("keep_duplicates") and not all(
            source.draws for source in sources
        )
        duplicates = Duplicates(self.work / "hashes") if one_of_each else None
        self.selection = Selection(duplicates, self.budget)
        self.shard_writer = ShardWriter(
            folder=folder,
            work=self.work,
            seed=self.settings["seed"],
            shard_tokens=self.settings["shard_tokens"],
        )
        self.begun = begun
        self.train: tuple[ShardInfo, ...] = ()
        self.val: tuple[ShardInfo, ...] = ()
        self.written = 0
        """Parts whose shards are written."""
        self.wave = 0

    def _job(self) -> EncodeJob:
        budget = self.budget
        chars = encode.PART_CHARS
        return EncodeJob(
            tokenizer=str(self.work / TOKENIZER_FOLDER),
            chat=self.settings["kind"] == "chat",
            val_share=self.settings["val_share"],
            wide=self.tokenizer.vocab_size > 1 << 16,
            part_rows=encode.PART_ROWS,
            part_chars=chars if budget is None else min(chars, CHARS_A_TOKEN * budget),
            overlap=str(self.overlap_file) if "decontaminated" in self.settings else "",
        )

    def run(self, engine_name: EngineName, workers: int) -> Manifest:
        """All phases."""
        engine = self._executor(engine_name, workers)
        total = total_pieces(self.sources) if self.progress and self.budget is None else None
        scheduler, selection = self.scheduler, self.selection
        try:
            while not (
                selection.full
                or (scheduler.exhausted and selection.taken == len(scheduler.reached))
            ):
                engine.run(scheduler, partial(self._enough, self._goal(), total))
                scheduler.advance()
                selection.take(scheduler.reached[selection.taken :])
                self._write_waves()
        finally:
            engine.close()
        return self._finish()

    def _executor(self, name: EngineName, workers: int) -> Executor:
        if name == "local" and workers == 1:
            return Here(self.job.open(self.tokenizer))
        if name == "local":
            return Workers(self.job, self.tokenizer, workers)
        if name == "ray":
            from foundling.data.build.executor_cluster import RayTasks

            return RayTasks(self.job, self.tokenizer)
        if name == "slurm":
            from foundling.data.build.executor_cluster import SlurmArray

            self.tokenizer.save(Path(self.job.tokenizer))
            has_budget = self.budget is not None
            return SlurmArray(self.job, self.work, workers=workers, budget=has_budget)
        raise ConfigError(f"{name!r} is no engine; use one of {', '.join(ENGINES)}.")

    def _goal(self) -> float:
        """Tokens of the frontier, before anything is dropped, at which to decide again."""
        ends = [end for end in (self.budget, self._wave_end()) if end is not None]
        missing = min(ends, default=float("inf")) - self.selection.train_tokens
        ratio = self.scheduler.train_tokens / max(1, self.selection.train_tokens)
        return self.scheduler.train_tokens + missing * max(1.0, ratio)

    def _enough(self, goal: float, total: int | None) -> bool:
        self.scheduler.advance()
        self.bad_rows.check(self.scheduler.reached)
        if self.progress is not None:
            self.progress(Progress.of(self.scheduler, self.budget, total))
        return self.scheduler.train_tokens >= goal

    def _wave_end(self) -> int | None:
        """Tokens for training at which the wave at hand ends; None without waves."""
        if "follow" not in self.settings:
            return None
        return wave_end(self.wave, self.shard_writer.shard_tokens)

    def _write_waves(self) -> None:
        """Write what is decided, as far as whole waves go."""
        while (end := self._wave_end()) is not None:
            reached, stop = 0, None
            for number, part in enumerate(self.selection.parts):
                reached += part.train_tokens
                if reached >= end:
                    stop = number + 1
                    break
            if stop is None:
                return
            self._write(stop)
            self.wave += 1
            self._publish(complete=False)

    def _write(self, stop: int) -> None:
        """Shuffle and write the parts up to `stop`."""
        parts = self.selection.parts[self.written : stop]
        wave = self.wave if "follow" in self.settings else None
        write = self.shard_writer.write
        self.train += write("train", self.selection, parts, self.train, wave)
        self.val += write("val", self.selection, parts, self.val, wave)
        self.written = stop

    def _publish(self, *, complete: bool) -> Manifest:
        """Write the manifest over what is there so far, never over one that says more."""
        result = {"result": self._result()} if complete else {}
        manifest = Manifest(
            name=self.settings["name"],
            kind=self.settings["kind"],
            tokenizer=self.tokenizer.fingerprint,
            vocab_size=self.tokenizer.vocab_size,
            token_dtype="uint32" if self.job.wide else "uint16",
            train=self.train,
            val=self.val,
            recipe={**self.plan, **result},
            complete=complete,
        )
        if complete or self.begun is None or len(self.begun.train) < len(self.train):
            self._place_tokenizer()
            manifest.save(self.folder)
            fsync_dir(self.folder)
        return manifest

    def _result(self) -> dict[str, Any]:
        """What came of it; of several sources, what came of each."""
        result: dict[str, Any] = dict(self.selection.result)
        if len(self.sources) > 1:
            result["sources"] = [
                {"source": source.name, **self.selection.by_source.get(number, {})}
                for number, source in enumerate(self.sources)
            ]
        return result

    def _finish(self) -> Manifest:
        """The rest of the shards, the small files, the manifest; then nothing is left of the
        work."""
        if not self.selection.train:
            lost = self._lost()
            shutil.rmtree(self.work)  # the same folder may be tried with another source
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            raise DataError(f"{self.settings['name']} gave no usable row for training ({lost}.")
        self.bad_rows.check_all(self.selection.result, self.selection.parts)
        self._write(len(self.selection.parts))
        self._write_quarantine()
        manifest = self._publish(complete=True)
        # Renamed first: tasks on other machines that are still at it then find nowhere to write.
        os.rename(self.work / "parts", self.work / "parts.done")
        try:
            shutil.rmtree(self.work)
        except OSError:  # a cancelled task's last file came after its folder was listed
            shutil.rmtree(self.work)
        return manifest

    def _lost(self) -> str:
        """Where the rows went, and what to do about it."""
        rows, bad = self.selection.result["rows"], self.selection.result["quarantined"]
        left_out = self.selection.result.get("filtered", 0)
        kept = f"{rows} rows kept by the filters, {left_out} not" if left_out else f"{rows} rows"
        why = f", {reason_of([part.info for part in self.selection.parts])}" if bad else ""
        held_out = f"--val-share {self.settings['val_share']:g} holds out the rest; lower it"
        remedy = held_out if self.selection.val else "look at the source and the filters"
        return f"{kept}, {bad} in quarantine{why}); {remedy}"

    def _write_quarantine(self) -> None:
        """Written aside and moved, so that no torn name is left."""
        aside = self.work / QUARANTINE
        write_quarantine(aside, self.selection.parts)
        os.replace(aside, self.folder / QUARANTINE)

    def _place_tokenizer(self) -> None:
        """Likewise; an earlier start, or an earlier wave, may have placed it already."""
        target, aside = self.folder / TOKENIZER_FOLDER, self.work / "aside"
        if target.is_dir():
            return
        shutil.rmtree(aside, ignore_errors=True)  # a kill may leave half a file
        self.tokenizer.save(aside)
        os.replace(aside, target)
        fsync_dir(self.folder)
