"""The engine that evaluation makes for a model."""

from typing import Any

import pytest
import torch

from foundling.config.model import ModelConfig
from foundling.eval import task_scoring
from foundling.eval.task_scoring import evaluation_engine
from foundling.model.transformer import Transformer


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_is_trained_decodes_without_graphs(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def engine(*_: Any, graphs: bool, **__: Any) -> None:
        asked.append(graphs)

    monkeypatch.setattr(task_scoring, "Engine", engine)
    model = Transformer(ModelConfig(vocab_size=20, dim=8, layers=1, heads=1, ffn_dim=8))
    evaluation_engine(model.train(training), torch.device("cpu"))
    assert asked == [not training]
