"""What counts as right: numbers, letters, spellings, facts and programs that pass their tests."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from foundling.config.errors import DataError
from foundling.tasks.base import Score
from foundling.tasks.gsm8k import MathWords, last_number
from foundling.tasks.humaneval import CodeTask, program_of
from foundling.tasks.knowledge import PROMPTS, Knowledge, token_f1
from foundling.tasks.multiple_choice import LetterChoice, named_letter
from foundling.tasks.registry import Registry
from foundling.tasks.sandbox import run_program, without_network
from foundling.tasks.spelling import Counting, Spelling
from foundling.tasks.task_files import find_file, read_rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = <<3+4=7>>7 eggs.\n#### 7", 7),
        ("That makes $1,234.50 in all.", 1234.5),
        ("10-2=8 so the answer is 8.", 8),
        ("It falls to -5 degrees", -5),
        ("#### 12\nand later 13", 13),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_is_the_answer(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_gsm8k_and_svamp_in_their_own_schemas(tmp_path: Path) -> None:
    gsm = write(tmp_path / "gsm8k_test.jsonl.gz", [{"question": "2 + 2?", "answer": "so\n#### 4"}])
    task = Registry(folder=str(tmp_path)).find(["gsm8k"])["gsm8k"]
    assert isinstance(task, MathWords)
    (example,) = task.examples()
    assert task.grade(example, "It is 4.").correct
    assert not task.grade(example, "It is 5, or 4.5").correct
    assert not task.grade(example, "no idea").correct
    rows = [{"Body": "Ann has 3 figs", "Question": "How many?", "Answer": 3.0, "Type": "Sum"}]
    svamp = MathWords("svamp", write(tmp_path / "svamp.jsonl", rows))
    assert svamp.examples()[0].messages[0]["content"] == "Ann has 3 figs. How many?"
    assert svamp.grade(svamp.examples()[0], "3").correct
    with pytest.raises(DataError, match=r"row 1 of .* has no answer"):
        MathWords("gsm8k", write(gsm, [{"question": "x"}]))


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B", "B"),
        ("The answer is (C).", "C"),
        ("A good question; D", "D"),
        ("Answer: A", "A"),
        ("A. a mule", "A"),
        ("E", None),
        ("Because of BREAD", None),
        ("", None),
    ],
)
def test_the_first_letter_that_stands_alone(reply: str, letter: str | None) -> None:
    assert named_letter(reply, 4) == letter


def test_arc_and_mmlu_in_their_own_schemas(tmp_path: Path) -> None:
    choices = {"text": ["a stone", "a fish", "a cloud"], "label": ["1", "2", "3"]}
    arc = [{"question": "What swims?", "choices": choices, "answerKey": "2"}]
    mmlu = [{"question": "2+2?", "choices": ["3", "4", "5", "6"], "answer": 1, "subject": "sums"}]
    for name, rows, guess in (("ARC-Easy.jsonl", arc, 1 / 3), ("mmlu_test.jsonl", mmlu, 1 / 4)):
        task = LetterChoice("x", write(tmp_path / name, rows))
        (example,) = task.examples()
        assert example.answer == "B"
        assert task.grade(example, "B").correct
        assert not task.grade(example, "A").correct
        assert task.baseline == pytest.approx(guess)
    assert example.kind == "sums"
    with pytest.raises(DataError, match="none of its choices"):
        LetterChoice("x", write(tmp_path / "bad.jsonl", [{**mmlu[0], "answer": 9}]))


def test_spelling_and_counting() -> None:
    spelling, counting = Spelling(), Counting()
    word = spelling.examples()[0]
    assert spelling.grade(word, f"It is: {word.answer.upper()}").correct
    assert not spelling.grade(word, word.answer[:-2]).correct
    assert not spelling.grade(word, word.answer.replace("-", "")).correct
    for example in counting.examples()[:20]:
        assert counting.grade(example, f"There are {example.answer}.").correct
        assert not counting.grade(example, f"There are {int(example.answer) + 1}.").correct
    zero = next(e for e in counting.examples() if e.answer == "0")
    assert counting.grade(zero, "zero").correct
    ids = [example.key for example in counting.examples()]
    assert len(set(ids)) == len(ids) == 200
    assert [e.key for e in Counting(50).examples()] == ids[:50]


def test_knowledge_by_exact_match_and_f1() -> None:
    task = Knowledge()
    assert len(PROMPTS) >= 23
    author = next(e for e in task.examples() if "Romeo" in e.messages[0]["content"])
    assert task.grade(author, " William Shakespeare in 1597").correct
    assert task.grade(author, " Shakespeare").correct
    wrong = task.grade(author, " Christopher Marlowe")
    assert not wrong.correct
    assert wrong.f1 == 0
    assert token_f1("the old William", "William Shakespeare") == pytest.approx(0.5)


PROBLEM = {
    "task_id": "Mine/0",
    "prompt": 'import math\n\ndef half(x):\n    """Half of x."""\n',
    "test": "def check(f):\n    assert f(4) == 2\n    assert f(3) == 1.5\n",
    "entry_point": "half",
}


def test_code_is_right_when_its_tests_pass(tmp_path: Path) -> None:
    task = CodeTask("humaneval", write(tmp_path / "x.jsonl", [PROBLEM]), seconds=20)
    (example,) = task.examples()
    assert example.key == "Mine/0"
    for reply, right in [
        ("    return x / 2\n\ndef other():\n    bad(", True),
        ("```python\ndef half(x):\n    return x / 2\n```\nThat is it.", True),
        ("    return x // 2\n", False),
        ("    import sys; sys.exit(0)\n", False),
        ("    return (", False),
    ]:
        assert task.grade(example, reply).correct is right, reply
    assert program_of(PROBLEM["prompt"], "def half(x):\n    pass", "half").startswith("import math")


@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
def test_the_sandbox_stops_what_runs_away() -> None:
    assert run_program("x = 1", seconds=20).passed
    assert "still running" in run_program("while True: pass", seconds=1).why
    assert "MemoryError" in run_program("x = bytearray(2 << 30)", seconds=20).why
    assert not run_program("open('big', 'w').write('x' * (2 << 20))", seconds=20).passed
    assert not run_program("import os; os.environ['SECRET']", seconds=20).passed


@pytest.mark.skipif(not without_network(), reason="this kernel lets nobody make namespaces")
def test_the_sandbox_has_no_network() -> None:
    listing = "import os; names = os.listdir('/sys/class/net')"
    code = "import socket; s = socket.socket(); s.settimeout(3); s.connect(('127.0.0.1', 9))"
    told = run_program(code, seconds=20).why
    assert "unreachable" in told, (told, listing)


def test_a_tasks_file_is_found_or_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gsm8k=FILE"):
        find_file("gsm8k", ("gsm8k*",), None, str(tmp_path))
    with pytest.raises(DataError, match="does not exist"):
        find_file("gsm8k", ("gsm8k*",), str(tmp_path / "no"), None)
    bad = tmp_path / "gsm8k.jsonl.gz"
    bad.write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(bad)


def test_a_score_of_nothing_is_none() -> None:
    assert Score.of_share("x", 0, 0) is None
