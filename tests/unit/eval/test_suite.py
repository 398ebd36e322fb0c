"""Scores of tasks as they are kept: what a kill leaves is used, and nothing is scored twice."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foundling.config.errors import ConfigError, DataError
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.eval.results import Results, describe_tasks, mean_score, read_examples, read_scores
from foundling.eval.suite import Exam, Subject, examine
from foundling.eval.task_scoring import Asking, pass_at
from foundling.generate import engine as engine_module
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.runtime.run_reader import read_events
from foundling.tasks.core import CORE_TASKS
from foundling.tasks.registry import Registry
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.train import evaluation
from foundling.train.loop import train
from tests.unit.eval.small_bundle import write_bundle
from tests.village import Village

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_bundle(tmp_path_factory.mktemp("core") / "eval_bundle.zip"))


@pytest.fixture(scope="module")
def subject(village: Village) -> Subject:
    tokenizer = Tokenizer.load(village.tokenizer)
    model = Transformer(
        ModelConfig(vocab_size=tokenizer.vocab_size, dim=16, layers=1, heads=2, ffn_dim=16)
    )
    init_weights(model, 1)
    return Subject(model=model, tokenizer=tokenizer, device=CPU)


def results(folder: Path, **more: Any) -> Results:
    return Results(folder, source="some/run", step=3, stamp="x", **more)


def exam(bundle: str, words: list[str], **more: Any) -> Exam:
    registry = Registry(bundle=bundle)
    tasks = registry.find(words)
    baselines = registry.core.baselines if "core" in tasks else {}
    return Exam(tasks=tasks, baselines=baselines, limit=5, max_tokens=500, **more)


def test_the_folder_holds_every_example_and_every_score(
    bundle: str, subject: Subject, tmp_path: Path
) -> None:
    words = ["core", "knowledge", "completions", "spelling"]
    asked = exam(bundle, words, contaminated={"copa": frozenset({"1", "3", "4"})})
    examine(subject, asked, results(tmp_path))
    scores = read_scores(tmp_path)
    assert (scores["source"], scores["step"]) == ("some/run", 3)
    assert set(scores["tasks"]) == {*CORE_TASKS, *words[1:]}
    assert scores["core"]["n"] == 5 * 22
    assert not scores["core"]["partial"]
    for name, entry in scores["tasks"].items():
        lines = read_examples(tmp_path, name)
        assert len(lines) == entry["n"] == len({line["id"] for line in lines})
        assert mean_score(name, lines).value == pytest.approx(entry["value"])
        assert entry["stderr"] >= 0
    marked = [line for line in read_examples(tmp_path, "copa") if line["contaminated"]]
    assert {line["id"] for line in marked} <= {"1", "3", "4"}
    assert scores["tasks"]["copa"]["contaminated"]["n"] == len(marked)
    assert scores["tasks"]["copa"]["clean"]["n"] == 5 - len(marked)
    assert 0 <= scores["tasks"]["knowledge"]["f1"] <= 1
    assert [line.split()[0] for line in describe_tasks(scores, {"copa"})[:2]] == ["task", "copa"]
    assert not any("CORE" in line for line in describe_tasks(scores, {"copa"}))
    told = "\n".join(describe_tasks(scores))
    assert "CORE " in told
    assert "contaminated:" in told


def test_what_a_kill_left_is_not_done_again(bundle: str, subject: Subject, tmp_path: Path) -> None:
    words = ["copa", "jeopardy", "counting"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    examine(subject, exam(bundle, words), results(whole))

    class Killed(BaseException):
        pass

    batches = 0

    def between() -> None:
        nonlocal batches
        batches += 1
        if batches == 9:
            raise Killed

    small = {"max_tokens": 60}
    asked = exam(bundle, words)
    with pytest.raises(Killed):
        examine(subject, Exam(**{**asked.__dict__, **small, "between": between}), results(cut))
    assert list(cut.glob("*.part-0"))
    parts = {path.name: len(path.read_text().splitlines()) - 1 for path in cut.glob("*.part-0")}
    before = batches
    between_again: list[int] = []
    asked = Exam(**{**asked.__dict__, **small, "between": lambda: between_again.append(1)})
    examine(subject, asked, results(cut))
    assert sum(parts.values()) >= 1
    assert not list(cut.glob("*.part-*"))
    one, other = read_scores(whole)["tasks"], read_scores(cut)["tasks"]
    assert {n: e["value"] for n, e in one.items()} == {n: e["value"] for n, e in other.items()}
    again: list[int] = []
    examine(subject, Exam(**{**asked.__dict__, "between": lambda: again.append(1)}), results(cut))
    assert not again, "finished tasks were scored again"
    assert before == 9
    examine(
        subject,
        Exam(**{**asked.__dict__, "between": lambda: again.append(1)}),
        Results(cut, source="some/run", step=3, stamp="other weights"),
    )
    assert again, "scores of other weights were believed"


def test_a_step_that_does_not_fit_is_halved(
    bundle: str, subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(engine_module, "warn", told.append)
    plain, head = Transformer._embedded, Transformer.next_logits

    def tight(self: Transformer, tokens: torch.Tensor, *more: Any) -> Any:
        if tokens.numel() > 150:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, tokens, *more)

    def tight_head(self: Transformer, states: torch.Tensor) -> Any:
        if len(states) > 40:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return head(self, states)

    asked = Exam(**{**exam(bundle, ["copa", "squad"]).__dict__, "max_tokens": 1600})
    examine(subject, asked, results(tmp_path / "easy"))
    assert not told
    monkeypatch.setattr(Transformer, "_embedded", tight)
    monkeypatch.setattr(Transformer, "next_logits", tight_head)
    examine(subject, asked, results(tmp_path / "tight"))
    sizes = [int(text.split()[6].replace(",", "")) for text in told]
    assert sizes == sorted(set(sizes), reverse=True)  # none is asked for again
    assert sizes[-1] <= 150
    for name in ("copa", "squad"):
        easy, hard = (read_examples(tmp_path / kind, name) for kind in ("easy", "tight"))
        assert [line["score"] for line in easy] == [line["score"] for line in hard]

    def always(self: Transformer, tokens: torch.Tensor, *more: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Transformer, "_embedded", always)
    with pytest.raises(ConfigError, match="memory does not suffice for a step of 64 tokens"):
        examine(subject, asked, results(tmp_path / "none"))


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    from itertools import combinations

    samples = [True, False, False, True, False, False]
    for k in (1, 2, 3, 6):
        subsets = list(combinations(samples, k))
        assert pass_at(k, 6, 2) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ConfigError, match="--temperature"):
        Asking(samples=3)


def test_samples_do_not_depend_on_company(subject: Subject, tmp_path: Path, bundle: str) -> None:
    asked = exam(bundle, ["counting"])
    replies = []
    for tokens in (30, 5000):
        asking = Asking(samples=2, temperature=1.0)
        folder = tmp_path / str(tokens)
        more = {"asking": asking, "max_tokens": tokens}
        examine(subject, Exam(**{**asked.__dict__, **more}), results(folder))
        replies.append([line["reply"] for line in read_examples(folder, "counting")])
        assert "pass@2" in read_scores(folder)["tasks"]["counting"]
    assert replies[0] == replies[1]


OWN = """
from foundling.tasks.base import Example, Grade; from foundling.tasks.in_context import IclTask

