"""The workers of a simulated engine, as the supervisor sees them: when they loaded, and their allocator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fleetkeeper_engine.devices.simulated import SimulatedAllocator
from fleetkeeper_engine.in_vllm.plugin import REPORT_PERIOD_S, arm
from fleetkeeper_engine.shm.layout import LoadBlock
from fleetkeeper_engine.shm.region import Region


class Workers:
    """All ranks. They report nothing without the shared memory of a supervisor."""

    def __init__(
        self,
        region: Region | None,
        cap_ratio: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._region = region
        self._cap_ratio = cap_ratio
        self._clock = clock
        self._allocator = SimulatedAllocator(cap_ratio, clock)

    def report_load(self) -> None:
        """Write that every rank has loaded its model."""
        if self._region is not None:
            for rank in range(self._region.ranks):
                self._region.write_load(rank, LoadBlock(self._clock()))

    def fragment(self) -> None:
        """Let the share of allocated memory fall from now on."""
        self._allocator.fragment()

    def report(self) -> None:
        """Write the figures of every rank's allocator."""
        if self._region is not None:
            for rank in range(self._region.ranks):
                self._region.write_cap(rank, arm(self._allocator, rank, self._cap_ratio))

    async def run(self) -> None:
        """Report once a second until cancelled."""
        while True:
            self.report()
            await asyncio.sleep(REPORT_PERIOD_S)
