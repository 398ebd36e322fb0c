"""CORE: the fast way is the plain way, question by question; the mean is what it says it is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foundling.config.errors import DataError
from foundling.config.model import ModelConfig
from foundling.eval.task_scoring import evaluation_engine, run_icl, spans_of
from foundling.generate.engine import Engine
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.tasks.base import Score
from foundling.tasks.core import CORE_TASKS, CoreBundle, core_score, find_bundle
from foundling.tokenizer.tokenizer import Tokenizer
from tests.unit.eval.plain_core import plain_task, read_task
from tests.unit.eval.small_bundle import write_bundle
from tests.village import Village

CPU = torch.device("cpu")
PUBLISHED = {
    "hellaswag_zeroshot": (0.308504, 0.502, 25),
    "jeopardy": (0.001889, 0.092, 0),
    "bigbench_qa_wikidata": (0.282663, 0.531, 0),
    "arc_easy": (0.412458, 0.595, 25),
    "arc_challenge": (0.221843, 0.299, 25),
    "copa": (0.6, 0.67, 50),
    "commonsense_qa": (0.224406, 0.227, 20),
    "piqa": (0.62296, 0.725, 50),
    "openbook_qa": (0.278, 0.346, 25),
    "lambada_openai": (0.322919, 0.523, 0),
    "hellaswag": (0.307907, 0.512, 25),
    "winograd": (0.578755, 0.714286, 50),
    "winogrande": (0.486188, 0.569, 50),
    "bigbench_dyck_languages": (0.155, 0.247, 0),
    "agi_eval_lsat_ar": (0.226087, 0.273913, 20),
    "bigbench_cs_algorithms": (0.419697, 0.417, 0),
    "bigbench_operators": (0.085714, 0.157143, 0),
    "bigbench_repeat_copy_logic": (0.03125, 0.09375, 0),
    "squad": (0.058278, 0.309, 0),
    "coqa": (0.133659, 0.28, 0),
    "boolq": (0.552294, 0.619, 62),
    "bigbench_language_identification": (0.2566, 0.25, 9.1),
}
"""Published accuracies of GPT-2 and GPT-2 XL, and what guessing scores in percent."""

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"kv_heads": 1},
    "learned": {"positions": 96},
    "windows": {"windows": (16, 16, 16, 0)},
    "capped": {"qk_norm": True, "logit_softcap": 15.0, "activation": "relu2"},
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("core") / "eval_bundle.zip")


@pytest.fixture(scope="module")
def tokenizer(village: Village) -> Tokenizer:
    return Tokenizer.load(village.tokenizer)


def model_of(tokenizer: Tokenizer, **shape: Any) -> Transformer:
    """Weights loud enough that choices differ by more than rounding."""
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, dim=32, layers=2, heads=2, ffn_dim=64, **shape
    )
    model = Transformer(config).eval()
    init_weights(model, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model


def fast_task(engine: Engine, tokenizer: Tokenizer, bundle: Path, name: str, limit: int) -> Any:
    task = CoreBundle(bundle).task(name).chosen(limit)
    lines: list[dict[str, Any]] = []
    run_icl(engine, tokenizer, task, range(len(task)), lines.extend)
    return {line["id"]: bool(line["score"]) for line in lines}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_question_is_judged_as_one_text_at_a_time_is(
    shape: str, bundle: Path, tokenizer: Tokenizer
) -> None:
    model = model_of(tokenizer, **SHAPES[shape])
    engine = evaluation_engine(model, CPU, max_tokens=300)
    outcomes = []
    for name in CORE_TASKS if shape == "grouped" else CORE_TASKS[:2] + CORE_TASKS[11:14]:
        spec, rows = read_task(bundle, name)
        plain = plain_task(model, tokenizer, spec, rows, 7)
        assert fast_task(engine, tokenizer, bundle, name, 7) == plain, name
        outcomes += plain.values()
    assert any(outcomes)
    assert not all(outcomes)


def test_losses_do_not_depend_on_the_batch_or_on_sharing(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer, kv_heads=1)
    draw = np.random.default_rng(1)
    texts, starts = [], []
    for _ in range(9):
        prompt = draw.integers(0, tokenizer.vocab_size, draw.integers(9, 60))
        ends = [draw.integers(0, tokenizer.vocab_size, draw.integers(1, 9)) for _ in range(3)]
        texts += [np.concatenate([prompt, end]) for end in ends]
        starts += [len(prompt)] * len(ends)
    found = {
        size: dict(evaluation_engine(model, CPU, max_tokens=size).score(texts, starts))
        for size in (1, 200, 100_000)
    }
    apart = Engine(model, CPU, cache_bytes=1 << 20, shares=False)
    for place, (text, start) in enumerate(zip(texts, starts, strict=True)):
        ((_, alone),) = apart.score([text], [start])
        for scores in found.values():
            assert scores[place].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
            assert scores[place].likeliest == alone.likeliest


def test_equal_answers_score_equally_to_the_bit(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer)
    text = np.arange(40)
    texts = [text, np.flip(text), text.copy()]
    found = dict(evaluation_engine(model, CPU).score(texts, [30, 30, 30]))
    assert found[0] == found[2] != found[1]


def test_the_centring_gives_the_published_means() -> None:
    baselines = {name: row[2] / 100 for name, row in PUBLISHED.items()}
    for column, mean in ((0, 0.1139), (1, 0.2565)):
        scores = {
            name: Score(name=name, value=row[column], n=100, stderr=0.05)
            for name, row in PUBLISHED.items()
        }
        found = core_score(scores, baselines)
        assert found.score.value == pytest.approx(mean, abs=5e-5)
        assert not found.missing
        assert found.score.n == 2200
    stretched = sum((0.05 / (1 - baselines[name])) ** 2 for name in CORE_TASKS) ** 0.5 / 22
    assert found.score.stderr == pytest.approx(stretched)


def test_a_missing_task_is_named_and_the_mean_is_partial(bundle: Path, tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(bundle) as file:
        file.extractall(tmp_path)
    (tmp_path / "eval_bundle" / "eval_data" / "some_kind" / "copa.jsonl").unlink()
    for place in (tmp_path, tmp_path / "eval_bundle"):
        read = CoreBundle(place)
        assert set(CORE_TASKS) - set(read.names) == {"copa"}
        with pytest.raises(DataError, match="has no task copa"):
            read.task("copa")
    scores = {name: Score(name=name, value=0.5, n=4, stderr=0.1) for name in read.names}
    found = core_score(scores, read.baselines)
    assert found.to_json()["partial"]
    assert found.missing == ("copa",)
    assert len(found.centered) == 21


def test_ids_are_the_same_in_every_subsample(bundle: Path) -> None:
    task = CoreBundle(bundle).task("copa")
    few, all_ = ([number for number, _ in task.chosen(limit).rows] for limit in (5, 0))
    assert few == all_[:5]
    assert sorted(all_) == list(range(8))
    assert task.chosen(5).question(0).texts != task.chosen(0).question(0).texts  # other examples


def test_solved_examples_are_drawn_without_the_question(bundle: Path) -> None:
    task = CoreBundle(bundle).task("piqa").chosen()
    for place in range(len(task)):
        own = task.rows[place][1]
        assert task._shots(place).count(own) == 0
        assert len(task._shots(place)) == 3


def test_a_text_begins_with_bos_and_a_long_one_loses_its_beginning(
    bundle: Path, tokenizer: Tokenizer
) -> None:
    question = CoreBundle(bundle).task("boolq").chosen().question(0)
    whole, cut = (spans_of(tokenizer, [question], most)[0] for most in (None, 20))
    assert all(span.tokens[0] == tokenizer.bos_id for span in whole)
    for long, short in zip(whole, cut, strict=True):
        assert short.tokens.tolist() == long.tokens[-20:].tolist()
        assert len(short.tokens) - short.start == len(long.tokens) - long.start


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"no zip at all", "is no evaluation bundle"),
        (None, "does not exist"),
    ],
)
def test_a_bundle_that_is_none(content: bytes | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "bundle.zip"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        CoreBundle(find_bundle(str(path)))


def test_a_limit_below_the_solved_examples_takes_them_from_behind_it(bundle: Path) -> None:
    task = CoreBundle(bundle).task("piqa")
    few = task.chosen(1)
    assert len(few) == 1
    behind = [row for _, row in task.chosen().rows[1:4]]
    assert sorted(map(str, few._shots(0))) == sorted(map(str, behind))
    assert few.question(0).texts == task.chosen(4).question(0).texts
    with pytest.raises(DataError, match="has 8 questions to draw them from; give fewer --shots"):
        CoreBundle(bundle).task("piqa", shots=8).chosen()


def test_without_a_bundle_it_says_where_one_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOUNDLING_HOME", str(tmp_path))
    with pytest.raises(DataError, match="--bundle or \\$FOUNDLING_CORE"):
        find_bundle()
    (tmp_path / "core").mkdir()
    write_bundle(tmp_path / "core" / "eval_bundle.zip")
    assert CoreBundle(find_bundle()).names == list(CORE_TASKS)
