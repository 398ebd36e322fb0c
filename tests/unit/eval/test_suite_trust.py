"""Old scores are believed only where nothing has changed, and a sample is one of the whole."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foundling.cli.main import run_verb
from foundling.config.errors import DataError
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.eval.evaluate import EvalRequest, follow, stamp_of
from foundling.eval.results import Results, read_examples, read_scores
from foundling.eval.suite import Exam, HeldOutText, Subject, examine
from foundling.eval.task_scoring import Asking
from foundling.generate import engine as engine_module
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.runtime.run_dir import RunDir
from foundling.tasks.base import Example, Grade
from foundling.tasks.in_context import IclTask
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.train.loop import train
from tests.unit.eval.small_bundle import write_bundle
from tests.village import Village

CPU = torch.device("cpu")


class Words:
    """Say the word."""

    name = "words"
    max_new_tokens = 4

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def examples(self) -> list[Example]:
        return [
            Example(
                index=number,
                messages=({"role": "user", "content": f"Say {word}."},),
                answer=word,
                group="g",
                kind="k",
            )
            for number, word in enumerate(self.words)
        ]

    def grade(self, example: Example, reply: str) -> Grade:
        return Grade(correct=example.answer in reply)


@pytest.fixture(scope="module")
def tokenizer(village: Village) -> Tokenizer:
    return Tokenizer.load(village.tokenizer)


def subject_of(tokenizer: Tokenizer, **shape: Any) -> Subject:
    model = Transformer(
        ModelConfig(vocab_size=tokenizer.vocab_size, dim=16, layers=1, heads=2, ffn_dim=16, **shape)
    )
    init_weights(model, 1)
    return Subject(model=model, tokenizer=tokenizer, device=CPU)


def results(folder: Path, stamp: str = "x") -> Results:
    return Results(folder, source="some/run", step=3, stamp=stamp)


def icl(answers: str) -> IclTask:
    rows = [{"context": f"{n} is", "continuation": word} for n, word in enumerate(answers)]
    return IclTask(name="letters", kind="language_modeling", rows=list(enumerate(rows)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tasks": {"letters": icl("abc")}}, {"tasks": {"letters": icl("abd")}}),
        ({"tasks": {"words": Words(["a", "b"])}}, {"tasks": {"words": Words(["a", "c"])}}),
        (
            {"tasks": {"letters": icl("abc")}, "contaminated": {"letters": frozenset("0")}},
            {"tasks": {"letters": icl("abc")}, "contaminated": {"letters": frozenset("2")}},
        ),
    ],
    ids=["questions", "examples", "contaminated"],
)
def test_what_has_changed_is_scored_again(
    one: dict[str, Any], other: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    subject = subject_of(tokenizer)
    batches: list[int] = []
    for asked in (one, one, other):
        batches.append(0)

        def between() -> None:
            batches[-1] += 1

        examine(subject, Exam(between=between, **asked), results(tmp_path))
    assert batches[0] > 0
    assert batches[1] == 0
    assert batches[2] > 0


def test_a_limit_takes_questions_from_the_whole_list(tokenizer: Tokenizer, tmp_path: Path) -> None:
    task = Words([f"w{n}" for n in range(40)])
    for limit in (4, 8):
        exam = Exam(tasks={"words": task}, limit=limit)
        examine(subject_of(tokenizer), exam, results(tmp_path / str(limit)))
    few, more = (
        [line["id"] for line in read_examples(tmp_path / str(limit), "words")] for limit in (4, 8)
    )
    assert more[:4] == few
    assert max(map(int, more)) > 8


def test_a_prompt_too_long_for_learned_positions_loses_its_beginning(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    subject = subject_of(tokenizer, positions=16)
    examine(subject, Exam(tasks={"words": Words(["word " * 30])}), results(tmp_path))
    assert read_examples(tmp_path, "words")[0]["reply"] != ""


def test_many_samples_of_one_question_are_halved_too(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(engine_module, "warn", told.append)
    asking = Asking(samples=8, temperature=1.0)
    exam = Exam(tasks={"words": Words(["a " * 90])}, asking=asking, max_tokens=1024)
    examine(subject_of(tokenizer), exam, results(tmp_path / "easy"))
    plain = Transformer._embedded

    def tight(self: Transformer, tokens: torch.Tensor, *more: Any) -> torch.Tensor:
        if tokens.numel() > 100:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
        return plain(self, tokens, *more)

    monkeypatch.setattr(Transformer, "_embedded", tight)
    examine(subject_of(tokenizer), exam, results(tmp_path / "tight"))
    assert [text.split()[6] for text in told] == ["512", "256", "128", "64"]
    easy, hard = (read_examples(tmp_path / kind, "words") for kind in ("easy", "tight"))
    assert easy == hard


def test_conversations_have_no_bits_per_byte(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chat = SimpleNamespace(
        tokens=[1, 2, 3], mask=[0, 0, 1], text_bytes=9, kind="c", floor_bits=None
    )
    text = HeldOutText(sources={"chats": [chat]}, shares={"chats": 1.0})  # type: ignore[list-item]
    exam = Exam(tasks={"bpb": None}, documents=lambda: text)
    with pytest.raises(DataError, match="holds conversations"):
        examine(subject_of(tokenizer), exam, results(tmp_path))


def test_weights_that_were_overwritten_are_others(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("one")
    bundle: Any = SimpleNamespace(path=tmp_path)
    before = stamp_of(bundle)
    assert stamp_of(bundle) == before
    later = (tmp_path / "model.safetensors").stat().st_mtime_ns + 10**9
    os.utime(tmp_path / "model.safetensors", ns=(later, later))
    assert stamp_of(bundle) != before


def test_scores_are_added_to_those_of_the_same_weights_only(tmp_path: Path) -> None:
    lines = [{"id": "0", "score": 1.0, "weight": 1.0}]
    for name, task in (("a", "lm-eval-x"), ("a", "lm-eval-y"), ("b", "lm-eval-z")):
        results = Results(tmp_path / "out", source=name, step=0, stamp=f"/{name} 1")
        results.close(task, {"value": 1.0}, lines)
        if task == "lm-eval-y":
            assert set(read_scores(tmp_path / "out")["tasks"]) == {"lm-eval-x", "lm-eval-y"}
    assert set(read_scores(tmp_path / "out")["tasks"]) == {"lm-eval-z"}


def test_scores_of_the_training_stay_when_more_is_asked_later(
    tiny: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = write_bundle(tmp_path / "eval_bundle.zip")
    asked = tiny.eval.replace(tasks=(f"copa={bundle}",), tasks_every=4, tasks_limit=2)
    run = RunDir(tmp_path / "run")
    train(tiny.replace(train={"horizon": 4}, eval=asked), run)
    capsys.readouterr()
    words = ["eval", str(run.path), f"squad={bundle}", "--limit", "2", "--json", "--device", "cpu"]
    run_verb(words)
    scores = json.loads(capsys.readouterr().out)
    assert set(scores["tasks"]) == {"copa", "squad"}
    request = EvalRequest(
        source=str(run.path), tasks=[f"winograd={bundle}"], out=tmp_path / "followed"
    )
    for found in follow(replace(request, limit=2, device="cpu")):
        assert set(found["tasks"]) == {"winograd"}
        folder = tmp_path / "followed" / f"step-{found['step']}"
        assert read_scores(folder)["step"] == found["step"]
    assert found["step"] == 4
