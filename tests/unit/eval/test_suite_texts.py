"""Held-out text as a task: known by what it says, kept part by part; and whose scores lie where."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foundling.config.errors import ConfigError, DataError
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.data.build.build import build
from foundling.data.dataset import DataSet, held_out
from foundling.data.open_source import open_source, training_texts
from foundling.eval.bits_per_byte import document_ids
from foundling.eval.comparison import compare
from foundling.eval.evaluate import EvalRequest, follow, refuse_others, stamp_of
from foundling.eval.results import TRAINING, Results, describe_tasks, read_examples, read_scores
from foundling.eval.suite import Exam, HeldOutText, Subject, check_asked, examine
from foundling.generate import engine as engine_module
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.runtime.run_dir import RunDir
from foundling.tasks.in_context import IclTask
from foundling.tasks.registry import Registry
from foundling.tokenizer.bpe_trainer import train_tokenizer
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.train.evaluation import check_tasks
from foundling.train.loop import train
from tests.unit.eval.small_bundle import write_bundle
from tests.village import Village

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def other_village(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Path]:
    """The same documents in another folder, cut by a tokenizer of its own."""
    home = tmp_path_factory.mktemp("other")
    tokenizer = train_tokenizer(training_texts(["hamlet"], max_bytes=30_000), 300)
    source = open_source("hamlet", val_share=0.05)
    build(source, tokenizer, home / "text", name="text", kind=source.kind, max_tokens=30_000)
    return tokenizer, home / "text"


def subject_of(tokenizer: Tokenizer) -> Subject:
    model = Transformer(
        ModelConfig(vocab_size=tokenizer.vocab_size, dim=16, layers=1, heads=2, ffn_dim=16)
    )
    init_weights(model, 1)
    return Subject(model=model, tokenizer=tokenizer, device=CPU)


def exam_of(folder: Path, **more: Any) -> Exam:
    sources = {str(folder): list(held_out(DataSet(folder)))}
    text = HeldOutText(sources=sources, shares={str(folder): 1.0})
    return Exam(tasks={"bpb": None}, documents=lambda: text, **more)


def results(folder: Path) -> Results:
    return Results(folder, source="some/run", step=3, stamp="x")


def test_two_tokenizers_are_compared_on_the_documents_both_hold_out(
    village: Village, other_village: tuple[Tokenizer, Path], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(village.tokenizer)
    for name, (reader, folder) in {"a": (tokenizer, village.text), "b": other_village}.items():
        examine(subject_of(reader), exam_of(folder), results(tmp_path / name))
    found = compare([str(tmp_path / "a")], [str(tmp_path / "b")])
    both, own = found["tasks"]["bpb"]["n"], len(read_examples(tmp_path / "b", "bpb"))
    assert both == own > 5
    assert not [note for note in found["notes"] if "weights" in note]


def test_a_source_weighs_its_share_and_completions_are_limited(
    village: Village, tmp_path: Path
) -> None:
    subject = subject_of(Tokenizer.load(village.tokenizer))
    documents = list(held_out(DataSet(village.text)))[:5]
    sources = {"a": documents[:1], "b": documents[1:], "empty": []}
    text = HeldOutText(sources=sources, shares={"a": 0.2, "b": 0.3, "empty": 0.5})
    tasks = {"bpb": None, "completions": None}
    examine(subject, Exam(tasks=tasks, documents=lambda: text, limit=2), results(tmp_path))
    bits, completions = read_scores(tmp_path)["tasks"].values()
    assert completions["n"] == len(completions["texts"]) == 2
    parts = bits["by_source"]
    assert bits["value"] == pytest.approx(0.4 * parts["a"]["value"] + 0.6 * parts["b"]["value"])
    lines = read_examples(tmp_path, "bpb")
    mean = sum(line["weight"] * line["score"] for line in lines) / sum(x["weight"] for x in lines)
    assert mean == pytest.approx(bits["value"]), "what compare takes of the lines"
    assert bits["bytes"] == sum(document.text_bytes for document in documents)


def test_a_document_that_is_there_twice_has_two_ids(village: Village) -> None:
    tokenizer = Tokenizer.load(village.tokenizer)
    documents = list(held_out(DataSet(village.text)))[:3]
    ids = document_ids(tokenizer, [*documents, documents[0], documents[0]])
    assert ids[3:] == [f"{ids[0]}-2", f"{ids[0]}-3"]
    assert len(set(ids)) == 5


def test_held_out_text_goes_on_where_it_was_cut(village: Village, tmp_path: Path) -> None:
    subject = subject_of(Tokenizer.load(village.tokenizer))
    examine(subject, exam_of(village.text), results(tmp_path / "whole"))
    batches: list[int] = []

    class Killed(BaseException):
        pass

    def between() -> None:
        batches.append(1)
        if len(batches) == 12:
            raise Killed

    small = exam_of(village.text, max_tokens=60)
    with pytest.raises(Killed):
        examine(subject, replace(small, between=between), results(tmp_path / "cut"))
    kept = len((tmp_path / "cut" / "bpb.part-0").read_text().splitlines()) - 1
    rest: list[int] = []
    again = replace(small, between=lambda: rest.append(1))
    examine(subject, again, results(tmp_path / "cut"))
    whole, cut = (read_examples(tmp_path / name, "bpb") for name in ("whole", "cut"))
    assert 0 < kept < len(whole)
    assert [line["id"] for line in whole] == [line["id"] for line in cut]
    for one, other in zip(whole, cut, strict=True):
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)
    both = [read_scores(tmp_path / name)["tasks"]["bpb"]["value"] for name in ("whole", "cut")]
    assert both[0] == pytest.approx(both[1], abs=1e-5)


def test_memory_that_ran_out_once_is_not_asked_for_again(
    village: Village, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(engine_module, "warn", told.append)
    plain = Transformer.hidden

    def tight(self: Transformer, tokens: torch.Tensor, *more: Any, **cache: Any) -> Any:
        if tokens.numel() > 200:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, tokens, *more, **cache)

    monkeypatch.setattr(Transformer, "hidden", tight)
    monkeypatch.setattr("foundling.eval.bits_per_byte.PART_STEPS", 1)
    subject = subject_of(Tokenizer.load(village.tokenizer))
    examine(subject, exam_of(village.text, max_tokens=600), results(tmp_path))
    sizes = [int(text.split()[6].replace(",", "")) for text in told]
    assert sizes == [300, 150]


def test_core_with_other_shots_is_not_called_core(village: Village, tmp_path: Path) -> None:
    registry = Registry(bundle=str(write_bundle(tmp_path / "eval_bundle.zip")), shots=1)
    tasks = registry.find(["core"])
    exam = Exam(tasks=tasks, baselines=registry.core.baselines, limit=2, shots=registry.shots)
    examine(subject_of(Tokenizer.load(village.tokenizer)), exam, results(tmp_path / "out"))
    scores = read_scores(tmp_path / "out")
    assert (scores["core"]["name"], scores["core"]["shots"]) == ("core_1_shot", 1)
    told = describe_tasks(scores)
    assert told[-2].startswith("CORE, --shots 1 ")
    assert "not CORE: --shots" in told[-1]


def test_scores_of_another_model_are_not_overwritten(tmp_path: Path) -> None:
    bundles: list[Any] = []
    for name in "ab":
        (tmp_path / name).mkdir()
        bundles.append(SimpleNamespace(path=tmp_path / name, run=tmp_path / name, step=0))
    out = tmp_path / "out"
    refuse_others(bundles[0], out)
    Results(out, source="a", step=0, stamp=stamp_of(bundles[0])).write()
    refuse_others(bundles[0], out)
    with pytest.raises(DataError, match=r"holds the scores of .*/a; name another folder"):
        refuse_others(bundles[1], out)


def test_a_run_s_own_folder_is_its_own_however_it_is_spelled(tmp_path: Path) -> None:
    run = tmp_path / "run"
    out = run / "evals" / "step-5"
    Results(out, source="run", step=5, stamp=f"{TRAINING}course 1").write()
    (run / "run.json").write_text("{}")
    bundle: Any = SimpleNamespace(path=run / "checkpoints" / "step-5", run=run, step=5)
    refuse_others(bundle, out)
    refuse_others(bundle, tmp_path / "run" / ".." / "run" / "evals" / "step-5")


def test_what_cannot_be_asked_is_told_before_anything_is(tiny: RunConfig, tmp_path: Path) -> None:
    row = {"context": "one and", "continuation": "two"}
    few = IclTask(name="few", kind="language_modeling", rows=[(0, row)], shots=3)
    with pytest.raises(DataError, match="give fewer --shots"):
        check_asked({"few": few}, 0)
    asked = tiny.replace(eval={"tasks": ("quiz",), "tasks_every": 4})
    with pytest.raises(DataError, match="leave it out of the list"):
        train(asked, RunDir(tmp_path / "run"))
    assert not (tmp_path / "run" / "run.json").exists()


def test_bits_per_byte_are_not_asked_of_a_run_without_text(
    tiny: RunConfig, village: Village
) -> None:
    asked = tiny.eval.replace(tasks=("bpb",), tasks_every=4)
    check_tasks(asked, {"chat": DataSet(village.chat), "text": DataSet(village.text)})
    with pytest.raises(ConfigError, match="no source of this run is text"):
        check_tasks(asked, {"chat": DataSet(village.chat)})


def test_following_a_run_that_nothing_trains_says_so_and_a_converted_one_ends(
    tiny: RunConfig, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    train(tiny.replace(train={"horizon": 3}), run)
    run.update_info(status="running")
    told: list[str] = []
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            run.update_info(status="converted")

    request = EvalRequest(source=str(run.path), tasks=["spelling"], limit=1, tell=told.append)
    found = list(follow(replace(request, device="cpu"), sleep=sleep))
    assert [scores["step"] for scores in found] == [3]
    assert len(slept) == 3
    assert len([text for text in told if "nothing trains" in text]) == 1
