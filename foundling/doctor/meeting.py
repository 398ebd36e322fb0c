"""Ranks that tell each other what they found, through the job's store alone.

A store is one TCP connection to the first node, which works where collectives do not: the doctor
must be able to say that gloo hangs on rank 3. Rank 0 reads what each has to say and, where all have
to know, publishes it in one piece: a thousand ranks that read each other would be a million
questions. Rejected: gathering over gloo, which is the patient.
"""

import json
import os
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from foundling.config.errors import RunError
from foundling.runtime.dist import World

PREFIX = "foundling-doctor"
JOIN, PATIENCE = 5, 25
"""Limits of one check that ranks wait for the last to come, and then for the slowest to answer: it
may try every way to talk."""


class Meeting:
    """All ranks of a job. Each calls the same methods in the same order."""

    def __init__(self, world: World, limit_s: float) -> None:
        self.world, self._limit = world, timedelta(seconds=limit_s * PATIENCE)
        try:
            store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=limit_s * JOIN)))
        except RuntimeError as error:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RunError(
                f"the {world.size} ranks do not meet at {place} within {limit_s * JOIN:.0f} s; see"
                f" that each node reaches it and each rank was started ({type(error).__name__})."
            ) from None
        self._store = PrefixStore(PREFIX, store)

    def collect(self, name: str, mine: Any) -> list[Any]:
        """On rank 0 what every rank has to say about `name`, by rank; on the others nothing."""
        self._store.set(f"{name}/{self.world.rank}", json.dumps(mine))
        if not self.world.is_main:
            return []
        return [self._read(f"{name}/{rank}", f"rank {rank}") for rank in range(self.world.size)]

    def tell(self, name: str, mine: Any) -> list[Any]:
        """The same on every rank."""
        everyones = self.collect(name, mine)
        return self.from_first(f"{name}, all", everyones)  # type: ignore[no-any-return]

    def from_first(self, name: str, mine: Any) -> Any:
        """What rank 0 says; the others' word does not count."""
        if self.world.is_main:
            self._store.set(name, json.dumps(mine))
            return mine
        return self._read(name, "rank 0")

    def _read(self, key: str, who: str) -> Any:
        try:
            self._store.wait([key], self._limit)
        except RuntimeError:
            seconds = self._limit.total_seconds()
            raise RunError(
                f"{who} says nothing about {key.partition('/')[0]} within {seconds:.0f} s; see its"
                " output and its node."
            ) from None
        return json.loads(self._store.get(key))

    def leave(self) -> None:
        """The end: the first rank holds the store and goes last."""
        self.collect("leaving", True)
