"""CORE of DataComp-LM (Li et al. 2024): 22 tasks, each centred by what guessing scores, averaged.

Read from the public evaluation bundle as it is, zipped or unpacked: `core.yaml` says what the tasks
are, `eval_meta_data.csv` what guessing scores, `eval_data/` holds the questions. A task that the
bundle lacks is named, and the mean says that it is partial: 21 tasks are not CORE.
"""

import csv
import hashlib
import io
import json
import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from foundling.config.errors import DataError
from foundling.runtime.files import cache_folder
from foundling.tasks.base import Score
from foundling.tasks.in_context import KINDS, IclTask

CORE_TASKS = (
    "hellaswag_zeroshot",
    "jeopardy",
    "bigbench_qa_wikidata",
    "arc_easy",
    "arc_challenge",
    "copa",
    "commonsense_qa",
    "piqa",
    "openbook_qa",
    "lambada_openai",
    "hellaswag",
    "winograd",
    "winogrande",
    "bigbench_dyck_languages",
    "agi_eval_lsat_ar",
    "bigbench_cs_algorithms",
    "bigbench_operators",
    "bigbench_repeat_copy_logic",
    "squad",
    "coqa",
    "boolq",
    "bigbench_language_identification",
)
_Rows = tuple[list[tuple[int, dict[str, Any]]], str]
VARIABLE = "FOUNDLING_CORE"
"""Names the bundle where no option does."""


@dataclass(frozen=True, kw_only=True)
class CoreScore:
    """The mean of the centred scores, and what keeps it from being CORE."""

    score: Score
    """Named `core` only where it is: core_partial, core_5_shots and the like are other numbers."""
    centered: dict[str, float]
    missing: tuple[str, ...]
    shots: int | None = None
    """Solved examples that every task was given instead of its own number."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **self.score.to_json(),
            "centered": self.centered,
            "partial": bool(self.missing),
            "missing": list(self.missing),
            "shots": self.shots,
        }


def centered(value: float, baseline: float) -> float:
    """0 for guessing, 1 for knowing everything."""
    return (value - baseline) / (1 - baseline)


def core_score(
    scores: Mapping[str, Score], baselines: Mapping[str, float], shots: int | None = None
) -> CoreScore:
    """CORE of per-task accuracies; `n` is the number of examples of all of them together, and
    `shots` what replaced the suite's own numbers of solved examples."""
    found = {name: scores[name] for name in CORE_TASKS if name in scores}
    if not found:
        raise DataError("none of the 22 tasks of CORE was scored; see `foundling eval --help`.")
    values = {name: centered(score.value, baselines[name]) for name, score in found.items()}
    # Tasks are drawn apart from each other: variances add up, each stretched by its centring.
    variance = sum((s.stderr / (1 - baselines[name])) ** 2 for name, s in found.items())
    missing = tuple(name for name in CORE_TASKS if name not in scores)
    marks = ["core", *(["partial"] if missing else [])]
    if shots is not None:
        marks.append("1_shot" if shots == 1 else f"{shots}_shots")
    return CoreScore(
        score=Score(
            name="_".join(marks),
            value=sum(values.values()) / len(values),
            n=sum(score.n for score in found.values()),
            stderr=math.sqrt(variance) / len(values),
        ),
        centered=values,
        missing=missing,
        shots=shots,
    )


def find_bundle(path: str | None = None) -> Path:
    """The bundle: as given, else of $FOUNDLING_CORE, else in the cache folder."""
    cache = cache_folder("core")
    asked = path or os.environ.get(VARIABLE)
    places = [Path(asked)] if asked else [cache / "eval_bundle", cache / "eval_bundle.zip"]
    for place in places:
        if place.exists():
            return place
    if asked:
        raise DataError(f"{asked} does not exist; give the evaluation bundle of CORE.")
    raise DataError(
        f"CORE needs the evaluation bundle of DataComp-LM: give it with --bundle or ${VARIABLE}, or"
        f" put eval_bundle.zip into {cache}."
    )


