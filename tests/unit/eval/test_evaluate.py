"""The whole evaluation: what is measured is decided by the run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foundling.checkpoint.bundle import Bundle
from foundling.config.data import DataConfig
from foundling.config.data_manifest import Manifest
from foundling.config.errors import DataError
from foundling.config.load import dump_yaml
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.config.train import TrainConfig
from foundling.data.build.build import build
from foundling.data.dataset import DataSet, held_out
from foundling.data.open_source import open_source
from foundling.eval.bits_per_byte import held_out_bpb
from foundling.eval.evaluate import (
    describe_scores,
    evaluate,
    find_material,
    held_out_text,
    village_of,
)
from foundling.hamlet.documents import document
from foundling.hamlet.village import Village
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.runtime.run_dir import RunDir
from foundling.tokenizer.bpe_trainer import train_tokenizer
from foundling.tokenizer.tokenizer import Tokenizer

CPU = torch.device("cpu")
SEED = 2


class World:
    """A village's text and conversations, a file of other text, and a tokenizer for all."""

    def __init__(self, root: Path) -> None:
        village = Village(SEED)
        texts = [document(village, SEED, index, "train").text for index in range(60)]
        self.root = root
        self.tokenizer: Tokenizer = train_tokenizer(texts, 400)
        self.text = self._build("hamlet", "text")
        self.chat = self._build("hamlet:chat", "chat")
        file = root / "other.txt"
        file.write_text("\n\n".join(f"Page {index} of a book." for index in range(40)))
        self.other = self._build(str(file), "text")

    def _build(self, spec: str, kind: Any) -> str:
        folder = self.root / "data" / Path(spec).stem.replace(":", "-")
        rows = open_source(spec, seed=SEED, documents=40, val_share=0.2)
        build(rows, self.tokenizer, folder, name=folder.name, kind=kind, val_share=0.2)
        return str(folder)

    def bundle(self, name: str, source: str, *, chat: bool = False, parent: Any = None) -> Bundle:
        """A run with untrained weights."""
        config = RunConfig(
            model=ModelConfig(
                vocab_size=self.tokenizer.vocab_size, dim=16, layers=1, heads=2, ffn_dim=16
            ),
            data=DataConfig(sources={source: 1.0}),
            train=TrainConfig(seq_len=64, horizon=1, start="x" if parent else ""),
        )
        run = RunDir(self.root / name)
        run.path.mkdir(exist_ok=True)
        run.config_path.write_text(dump_yaml(config))
        stated = {"path": parent, "step": 1} if parent else None
        run.write_info({"chat": chat, "status": "finished", "parent": stated})
        model = Transformer(config.model).eval()
        init_weights(model, 1)
        path = run.checkpoints / "step-00000001"
        fields = {"config": config, "tokenizer": self.tokenizer, "model": model, "step": 1}
        fields |= {"path": path, "meta": {}, "run": run.path, "is_chat": chat}
        known = Bundle.__dataclass_fields__
        return Bundle(**{key: value for key, value in fields.items() if key in known})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def test_a_hamlet_run_has_everything_that_is_promised(world: World) -> None:
    found = evaluate(world.bundle("base", world.text), device=CPU, quiz_questions=20)
    assert json.loads(json.dumps(found)) == found
    assert found["full_bpb"] > found["full_floor_bpb"] > 0
    part = found["by_source"][world.text]
    assert part["loss"] > part["floor_loss"] > 0
    assert found["data"] == [world.text]
    quiz = found["quiz"]
    assert quiz["n"] == len(quiz["replies"]) == 20
    assert 0 <= quiz["accuracy"] <= 1
    assert {"stderr", "documents_only"} <= set(quiz)


def test_scores_are_told_with_what_they_rest_on(world: World) -> None:
    bundle = world.bundle("base", world.text)
    found = evaluate(bundle, device=CPU, quiz_questions=20)
    told = "\n".join(describe_scores(found))
    assert f"{found['full_bpb']:.4f}" in told
    assert f"above the floor {found['full_floor_bpb']:.4f}" in told
    assert "of 20 right" in told
    few = evaluate(bundle, device=CPU, quiz_questions=1)  # too few for every kind of question
    assert "of 1 right" in "\n".join(describe_scores(few))
    bare = {"full_bpb": None, "full_floor_bpb": None, "quiz": None}
    assert describe_scores(bare) == []


