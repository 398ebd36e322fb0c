"""foundling.json: what a layout that has no papers of its own, or poor ones, does not say."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from foundling.checkpoint.convert.source import Source
from foundling.config import CheckpointError, ConfigError, ModelConfig

OWN = "foundling.json"
SCHEMA = 1


@dataclass(frozen=True)
class Shape:
    """A model's config and what else its papers say."""

    model: ModelConfig
    positions: int = 0
    generation: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def own_papers(shape: Shape) -> dict[str, Any]:
    """What foundling.json says."""
    return {
        "schema": SCHEMA,
        "model": asdict(shape.model),
        "positions": shape.positions,
        "generation": shape.generation,
    }


def from_papers(tree: Any, where: Path) -> Shape:
    """A shape of what foundling.json says; anything unknown is refused."""
    if not isinstance(tree, dict) or tree.get("schema") != SCHEMA:
        raise CheckpointError(f"{where} has papers of another version of foundling.")
    known = {item.name for item in fields(ModelConfig)}
    stated = tree.get("model")
    if not isinstance(stated, dict) or not stated.keys() <= known:
        raise CheckpointError(f"{where} has papers with fields that this version does not know.")
    try:
        model = ModelConfig(**stated)
    except (TypeError, ConfigError) as error:
        raise CheckpointError(f"{where} has papers that cannot be used: {error}") from None
    positions, generation = tree.get("positions", 0), tree.get("generation") or {}
    if not isinstance(positions, int) or not isinstance(generation, dict):
        raise CheckpointError(f"{where} has papers that cannot be used.")
    return Shape(model, positions, generation)


def papers_of(source: Source) -> dict[str, Any]:
    """The papers that go with a source's result: also how long its rows were."""
    return own_papers(Shape(source.model, source.longest, source.generation))
