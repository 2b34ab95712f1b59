"""Passes the engines' counts to the limits, where they replace estimates."""

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
"""Maximum requests that wait to be settled. Beyond it, reservations expire."""


class Settler:
    """A queue before the limits, so that a slow Redis does not delay reading.

    Without a limiter (None), nothing is settled.
    """

    def __init__(self, limiter: Limiter | None) -> None:
        self._limiter = limiter
        self._waiting: asyncio.Queue[Entry] = asyncio.Queue(MAX_WAITING)

    def add(self, entries: Iterable[Entry]) -> None:
        """Queue the settlement of the entries' tokens."""
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
            # After any error in the limits, the reservation expires, and usage continues.
            metrics.SETTLE_FAILURES.inc()
            log.exception("tokens were not settled", request=entry.request)
