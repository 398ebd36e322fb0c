"""Run directories are read line by line: a long run costs a few numbers a step, a list the ends."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foundling.report.page import write_report
from foundling.report.runs import compare_runs, list_runs
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import read_events, read_run, read_summary
from tests.full.run_reader import write_run

STEPS = 10_000


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return write_run(tmp_path_factory.mktemp("runs") / "long", STEPS)


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_report_keeps_a_few_numbers_a_step(long: RunDir) -> None:
    write_report([long])  # what is imported and cached is not of the run
    assert peak_bytes(lambda: write_report([long])) < 300 * STEPS
    page = long.report_path.read_text()
    assert "10,000 steps over 5.24B tokens" in page
    assert "data/web" in page


def test_a_list_reads_ends_only(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "vast")
    run.path.mkdir()
    run.write_info({"chat": False, "status": "finished"})
    with open(run.metrics_path, "wb") as file:
        file.seek(64 * 2**20)  # a hole: nothing on the disk, and zeros for who reads it
        file.write(b'\n{"step": 7, "total_tokens": 70}\n{"step": 8, "total')
    listed: list[dict[str, Any]] = []
    assert peak_bytes(lambda: listed.extend(list_runs(tmp_path))) < 2**20
    assert [(r["step"], r["tokens"], r["status"]) for r in listed] == [(7, 70, "finished")]


SOUND = b'{"step": 3, "x": 1}\n'


@pytest.mark.parametrize(
    ("text", "step", "damaged"),
    [
        (b"", None, 0),
        (SOUND, 3, 0),
        (SOUND[:-1], 3, 0),  # whole, and its newline is missing
        (SOUND + b'{"step": 4, "x"', 3, 0),  # torn by a kill
        (SOUND + b"\n\n", 3, 0),
        (SOUND + b'{"step": "4"}\n' + b"\xff\n", 3, 2),
        (b"7\n" + SOUND, 3, 0),  # further up
        (SOUND + b"[" * 100_000 + b"\n", 3, 1),
        (b'{"step": 1}\n' * 5000 + SOUND, 3, 0),
    ],
)
def test_the_last_line_is_found_from_the_end(
    text: bytes, step: int | None, damaged: int, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    run.write_info({"chat": False, "status": "finished"})
    assert read_summary(run).last == {}, "no file yet"
    run.metrics_path.write_bytes(text)
    found = read_summary(run)
    assert found.last.get("step") == step
    lines = f"metrics.jsonl has {damaged} damaged line{'s' * (damaged > 1)}"
    assert found.damage == ([lines] if damaged else [])


def test_damage_at_the_end_is_listed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    with open(run.metrics_path, "ab") as file:
        file.write(b"\xff\xfe\n")
    [listed] = list_runs(tmp_path)
    assert (listed["status"], listed["step"]) == ("damaged", 3)


def test_what_is_no_finite_number_is_no_point_and_raises_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0)
    odd = ["NaN", "Infinity", "1e999", "9" * 400, "true", '"2"', "null", "[1]"]
    read = '"sources": {}'
    lines = [
        f'{{"step": {n}, "total_tokens": {n}, "loss": {odd[n - 1]}, {read}}}\n' for n in range(1, 9)
    ]
    lines += [f'{{"step": 9, "total_tokens": 9, "loss": 2, "step_s": Infinity, {read}}}\n']
    lines += ['{"step": 1' + "0" * 400 + "}\n"]
    run.metrics_path.write_text("".join(lines))
    data = read_run(run)
    assert data.curve("loss").tolist() == [[9.0, 2.0]]
    assert data.training_seconds == 0
    assert data.damage == ["metrics.jsonl has 1 damaged line"]
    write_report([run])


def test_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    lines = [
        {"step": step, "total_tokens": 10 * step, "loss": 1.0 * step, "sources": {}}
        for step in (1, 3, 2)
    ]
    runs = [write_run(tmp_path / name, 0) for name in "ab"]
    for run, more in zip(runs, (5.0, 6.0), strict=True):
        text = "".join(
            json.dumps(line) + "\n" for line in [*lines, {"step": 2, "loss": more, "sources": {}}]
        )
        run.metrics_path.write_text(text)
    found = compare_runs([run.path for run in runs])
    assert found["metrics"]["loss"] == {1: [1.0, 1.0], 2: [5.0, 6.0], 3: [3.0, 3.0]}
    data = read_run(runs[0])
    assert [point[0] for point in data.curve("loss")] == [10, 20, 30]
    assert [data.tokens_by(step) for step in (0, 1, 2, 3, 9)] == [0, 10, 20, 30, 30]


def events(*lines: tuple[str, dict[str, Any]]) -> str:
    return "".join(json.dumps({"event": kind, **fields}) + "\n" for kind, fields in lines)


COURSE = [
    ("begun", {}),
    ("evaluated", {"step": 4, "bpb": 1.0}),
    ("scored", {"step": 6}),
    ("evaluated", {"step": 8, "bpb": 2.0}),
    ("evaluated_by_hand", {"step": 8}),
    ("data_grew", {"step": 9}),
]


@pytest.mark.parametrize(
    ("after", "left"),
    [
        ((), {"evaluated": [4, 8], "scored": [6], "evaluated_by_hand": [8]}),
        ([("resumed", {"step": 8})], {"evaluated": [4, 8], "scored": [6],
                                      "evaluated_by_hand": [8]}),
        ([("resumed", {"step": 7})], {"evaluated": [4], "scored": [6]}),
        ([("rolled_back", {"step": 9, "back_to": 5})], {"evaluated": [4]}),
        ([("batch_left_out", {"step": 3, "back_to": None})], {"evaluated": [4, 8], "scored": [6],
                                                            "evaluated_by_hand": [8]}),
        ([("resumed", {"step": 0})], {}),
        ([("resumed", {"step": 4}), ("evaluated", {"step": 8})], {"evaluated": [4, 8]}),
    ],
)  # fmt: skip
def test_what_was_measured_on_a_course_that_was_given_up_is_forgotten(
    after: list[tuple[str, dict[str, Any]]], left: dict[str, list[int]], tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    run.events_path.write_text(events(*COURSE, *after))
    story = read_events(run)
    found = {kind: [m["step"] for m in lines] for kind, lines in story.measured.items() if lines}
    assert found == left
    facts = [line["event"] for line in story.facts]
    assert facts[:2] == ["begun", "data_grew"], "what happened is never forgotten"
