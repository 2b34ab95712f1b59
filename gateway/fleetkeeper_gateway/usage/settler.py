"""Hands what the engines counted to the limits, where it replaces estimates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import structlog

from fleetkeeper_contract.tiers import TIER_BY_LABEL
from fleetkeeper_gateway.interfaces import Limiter
from fleetkeeper_gateway.usage import metrics
from fleetkeeper_gateway.usage.pages import Entry

log = structlog.get_logger(__name__)

AT_ONCE: Final = 64
MAX_WAITING: Final = 50_000
"""Requests that wait to be settled. Beyond it, their reservations end by themselves."""


class Settler:
    """A queue before the limits, so that a slow Redis does not slow the reading.

    The limiter is None where nothing is to be settled.
    """

    def __init__(self, limiter: Limiter | None) -> None:
        self._limiter = limiter
        self._waiting: asyncio.Queue[Entry] = asyncio.Queue(MAX_WAITING)

    def add(self, entries: Iterable[Entry]) -> None:
        """Let the tokens of entries be settled soon."""
        if self._limiter is None:
            return
        for entry in entries:
            try:
                self._waiting.put_nowait(entry)
            except asyncio.QueueFull:
                metrics.SETTLE_FAILURES.inc()

    async def run(self) -> None:
        """Settle until cancelled."""
        while True:
            entries = [await self._waiting.get()]
            while not self._waiting.empty() and len(entries) < AT_ONCE:
                entries.append(self._waiting.get_nowait())
            await asyncio.gather(*map(self._settle, entries))

    async def _settle(self, entry: Entry) -> None:
        if (
            self._limiter is None
            or entry.key is None
            or entry.request is None
            or entry.tier is None
        ):
            return
        try:
            await self._limiter.settle(
                entry.key, TIER_BY_LABEL[entry.tier], entry.request, entry.prompt + entry.answer
            )
        except Exception:
            # Whatever fails in the limits: the reservation ends by itself, and usage continues.
            metrics.SETTLE_FAILURES.inc()
            log.exception("tokens were not settled", request=entry.request)
