"""Who makes the next epoch: claims in the store of objects.

`epochs/N` is created by the one process that may make epoch N, and `epochs/N-ready` once it was made.
A claim has no clock: the others look whether the work goes on (`Patience`), and if it does not, one of
them claims the next number. Redis then refuses whatever the earlier one still sends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from fleetkeeper_gateway.batch.interfaces import Objects
from fleetkeeper_gateway.batch.queue.server import ServerEpoch

FOLDER = "epochs/"
KEPT = 100
"""Epochs of which objects are kept."""
_READY = "-ready"


@dataclass(frozen=True, slots=True)
class Claims:
    """The epochs that were claimed."""

    latest: int
    ready: bool
    """Whether the latest one was made."""


class Epochs:
    """The claims of all processes."""

    def __init__(self, objects: Objects, process: str) -> None:
        self._objects = objects
        self._process = process

    async def read(self) -> Claims:
        """Return the claims."""
        found = [item.path.removeprefix(FOLDER) for item in await self._objects.list(FOLDER)]
        made = {int(name.removesuffix(_READY)) for name in found if name.endswith(_READY)}
        latest = max((int(name.removesuffix(_READY)) for name in found), default=0)
        return Claims(latest, latest in made)

    async def claim(self, number: int) -> bool:
        """Claim an epoch. Return False if another process did."""
        return await self._objects.create(_path(number), self._note())

    async def made(self, number: int) -> None:
        """Keep that an epoch was made. Idempotent."""
        await self._objects.create(_path(number) + _READY, self._note())
        if number > KEPT:
            old = _path(number - KEPT)
            await self._objects.delete([old, old + _READY])

    def _note(self) -> bytes:
        return json.dumps({"process": self._process}).encode()


class Patience:
    """How long another process has made no progress with an epoch."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._seen: tuple[Claims, ServerEpoch] | None = None
        self._since = 0.0

    def ended(self, claims: Claims, server: ServerEpoch) -> bool:
        """Return whether nothing changed for the whole time, by this process' own clock."""
        now = self._clock()
        if self._seen != (claims, server):
            self._seen, self._since = (claims, server), now
        return now - self._since >= self._patience_s


def _path(number: int) -> str:
    return f"{FOLDER}{number:010d}"
