"""Examples that stand in a data set are found, proved, and scored apart."""

import json
from pathlib import Path

import pytest

from foundling.config.errors import DataError
from foundling.data.build.decontaminate import Overlap, Owned
from foundling.eval.contamination import look_for, read_contaminated, texts_of, write_contaminated
from foundling.tasks.core import CoreBundle
from foundling.tasks.in_context import IclTask
from foundling.tasks.registry import Registry
from foundling.tokenizer.tokenizer import Tokenizer
from tests.unit.eval.small_bundle import write_bundle
from tests.village import Village

LONG = "one day the old miller of the valley sold his last two mules to a widow for nine crowns"


def task_of(*texts: str) -> IclTask:
    rows = [{"context": text, "continuation": "crowns"} for text in texts]
    return IclTask(name="mine", kind="language_modeling", rows=list(enumerate(rows)))


def test_a_repeated_example_is_found_whatever_stands_around_it() -> None:
    other = "and so it came that nobody in the whole of the village would ever speak of bees again"
    task = task_of(LONG, other, "too short to be found")
    texts = ["Nothing here.", f"It is said: {LONG.upper().replace(' ', ' - ')}!! And more."]
    found = look_for({"mine": task, "bpb": None}, texts)
    assert found.tasks["mine"].found == ("0",)
    assert (found.tasks["mine"].n, found.tasks["mine"].short) == (3, 1)
    assert found.tasks["mine"].share == pytest.approx(1 / 2)
    assert (found.documents, found.dirty) == (2, 1)
    assert "1 of 2 documents" in found.lines()[-1]


def test_a_schema_is_found_by_the_sentence_that_is_true() -> None:
    row = {
        "context_options": ["The widow thanked the miller since the widow", "since the miller"],
        "continuation": "had been given two good mules",
        "gold": 0,
    }
    task = IclTask(name="mine", kind="schema", rows=[(7, row)])
    true = "The widow thanked the miller since the widow had been given two good mules"
    assert look_for({"mine": task}, [true]).tasks["mine"].found == ("7",)
    assert look_for({"mine": task}, [true.replace("two", "three")]).tasks["mine"].found == ()


def test_a_run_of_several_examples_marks_all_of_them() -> None:
    owned = Owned.of([LONG, "nothing", f"before {LONG}", LONG])
    assert owned.repeated(f"x {LONG} y") == {0, 2, 3}
    assert owned.repeated("before one day the old miller") == set()
    assert Owned.of([]).repeated(LONG) == set()
    twelve = " ".join(LONG.split()[:12])
    assert owned.repeated(twelve) == set()
    assert Overlap.of([LONG]).touches(LONG)


def test_a_built_data_set_and_plain_files_are_read_alike(village: Village, tmp_path: Path) -> None:
    texts = list(texts_of(str(village.text), str(village.tokenizer)))
    sample = max(texts[:50], key=lambda text: len(text.split()))
    file = tmp_path / "docs.jsonl"
    file.write_text(json.dumps({"text": sample}) + "\n")
    task = {"mine": task_of(" ".join(sample.split()[:20]))}
    for data, tokenizer in ((str(village.text), str(village.tokenizer)), (str(file), None)):
        assert look_for(task, texts_of(data, tokenizer)).tasks["mine"].found == ("0",)
    assert list(texts_of(str(village.text))) == texts  # by the tokenizer that the build left there
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "manifest.json").write_bytes((village.text / "manifest.json").read_bytes())
    with pytest.raises(DataError, match="--tokenizer"):
        texts_of(str(bare))
    with pytest.raises(DataError, match="does not exist"):
        texts_of(str(tmp_path / "nowhere"))
    assert Tokenizer.load(village.tokenizer)


def test_what_was_found_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    write_contaminated(path, "some/data", look_for({"mine": task_of(LONG)}, [LONG]))
    assert read_contaminated(path) == {"mine": frozenset({"0"})}
    path.write_text("{}")
    with pytest.raises(DataError, match="is nothing that"):
        read_contaminated(path)


def test_the_tasks_of_core_are_looked_for_by_their_own_words(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "eval_bundle.zip")
    tasks = Registry(bundle=str(bundle)).find(["core"])
    squad = CoreBundle(bundle).task("squad")
    longest = max(range(len(squad)), key=lambda place: len(squad.own_text(place)))
    found = look_for(tasks, [squad.own_text(longest)])
    assert str(longest) in found.tasks["squad"].found
    assert sum(len(one.found) for one in found.tasks.values()) < 10
