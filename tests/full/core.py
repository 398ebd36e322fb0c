"""CORE on the whole public bundle: equal to the plain implementation, and ten times as fast.

Two models of a GPT-2 vocabulary, one with random weights and one trained here for a minute on the
corpus, are put to all 22 tasks both ways, and every example must be judged alike. Times are of the
processor, so that a busy machine decides nothing. Needs the data at $FOUNDLING_TEST_DATA (default:
../shared/data beside the repository).
"""

import csv
import io
import os
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from foundling.config.model import ModelConfig
from foundling.eval.task_scoring import evaluation_engine, run_icl
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.tasks.base import Score
from foundling.tasks.core import CORE_TASKS, CoreBundle, core_score
from foundling.tokenizer.tokenizer import Tokenizer
from tests.unit.eval.plain_core import plain_task, read_task

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("FOUNDLING_TEST_DATA", ROOT.parent / "shared" / "data"))
LIMIT, PUT = 11, 8
"""Examples a task and how many of them are put; the others are only drawn from, for up to ten
solved examples. One text at a time they take four minutes of a processor."""
STEPS, ROWS, LENGTH = 150, 8, 128
Figures = dict[str, Any]


def core() -> Figures:
    """Every example of both models equal; the published means; the ratio of the times."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(DATA / "tokenizers" / "gpt2")
    assert tokenizer.fast, tokenizer.why_slow
    bundle = CoreBundle(DATA / "core" / "eval_bundle.zip")
    model = _model(tokenizer.vocab_size)
    figures: Figures = {"published": _published(bundle), "limit": LIMIT, "put": PUT}
    figures["random"] = _beside(model, tokenizer, bundle)
    figures["loss after training"] = _train(model, tokenizer)
    figures["trained"] = _beside(model, tokenizer, bundle)
    for name in ("random", "trained"):
        found = figures[name]
        assert found["examples"] == PUT * len(CORE_TASKS), found
        assert not found["differ"], f"{name}: {found['differ']}"
        assert found["ratio"] < 0.1, f"{name}: {found['ratio']:.3f} of the plain time"
    return figures


def _published(bundle: CoreBundle) -> dict[str, float]:
    found = {}
    for name, mean in (("gpt2", 0.1139), ("gpt2-xl", 0.2565)):
        text = bundle._text(f"openai-community-{name}.csv")
        rows = list(csv.reader(io.StringIO(text), skipinitialspace=True))[1:]  # the last: the mean
        cells = [[cell.strip() for cell in row] for row in rows]
        values = {row[0]: float(row[1]) for row in cells if len(row) > 1 and row[1]}
        scores = {n: Score(name=n, value=v, n=1, stderr=0.0) for n, v in values.items()}
        found[name] = round(core_score(scores, bundle.baselines).score.value, 6)
        assert abs(found[name] - mean) < 5e-5, found
    return found


def _model(vocab: int) -> Transformer:
    config = ModelConfig(
        vocab_size=vocab, dim=128, layers=4, heads=4, ffn_dim=384, tie_embeddings=True
    )
    model = Transformer(config)
    init_weights(model, 1)
    return model.eval()


def _train(model: Transformer, tokenizer: Tokenizer) -> float:
    """A minute of plain training on real text, so that answers are not all alike."""
    table = pq.read_table(DATA / "corpus" / "val-00000.parquet", columns=["text"])
    ids: list[int] = []
    for text in table["text"].to_pylist():
        ids += tokenizer.document(text)
        if len(ids) > STEPS * ROWS * (LENGTH + 1):
            break
    rows = torch.tensor(ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)]).view(-1, LENGTH + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for step in range(STEPS):
        batch = rows[step * ROWS : (step + 1) * ROWS]
        loss, count = model.loss(batch[:, :-1], batch[:, 1:])
        (loss / count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return float((loss / count).detach())


def _beside(model: Transformer, tokenizer: Tokenizer, bundle: CoreBundle) -> Figures:
    engine = evaluation_engine(model, torch.device("cpu"))
    seconds = {"fast": 0.0, "plain": 0.0}
    differ: list[str] = []
    scores, examples = {}, 0
    for name in CORE_TASKS:
        task = bundle.task(name).chosen(LIMIT)
        spec, rows = read_task(DATA / "core" / "eval_bundle.zip", name)
        lines: list[dict[str, Any]] = []
        began = time.process_time()
        run_icl(engine, tokenizer, task, range(PUT), lines.extend)
        middle = time.process_time()
        plain = plain_task(model, tokenizer, spec, rows, LIMIT, PUT)
        seconds["fast"] += middle - began
        seconds["plain"] += time.process_time() - middle
        fast = {line["id"]: line for line in lines}
        assert set(fast) == set(plain)
        unlike = [f"{name} {id}" for id in plain if bool(fast[id]["score"]) != plain[id]]
        differ += unlike
        right = sum(plain.values())
        examples += len(plain)
        share = Score.of_share(name, right, len(plain))
        assert share is not None
        scores[name] = share
        print(f"  {name}: {right} of {len(plain)} right, {len(unlike)} differ", flush=True)
    return {
        "examples": examples,
        "differ": differ,
        "core": core_score(scores, bundle.baselines).score.value,
        "cpu_seconds": {kind: round(taken, 2) for kind, taken in seconds.items()},
        "ratio": round(seconds["fast"] / seconds["plain"], 4),
    }
