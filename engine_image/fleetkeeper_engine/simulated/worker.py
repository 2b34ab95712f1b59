"""The workers of a simulated engine, as the supervisor sees them: when they loaded, and their allocator."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from fleetkeeper_engine.shm.layout import CapBlock, LoadBlock
from fleetkeeper_engine.shm.region import Region

REPORT_PERIOD_S = 1.0
DEVICE_BYTES = 80 * 1024**3
ALLOCATED_RATIO = 0.97
"""Share of the reserved memory that a worker without fragmentation has allocated."""
FRAGMENTED_RATIO = 0.4
"""The share at the end of a fragmentation."""
FRAGMENTING_S = 30.0


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
        self._fragmenting_since: float | None = None

    def report_load(self) -> None:
        """Write that every rank has loaded its model."""
        if self._region is not None:
            for rank in range(self._region.ranks):
                self._region.write_load(rank, LoadBlock(self._clock()))

    def fragment(self) -> None:
        """Let the share of allocated memory fall from now on."""
        self._fragmenting_since = self._clock()

    def allocated_ratio(self) -> float:
        """Return the share of the reserved memory that is allocated."""
        if self._fragmenting_since is None:
            return ALLOCATED_RATIO
        progress = min(1.0, (self._clock() - self._fragmenting_since) / FRAGMENTING_S)
        return ALLOCATED_RATIO + progress * (FRAGMENTED_RATIO - ALLOCATED_RATIO)

    def report(self) -> None:
        """Write the figures of every rank's allocator."""
        if self._region is None:
            return
        reserved = int(DEVICE_BYTES * self._cap_ratio)
        for rank in range(self._region.ranks):
            self._region.write_cap(
                rank,
                CapBlock(
                    pid=os.getpid(),
                    armed=True,
                    device=rank,
                    fraction=self._cap_ratio,
                    total_bytes=DEVICE_BYTES,
                    allocated_bytes=int(reserved * self.allocated_ratio()),
                    reserved_bytes=reserved,
                    written=self._clock(),
                ),
            )

    async def run(self) -> None:
        """Report once a second until cancelled."""
        while True:
            self.report()
            await asyncio.sleep(REPORT_PERIOD_S)
