"""What an engine is, and how one is chosen."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from foundling.config.errors import ConfigError
from foundling.data.board import Board
from foundling.data.tasks import Job
from foundling.tokenizer import Tokenizer

if TYPE_CHECKING:
    from foundling.data.sources.base import Source

EngineName = Literal["local", "ray", "slurm"]
ENGINES: tuple[EngineName, ...] = ("local", "ray", "slurm")


class Engine(Protocol):
    """Has the tasks of a board done."""

    def run(self, board: Board, enough: Callable[[], bool]) -> None:
        """Work until `enough` says so or nothing is left; it may be called again for more."""
        ...

    def close(self) -> None:
        """Let go of everything; work that is not finished is dropped."""
        ...


@dataclass(frozen=True, kw_only=True)
class Specs:
    """How to open the sources again on another machine: what the user asked for."""

    specs: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    """Of ReadOptions."""
    seed: int = 1
    documents: int | None = None
    val_share: float = 0.02

    def open(self) -> "list[Source]":
        """The sources, as the user's own command opened them."""
        from foundling.data.sources import ReadOptions, open_source

        where = tuple(self.options.get("where", ()))
        options = ReadOptions(**{**self.options, "where": where})
        return [
            open_source(
                spec,
                seed=self.seed,
                documents=self.documents,
                val_share=self.val_share,
                options=options,
            )
            for spec in self.specs
        ]

    def to_json(self) -> dict[str, Any]:
        """As a file carries it."""
        return asdict(self)


def open_engine(
    name: EngineName,
    job: Job,
    tokenizer: Tokenizer,
    work: Path,
    *,
    workers: int,
    specs: Specs | None = None,
    budget: bool = False,
) -> Engine:
    """The engine of that name; `specs` is needed where sources are opened again elsewhere."""
    if name == "local":
        from foundling.data.engines.local import Here, Workers

        return Workers(job, tokenizer, workers) if workers > 1 else Here(job.open(tokenizer))
    if name == "ray":
        from foundling.data.engines.ray_tasks import RayTasks

        return RayTasks(job, tokenizer)
    if name == "slurm":
        from foundling.data.engines.slurm import SlurmArray

        if specs is None:
            raise ConfigError("the engine slurm opens sources by name; build it from the command.")
        tokenizer.save(Path(job.tokenizer))
        return SlurmArray(job, work, workers=workers, specs=specs, budget=budget)
    raise ConfigError(f"{name!r} is no engine; use one of {', '.join(ENGINES)}.")
