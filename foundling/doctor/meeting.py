"""Ranks that tell each other what they found, through the job's store alone.

A store is one TCP connection to the first node, which works where collectives do not: the doctor
must be able to say that gloo hangs on rank 3. Rejected: gathering over gloo, which is the patient.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from foundling.config.errors import RunError
from foundling.runtime.dist import World

PREFIX = "foundling-doctor"


class Meeting:
    """All ranks of a job. Each calls the same methods in the same order."""

    def __init__(self, world: World, limit_s: float) -> None:
        self.world, self._limit = world, timedelta(seconds=limit_s)
        store, _, _ = next(rendezvous("env://", timeout=self._limit))
        self._store = PrefixStore(PREFIX, store)

    def tell(self, name: str, mine: Any) -> list[Any]:
        """What every rank has to say about `name`, by rank; a rank that is silent is named."""
        self._store.set(f"{name}/{self.world.rank}", json.dumps(mine))
        found = []
        for rank in range(self.world.size):
            key = f"{name}/{rank}"
            try:
                self._store.wait([key], self._limit)
            except RuntimeError:
                raise RunError(
                    f"rank {rank} says nothing about {name} within"
                    f" {self._limit.total_seconds():.0f} s; see its output and its node."
                ) from None
            found.append(json.loads(self._store.get(key)))
        return found

    def from_first(self, name: str, mine: Any) -> Any:
        """What rank 0 says; the others' word does not count."""
        return self.tell(name, mine)[0]

    def leave(self) -> None:
        """The end: the first rank holds the store and goes last."""
        self._store.set(f"left/{self.world.rank}", "1")
        if self.world.is_main:
            keys: Sequence[str] = [f"left/{rank}" for rank in range(self.world.size)]
            self._store.wait(list(keys), self._limit)
