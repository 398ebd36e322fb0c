"""An engine over a model that ranks have parts of: what it writes and scores, in every rank."""

from typing import Any

import torch

from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig
from foundling.eval.task_scoring import evaluation_engine
from foundling.generate.engine import Engine
from foundling.generate.request import Request
from foundling.generate.sampling import Sampling
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.parallel.apply import apply_parallel
from foundling.parallel.mesh import make_mesh
from foundling.runtime.dist import world_from_environment

VOCAB = 61
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"kv_heads": 2, "init": {"std": 1.0, "head_std": 0.5}},
    "windows": {"kv_heads": 2, "windows": (8, 8, 8, 0), "qk_norm": True, "logit_softcap": 9.0, "init": {"std": 1.0, "head_std": 0.5}},
    "tied": {"tie_embeddings": True, "embed_norm": True},
}


def model_of(shape: str) -> Transformer:
    """Loud weights, so that the likeliest token is no matter of rounding."""
    fields = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "init": {"std": 1.0}, **SHAPES[shape]}
    model = Transformer(ModelConfig(vocab_size=VOCAB, **fields))
    init_weights(model, 3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("attn.o.weight", "ffn.down.weight")):
                weight.mul_(6)  # or tied embeddings answer each token with itself
    return model.eval()


def texts() -> list[list[int]]:
    """Some begin alike, and no length is a multiple of anything."""
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(VOCAB, (n,), generator=draw).tolist() for n in (3, 40, 17, 1, 29)]
    return [*rows, rows[1][:33] + rows[0], rows[1]]


def said(model: Transformer, step_tokens: int) -> tuple[list[list[int]], list[list[float]], int]:
    """Replies, greedy and drawn; scores; how often a request gave its blocks back."""
    engine = evaluation_engine(
        model, torch.device("cpu"), max_tokens=step_tokens, longest=80, max_running=5
    )
    requests = [
        Request(prompt=text, max_tokens=12, sampling=Sampling(temperature=heat, seed=number))
        for number, text in enumerate(texts())
        for heat in (0.0, 0.7)
    ]
    replies = [one.ids for one in engine.complete(requests)]
    scored = [text for text in texts() if len(text) > 2]
    scores = dict(engine.score(scored, [2] * len(scored)))
    assert engine.blocks.used == 0
    return replies, [scores[n].logprobs for n in range(len(scored))], engine.scheduler.preemptions


def said_by_ranks(shape: str, degrees: dict[str, int], step_tokens: int) -> Any:
    """The same of a model that is cut, as this rank has it; and heads of its cache."""
    parallel = ParallelConfig(**degrees)  # type: ignore[arg-type]
    model = model_of(shape)
    apply_parallel(model, parallel, make_mesh(parallel, world_from_environment(), torch.device("cpu")))
    heads = Engine(model, cache_bytes=1 << 16).cache.keys[0].shape[1]
    return said(model, step_tokens), heads