def test_the_score_is_that_of_the_held_out_split(world: World) -> None:
    bundle = world.bundle("base", world.text)
    found = evaluate(bundle, device=CPU, quiz_questions=0)
    documents = list(held_out(DataSet(world.text)))
    plain = held_out_bpb(bundle.model, documents, CPU, window=64)
    assert found["full_bpb"] == pytest.approx(plain.bpb, rel=1e-9)
    assert (
        found["documents"]
        == len(documents)
        == sum(s.documents for s in Manifest.load(Path(world.text)).val)
    )
    assert found["quiz"] is None


def test_a_chat_run_is_measured_on_the_text_of_its_parent(world: World) -> None:
    world.bundle("base", world.text)
    bundle = world.bundle("chat", world.chat, chat=True, parent=str(world.root / "base"))
    material = find_material(bundle)
    assert material.text == {world.text: 1.0}
    assert material.village == SEED
    assert evaluate(bundle, device=CPU, quiz_questions=0)["full_floor_bpb"] is not None


def test_a_chat_run_whose_parent_is_gone_still_has_its_quiz(world: World) -> None:
    bundle = world.bundle("orphan", world.chat, chat=True, parent="nowhere")
    found = evaluate(bundle, device=CPU, quiz_questions=10)
    assert found["full_bpb"] is None
    assert found["quiz"]["n"] == 10


def test_a_run_on_other_text_has_no_quiz_and_no_floor(world: World) -> None:
    found = evaluate(world.bundle("book", world.other), device=CPU, quiz_questions=10)
    assert found["quiz"] is None
    assert found["full_floor_bpb"] is None
    assert found["full_bpb"] > 0


def test_several_sources_are_scored_together_and_apart(world: World) -> None:
    bundle = world.bundle("both", world.text)
    config = bundle.config.replace(data=DataConfig(sources={world.text: 1.0, world.other: 1.0}))
    found = evaluate(replace(bundle, config=config), device=CPU, quiz_questions=0)
    parts = found["by_source"]
    assert set(parts) == {world.text, world.other}
    assert found["full_bpb"] == pytest.approx(sum(part["bpb"] for part in parts.values()) / 2)
    assert found["bytes"] == sum(part["bytes"] for part in parts.values())
    assert found["full_floor_bpb"] is None
    kinds = {
        kind: score["bpb"] for part in parts.values() for kind, score in part["by_kind"].items()
    }
    assert {k: score["bpb"] for k, score in found["by_kind"].items()} == pytest.approx(kinds)


def test_other_data_can_be_asked_for(world: World) -> None:
    bundle = world.bundle("base", world.text)
    told: list[str] = []
    found = evaluate(bundle, device=CPU, data_path=world.other, quiz_questions=10, say=told.append)
    assert found["data"] == [world.other]
    assert found["quiz"] is not None
    assert any(world.other in text for text in told)
    with pytest.raises(DataError, match="conversations"):
        evaluate(bundle, device=CPU, data_path=world.chat, quiz_questions=0)


def test_other_data_is_measured_without_the_run_s_own(world: World) -> None:
    bundle = world.bundle("gone", str(world.root / "deleted"))
    with pytest.raises(DataError, match="deleted does not exist"):
        evaluate(bundle, device=CPU)
    told: list[str] = []
    found = evaluate(bundle, device=CPU, data_path=world.other, quiz_questions=10, say=told.append)
    assert found["data"] == [world.other]
    assert found["full_bpb"] > 0
    assert found["quiz"] is None
    assert any(text.startswith("no quiz") and "deleted" in text for text in told)
    text = held_out_text(bundle, world.other, limit=2)
    assert [len(documents) for documents in text.sources.values()] == [2]


def test_the_village_is_found_in_a_recipe() -> None:
    def manifest(recipe: dict[str, Any]) -> Manifest:
        return Manifest(
            name="x",
            kind="text",
            tokenizer="t",
            vocab_size=9,
            token_dtype="uint16",
            train=(),
            val=(),
            recipe=recipe,
        )

    assert village_of(manifest({"source": {"source": "hamlet:chat", "seed": 4}})) == 4
    assert village_of(manifest({"source": {"source": "hamlet", "seed": 5}})) == 5
    assert village_of(manifest({"source": {"source": "books", "seed": 5}})) is None
    assert village_of(manifest({})) is None