class CoreBundle:
    """The files of a bundle, zipped or unpacked."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._zip: zipfile.ZipFile | None = None
        self._kept: dict[str, _Rows] = {}
        if self.path.is_dir():
            homes = [self.path, self.path / "eval_bundle"]
            home = next((home for home in homes if (home / "core.yaml").is_file()), None)
            found = home.rglob("*.*") if home else ()
            names = [file.relative_to(self.path).as_posix() for file in found]
        else:
            try:
                self._zip = zipfile.ZipFile(self.path)
            except (zipfile.BadZipFile, OSError) as error:
                raise DataError(
                    f"{self.path} is no evaluation bundle ({error}); give the zip or its folder."
                ) from None
            names = self._zip.namelist()
        roots = [PurePosixPath(name) for name in names if name.rsplit("/", 1)[-1] == "core.yaml"]
        if not roots:
            raise DataError(f"{self.path} is no evaluation bundle: it holds no core.yaml.")
        self._root = min(roots, key=lambda root: len(root.parts)).parent
        self._names = frozenset(names)
        self.baselines = self._baselines()
        self._specs = self._read_specs()

    @property
    def names(self) -> list[str]:
        """Tasks whose questions are here, in the order of CORE."""
        return [name for name in CORE_TASKS if self._has(name)]

    def task(self, name: str, shots: int | None = None) -> IclTask:
        """One task with all its questions; `shots` replaces the bundle's number of examples."""
        spec = self._specs.get(name)
        if spec is None or not self._has(name):
            raise DataError(f"{self.path} has no task {name}; there are: {', '.join(self.names)}.")
        file = self._data_file(spec)
        kind = spec["icl_task_type"]
        if kind not in KINDS:
            raise DataError(f"task {name} of {self.path} is of the kind {kind}, which is unknown.")
        rows, digest = self._rows(file)
        return IclTask(
            name=name,
            kind=kind,
            rows=rows,
            digest=digest,
            shots=int(spec["num_fewshot"][0]) if shots is None else shots,
            delimiter=spec.get("continuation_delimiter", " "),
            baseline=self.baselines[name],
            source=f"{self.path}: {file}",
        )

    def _has(self, name: str) -> bool:
        spec = self._specs.get(name)
        return spec is not None and str(self._root / self._data_file(spec)) in self._names

    def _data_file(self, spec: Mapping[str, Any]) -> str:
        return f"eval_data/{spec['dataset_uri']}"

    def _read_specs(self) -> dict[str, dict[str, Any]]:
        try:
            found = yaml.safe_load(self._text("core.yaml"))["icl_tasks"]
            specs = {str(spec["label"]): dict(spec) for spec in found}
            for spec in specs.values():
                spec["dataset_uri"], spec["icl_task_type"], spec["num_fewshot"][0]
        except (yaml.YAMLError, KeyError, TypeError, IndexError) as error:
            raise DataError(f"core.yaml of {self.path} cannot be read ({error!r}).") from None
        unknown = [name for name in specs if name in CORE_TASKS and name not in self.baselines]
        if unknown:
            raise DataError(f"eval_meta_data.csv of {self.path} has no baseline of {unknown[0]}.")
        return specs

    def _baselines(self) -> dict[str, float]:
        rows = csv.DictReader(io.StringIO(self._text("eval_meta_data.csv")))
        try:
            return {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(
                f"eval_meta_data.csv of {self.path} cannot be read ({error!r})."
            ) from None

    def _rows(self, file: str) -> _Rows:
        """Numbered rows of a file and the digest of its text; two tasks may share one file."""
        if file not in self._kept:
            text = self._text(file)
            lines = text.split("\n")  # splitlines would also cut at U+2028 within a text
            try:
                rows = list(enumerate(json.loads(line) for line in lines if line.strip()))
            except ValueError as error:
                raise DataError(f"{file} of {self.path} is damaged ({error}).") from None
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            self._kept[file] = rows, digest
        return self._kept[file]

    def _text(self, file: str) -> str:
        name = str(self._root / file)
        try:
            if self._zip is not None:
                return self._zip.read(name).decode("utf-8")
            return (self.path / name).read_text(encoding="utf-8")
        except (OSError, KeyError, zipfile.BadZipFile, UnicodeDecodeError) as error:
            raise DataError(f"{file} of {self.path} cannot be read ({error}).") from None
