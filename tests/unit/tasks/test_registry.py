"""Users' own task files: what is wrong with one is a sentence, and none leaves its folder."""

from pathlib import Path

import pytest

from foundling.config.errors import ConfigError, DataError
from foundling.tasks import registry
from foundling.tasks.base import Example, Grade
from foundling.tasks.in_context import IclTask
from foundling.tasks.registry import Registry, examples_of, graded, load_task_file
from tests.unit.eval.small_bundle import write_bundle

HEAD = """
from foundling.tasks.base import Example, Grade; from foundling.tasks.in_context import IclTask
class Echo:
    name = {name!r}
    def examples(self):
        return []
    def grade(self, example, reply):
        return Grade(correct=True)
"""
ROW = {"query": "q", "choices": ["a", "b"], "gold": 1}


def write(path: Path, text: str = "TASKS = [Echo()]", name: object = "echo") -> str:
    path.write_text(HEAD.format(name=name) + text)
    return str(path)


@pytest.mark.parametrize("name", ["../../escaped", "a/b", "", ".hidden", "a b", "[ab]", 7])
def test_a_name_that_is_no_name_of_a_file(name: object, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has the name .* use letters"):
        Registry().add_file(write(tmp_path / "own.py", name=name))


@pytest.mark.parametrize("name", ["core", "bpb", "copa", "gsm8k"])
def test_a_built_in_name_is_not_taken(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="built-in name"):
        Registry().add_file(write(tmp_path / "own.py", name=name))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("TASKS = [Echo(), Echo()]", "a second task echo"),
        ("TASKS = [Echo]", "has not been made"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("TASKS = [IclTask(name='x', kind='choice', rows=[])]", "has the kind 'choice'"),
        ("TASKS = [IclTask(name='x', kind='schema', rows=[(0, 7)])]", "row 1 of .* is no object"),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence) as raised:
        Registry().add_file(write(tmp_path / "own.py", text))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("gold", [2, -1, "1", True, None])
def test_an_answer_that_is_no_place_among_the_choices(gold: object) -> None:
    with pytest.raises(DataError, match="row 5 of the task x has gold"):
        IclTask(name="x", kind="multiple_choice", rows=[(4, {**ROW, "gold": gold})])


def test_what_a_file_prints_is_no_result(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Registry().add_file(write(tmp_path / "own.py", "print('loading')\nTASKS = [Echo()]"))
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "loading\n")


def test_a_task_may_carry_its_python_file(tmp_path: Path) -> None:
    file = write(tmp_path / "own.py")
    assert list(Registry().find([f"echo={file}"])) == ["echo"]
    with pytest.raises(ConfigError, match="holds no task other; it has: echo"):
        Registry().find([f"other={file}"])


def test_each_task_is_of_the_bundle_that_is_named_with_it(tmp_path: Path) -> None:
    small = write_bundle(tmp_path / "small.zip", questions=5)
    large = write_bundle(tmp_path / "large.zip", questions=9)
    found = Registry().find([f"copa={small}", f"squad={large}"])
    sizes = [len(task) for task in found.values() if isinstance(task, IclTask)]
    assert sizes == [5, 9]


ENDLESS = """
import os, time
from foundling.tasks.base import Example, Grade
class Own:
    name, stops, as_text = "own", ("!",), True
    def examples(self):
        {examples}
        return [Example(index=0, messages=(), answer="", group="g", kind="k")]
    def grade(self, example, reply):
        {grade}
        return Grade(correct=reply == "yes", f1=0.5)
    def text_prompt(self, example):
        return "Well, " + example.key
{load}
TASKS = [Own()]
"""


def ask(path: Path, **lines: str) -> Grade:
    path.write_text(
        ENDLESS.format_map(dict.fromkeys(("examples", "grade", "load"), "pass") | lines)
    )
    (task,) = load_task_file(str(path))
    assert not isinstance(task, IclTask)
    assert vars(task)["stops"] == ("!",)
    (example,) = examples_of(task)
    assert vars(task)["text_prompt"](example) == "Well, 0"
    return graded(task, example, "yes")


def test_a_file_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert ask(tmp_path / "own.py") == Grade(correct=True, f1=0.5)


@pytest.mark.parametrize("where", ["load", "examples", "grade"])
def test_a_file_that_ends_its_process_or_never_returns(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"own.py ended the process .*exit code 0"):
        ask(tmp_path / "own.py", **{where: "os._exit(0)"})
    monkeypatch.setattr(registry, "SECONDS", 1.0)
    with pytest.raises(DataError, match=r"own.py did not answer within 1 s"):
        ask(tmp_path / "own.py", **{where: "time.sleep(1000)"})


class Bad:
    """A task whose every method can be made to fail."""

    name = "bad"

    def __init__(self, examples: object, grade: object) -> None:
        self._examples, self._grade = examples, grade

    def examples(self) -> list[Example]:
        if isinstance(self._examples, Exception):
            raise self._examples
        return self._examples  # type: ignore[return-value]

    def grade(self, example: Example, reply: str) -> Grade:
        if isinstance(self._grade, Exception):
            raise self._grade
        return self._grade  # type: ignore[return-value]


def example(index: int) -> Example:
    return Example(index=index, messages=(), answer="", group="g", kind="k")


@pytest.mark.parametrize(
    ("examples", "grade", "sentence"),
    [
        (KeyError("x"), None, "could not list its examples .KeyError"),
        ([], None, "has no examples"),
        (["a question"], None, "lists a str among its examples"),
        ([example(0), example(0)], None, "two examples 0"),
        ([example(0)], ValueError("no number"), "could not grade its example 0 .ValueError"),
        ([example(0)], True, "graded example 0 by a bool"),
    ],
)
def test_methods_that_fail_are_told_by_name(examples: object, grade: object, sentence: str) -> None:
    task = Bad(examples, grade)
    with pytest.raises(DataError, match=sentence):
        graded(task, examples_of(task)[0], "reply")
