"""lm-evaluation-harness through the server gives what it gives in this process."""

from pathlib import Path
from typing import Any

import pytest

from tests.parity.lm_eval_scene import ASKED, write_tasks
from tests.serving import Family, Running

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")
pytest.importorskip("tenacity")

pytestmark = pytest.mark.filterwarnings("ignore")
ASKED_TASKS = ["village_choice", "village_written"]


def samples(model: str, arguments: dict[str, Any], tasks: Path) -> dict[str, list[dict[str, Any]]]:
    """What the harness logs for each question of each task."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import foundling.eval.lm_eval_adapter  # noqa: F401  registers the model

    found = simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=ASKED_TASKS,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found is not None
    return dict(found["samples"])


def test_the_server_scores_as_the_process_does(
    server: Running, family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    tasks = write_tasks(tmp_path / "tasks")
    here = samples("foundling", {"path": str(family.base), "device": "cpu", "max_length": 127,
                                 "add_bos_token": False}, tasks)  # fmt: skip
    there = samples(
        "local-completions",
        {
            "model": "base",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(family.base / "tokenizer"),
            "tokenizer_backend": "huggingface",
            "max_length": 128,
            "num_concurrent": 4,
        },
        tasks,
    )
    for name in ASKED_TASKS:
        assert len(here[name]) == len(there[name]) == ASKED
        mine = {row["doc_id"]: row["filtered_resps"] for row in here[name]}
        for row in there[name]:
            assert_same(row["filtered_resps"], mine[row["doc_id"]])


def assert_same(mine: Any, other: Any) -> None:
    """Loglikelihoods to 1e-3, texts and greediness exactly."""
    if isinstance(mine, list | tuple):
        assert len(mine) == len(other)
        for pair in zip(mine, other, strict=True):
            assert_same(*pair)
    elif isinstance(mine, float):
        assert mine == pytest.approx(other, abs=1e-3)
    else:
        assert mine == other
