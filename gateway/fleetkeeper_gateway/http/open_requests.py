"""The open requests, and what ends them from outside: their key, their time, the end of the process."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final

from fleetkeeper_gateway.interfaces import Keys
from fleetkeeper_gateway.telemetry import metrics

PERIOD_S: Final = 0.5
"""Time between two checks. A revoked key ends its streams within 2 s, of which the watch takes most."""


class OpenRequest:
    """A request, from its head until its last byte."""

    __slots__ = ("arrived", "done", "key_id", "reason", "task", "waiting_since")

    def __init__(self, task: asyncio.Task[object], arrived: float) -> None:
        self.task = task
        self.arrived = arrived
        self.key_id: str | None = None
        self.waiting_since = math.inf
        """When the wait for the next part of the answer began; infinite if there is no such wait."""
        self.reason: str | None = None
        """Why it was aborted."""
        self.done = False

    def abort(self, reason: str) -> None:
        """End it. The first reason counts."""
        if self.reason is None and not self.done:
            self.reason = reason
            self.task.cancel()


class OpenRequests:
    """All open requests of the process."""

    def __init__(self, keys: Keys, *, request_timeout_s: float, idle_timeout_s: float) -> None:
        self._keys = keys
        self._request_timeout_s = request_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._requests: set[OpenRequest] = set()
        metrics.OPEN.set_function(lambda: len(self._requests))

    @property
    def count(self) -> int:
        """Return the number of open requests."""
        return len(self._requests)

    def add(self, request: OpenRequest) -> None:
        """Begin to watch a request."""
        self._requests.add(request)

    def remove(self, request: OpenRequest) -> None:
        """End the watch: nothing can abort the request any more."""
        request.done = True
        self._requests.discard(request)

    def abort_all(self, reason: str) -> None:
        """End every request."""
        for request in list(self._requests):
            request.abort(reason)

    async def watch(self) -> None:
        """End requests whose time is over or whose key is not in force, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PERIOD_S)
            self.check(loop.time(), time.time())

    def check(self, now: float, wall: float) -> None:
        """End requests whose time is over or whose key is not in force.

        Args:
            now: the event loop's time.
            wall: Unix seconds.
        """
        key_ids = {request.key_id for request in self._requests if request.key_id is not None}
        refused = {key_id for key_id in key_ids if not self._keys.in_force(key_id, wall)}
        for request in list(self._requests):
            if request.key_id in refused:
                request.abort("key_revoked")
            elif now - request.arrived > self._request_timeout_s:
                request.abort("timeout")
            elif now - request.waiting_since > self._idle_timeout_s:
                request.abort("idle")
