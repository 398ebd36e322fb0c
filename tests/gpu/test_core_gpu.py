"""CORE on a GPU: 22 tasks of 500 examples for a model of GPT-2's size in under three minutes.

Needs the bundle and GPT-2's tokenizer at $FOUNDLING_TEST_DATA (default: ../shared/data beside the
repository), in the folders core/ and tokenizers/gpt2/.
"""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from foundling.config.model import ModelConfig
from foundling.eval.results import Results, read_scores
from foundling.eval.suite import Exam, Subject, examine
from foundling.eval.task_scoring import evaluation_engine
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.runtime.device import free_cached_memory
from foundling.tasks.registry import Registry
from foundling.tokenizer.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("FOUNDLING_TEST_DATA", ROOT.parent / "shared" / "data"))
GPU = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(not (DATA / "core").is_dir(), reason="needs the bundle"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DATA / "tokenizers" / "gpt2")


def model_of(tokenizer: Tokenizer, **shape: object) -> Transformer:
    fields = {"dim": 768, "layers": 12, "heads": 12, "ffn_dim": 2048, **shape}
    config = ModelConfig(vocab_size=tokenizer.vocab_size, tie_embeddings=True, **fields)  # type: ignore[arg-type]
    model = Transformer(config)
    init_weights(model, 1)
    return model.to(GPU).eval()


@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_22_tasks_of_500_take_less_than_three_minutes(
    dtype: torch.dtype, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = model_of(tokenizer)
    registry = Registry(bundle=str(DATA / "core" / "eval_bundle.zip"))
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    tasks = registry.find(["core"])
    exam = Exam(tasks=tasks, baselines=registry.core.baselines, limit=500)
    subject = Subject(model=model, tokenizer=tokenizer, device=GPU, dtype=dtype)
    examine(subject, exam, Results(tmp_path, source="random weights", step=0))
    seconds = time.perf_counter() - began
    scores = read_scores(tmp_path)
    figures = {
        "dtype": str(dtype),
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name(),
        "seconds": round(seconds, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "examples": scores["core"]["n"],
        "core": scores["core"]["value"],
        "by_task": {name: entry["seconds"] for name, entry in scores["tasks"].items()},
    }
    print(json.dumps(figures))
    if out := os.environ.get("OUT"):
        name = str(dtype).removeprefix("torch.")
        (Path(out) / f"core_{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    assert scores["core"]["n"] > 22 * 400
    assert not scores["core"]["partial"]
    assert seconds < 180, figures


def test_the_gpu_judges_as_the_cpu_does(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """fp32 on both; a tie within rounding may fall either way, one in hundreds."""
    from foundling.eval.results import read_examples

    torch.backends.cuda.matmul.allow_tf32 = False
    model = model_of(tokenizer, dim=128, layers=4, heads=4, ffn_dim=384)
    names = ["copa", "winograd", "arc_easy", "jeopardy", "bigbench_language_identification"]
    for device in (GPU, torch.device("cpu")):
        registry = Registry(bundle=str(DATA / "core" / "eval_bundle.zip"))
        subject = Subject(model=model.to(device), tokenizer=tokenizer, device=device)
        exam = Exam(tasks=registry.find(names), limit=30)
        examine(subject, exam, Results(tmp_path / device.type, source="x", step=0))
    pairs = [
        (one, other)
        for name in names
        for one, other in zip(
            *(read_examples(tmp_path / kind, name) for kind in ("cuda", "cpu")), strict=True
        )
    ]
    assert len(pairs) == 150
    assert sum(one["score"] != other["score"] for one, other in pairs) <= 1
    for one, other in pairs:
        if "losses" in one:
            assert one["losses"] == pytest.approx(other["losses"], abs=2e-3)


def test_memory_that_runs_out_halves_the_step(tokenizer: Tokenizer) -> None:
    """A budget of tokens that no GPU holds: it ends with scores all the same."""
    model = model_of(tokenizer)
    free_cached_memory()  # what earlier tests left in the allocator counts as taken
    engine = evaluation_engine(model, GPU, max_tokens=1 << 19)
    _ = engine.cache  # which has to fit
    free, _ = torch.cuda.mem_get_info()
    wall = torch.empty(max(0, int(free) - (4 << 30)), dtype=torch.uint8, device=GPU)
    rows = np.random.default_rng(0).integers(0, 50_000, (512, 1024))
    before = engine.scheduler.step_tokens
    done = [place for place, _ in engine.score(list(rows), [1000] * len(rows))]
    del wall
    assert sorted(done) == list(range(512))
    assert engine.scheduler.step_tokens < before
