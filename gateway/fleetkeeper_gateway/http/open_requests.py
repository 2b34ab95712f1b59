"""The open requests, and the checks that abort them: key revoked, time over, process ends."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final

from fleetkeeper_gateway.interfaces import Keys
from fleetkeeper_gateway.telemetry import metrics

PERIOD_S: Final = 0.5
"""Period of the checks. A revoked key ends its streams within 2 s, most of which the watch takes."""


class OpenRequest:
    """A request, from its head until its last byte."""

    __slots__ = ("arrived", "done", "key_id", "reason", "task", "waiting_since")

    def __init__(self, task: asyncio.Task[object], arrived: float) -> None:
        self.task = task
        self.arrived = arrived
        self.key_id: str | None = None
        self.waiting_since = math.inf
        """Start of the wait for the next part of the answer; infinite without such a wait."""
        self.reason: str | None = None
        """Reason of the abort; None without an abort."""
        self.done = False

    def abort(self, reason: str) -> None:
        """Abort the request. The first reason counts."""
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
        """Start to check a request."""
        self._requests.add(request)

    def remove(self, request: OpenRequest) -> None:
        """Stop checking a request. It cannot be aborted anymore."""
        request.done = True
        self._requests.discard(request)

    def abort_all(self, reason: str) -> None:
        """Abort every request."""
        for request in list(self._requests):
            request.abort(reason)

    async def watch(self) -> None:
        """Run `check` periodically until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PERIOD_S)
            self.check(loop.time(), time.time())

    def check(self, now: float, wall: float) -> None:
        """Abort requests whose time is over or whose key is not valid anymore.

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
