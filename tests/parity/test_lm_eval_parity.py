"""`--model foundling` against the harness's own `--model hf` on the same weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foundling.config.run import RunConfig
from tests.parity.lm_eval_scene import ASKED, TASKS, export, train_run, write_tasks

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore")


class Scene:
    """A run, its export, and the tasks."""

    def __init__(self, root: Path, config: RunConfig) -> None:
        self.run = train_run(config, root / "run")
        self.folder = export(self.run, root / "hf")
        self.tasks = write_tasks(root / "tasks")

    def samples(self, model: str, where: str, **more: Any) -> dict[str, list[dict[str, Any]]]:
        """What the harness logs for each question of each task."""
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        import foundling.eval.lm_eval_adapter  # noqa: F401  registers the model

        found = simple_evaluate(
            model=model,
            model_args=f"{where},device=cpu",
            tasks=more.pop("tasks", list(TASKS)),
            task_manager=TaskManager(include_path=str(self.tasks), include_defaults=False),
            bootstrap_iters=0,
            **more,
        )
        assert found is not None
        return dict(found["samples"])


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, village_config: RunConfig) -> Iterator[Scene]:
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("lm-eval")
        patch.setenv("HF_HOME", str(root / "hf-home"))
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield Scene(root, village_config)


def test_every_task_agrees_with_hf(scene: Scene) -> None:
    ours = scene.samples("foundling", f"path={scene.run}")
    theirs = scene.samples("hf", f"pretrained={scene.folder},dtype=float32")
    assert set(ours) == set(theirs) == set(TASKS)
    for name in TASKS:
        assert len(ours[name]) == len(theirs[name]) == ASKED
        for mine, other in zip(ours[name], theirs[name], strict=True):
            assert mine["doc_id"] == other["doc_id"]
            assert_same(mine["resps"], other["resps"])
    texts = [row["resps"][0][0] for row in ours["village_written"]]
    assert len(set(texts)) > ASKED / 2  # and they are worth comparing
    assert any(len(text) > 10 for text in texts)
    assert not any("e" in text for text in texts)


def test_chats_agree_with_hf(scene: Scene) -> None:
    asked: dict[str, Any] = {
        "tasks": ["village_shots", "village_written"],
        "apply_chat_template": True,
        "system_instruction": "Answer about the village.",
    }
    ours = scene.samples("foundling", f"path={scene.run},max_length=512", **asked)
    theirs = scene.samples("hf", f"pretrained={scene.folder},dtype=float32,max_length=512", **asked)
    for name in asked["tasks"]:
        for mine, other in zip(ours[name], theirs[name], strict=True):
            assert "<|end|><|assistant|>" in mine["arguments"][0][0]
            assert mine["arguments"] == other["arguments"]
            assert_same(mine["resps"], other["resps"])


def assert_same(mine: Any, other: Any) -> None:
    """Loglikelihoods to 1e-3, texts and greediness exactly."""
    if isinstance(mine, (list, tuple)):
        assert len(mine) == len(other)
        for pair in zip(mine, other, strict=True):
            assert_same(*pair)
    elif isinstance(mine, float):
        assert mine == pytest.approx(other, abs=1e-3)
    else:
        assert mine == other