class Echo:
    name = "echo"
    max_new_tokens = 4
    def examples(self):
        return [Example(index=0, messages=({"role": "user", "content": "Say a."},), answer="a",
                        group="g", kind="k")]
    def grade(self, example, reply):
        return Grade(correct="a" in reply)

ROWS = [{"query": f"{n} and {n} make", "choices": [str(2 * n), "none"], "gold": 0}
        for n in range(4)]
TASKS = [Echo(), IclTask(name="sums", kind="multiple_choice", rows=list(enumerate(ROWS)), shots=1)]
"""


def test_a_users_own_tasks_come_from_a_file(subject: Subject, tmp_path: Path) -> None:
    file = tmp_path / "my_tasks.py"
    file.write_text(OWN)
    registry = Registry()
    registry.add_file(str(file))
    examine(subject, Exam(tasks=registry.find(["echo", "sums"])), results(tmp_path / "out"))
    assert read_scores(tmp_path / "out")["tasks"]["sums"]["n"] == 4
    for text, sentence in [("x = 1", "no list TASKS"), ("1 / 0", "ZeroDivision"), (None, "not ex")]:
        other = tmp_path / "other.py"
        if text is None:
            other.unlink()
        else:
            other.write_text(text)
        with pytest.raises(DataError, match=sentence):
            Registry().add_file(str(other))
    with pytest.raises(ConfigError, match="did you mean jeopardy"):
        Registry().find(["jeopady"])
    assert "foundling_tasks_my_tasks" not in sys.modules  # its code runs in a child


def test_tasks_are_scored_while_training_and_end_no_run(
    tiny: RunConfig, bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    words = (f"copa={bundle}", "spelling")
    scored = tiny.eval.replace(tasks=words, tasks_every=4, tasks_limit=4)
    config = tiny.replace(eval=scored)
    run = RunDir(tmp_path / "run")
    train(config, run)
    lines = read_events(run).measured["scored"]
    assert [line["step"] for line in lines] == [4, 8]
    assert set(lines[0]["tasks"]) == {"copa", "spelling"}
    kept = read_scores(run.path / "evals" / "step-8")
    assert kept["total_tokens"] == lines[1]["total_tokens"]
    with pytest.raises(ConfigError, match="unknown task"):
        train(config.replace(eval=scored.replace(tasks=("copy",))), RunDir(tmp_path / "no"))

    def broken(*words: Any, **more: Any) -> None:
        raise RuntimeError("the disk of the questions is gone")

    monkeypatch.setattr(evaluation, "examine", broken)
    other = RunDir(tmp_path / "other")
    train(config, other)
    assert other.read_info()["status"] == "finished"
    events = [line for line in read_lines(other.events_path) if line["event"] == "failed"]
    assert [event["what"] for event in events] == ["tasks", "tasks"]
    same = [json.loads(x) for x in (run.metrics_path.read_text().splitlines())]
    assert [line["loss"] for line in same] == [
        line["loss"] for line in read_lines(other.metrics_path)
    ]
