"""The allocator of a simulated engine, which has no memory. The supervisor measures the pod's."""

from __future__ import annotations

import time
from collections.abc import Callable

DEVICE_BYTES = 80 * 1024**3
ALLOCATED_RATIO = 0.97
"""Share of the reserved memory that an allocator without fragmentation has allocated."""
FRAGMENTED_RATIO = 0.4
"""The share at the end of a fragmentation."""
FRAGMENTING_S = 30.0


class SimulatedAllocator:
    """An allocator that has reserved all that the cap allows."""

    process_list = "the simulation"

    def __init__(self, cap_ratio: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._reserved_bytes = int(DEVICE_BYTES * cap_ratio)
        self._clock = clock
        self._fragmenting_since: float | None = None

    def fragment(self) -> None:
        """Let the share of allocated memory fall from now on."""
        self._fragmenting_since = self._clock()

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes."""
        return DEVICE_BYTES - self._reserved_bytes, DEVICE_BYTES

    def reserved_bytes(self) -> int:
        """Return the reserved bytes."""
        return self._reserved_bytes

    def allocated_bytes(self) -> int:
        """Return the allocated bytes, which a fragmentation reduces."""
        ratio = ALLOCATED_RATIO
        if self._fragmenting_since is not None:
            progress = min(1.0, (self._clock() - self._fragmenting_since) / FRAGMENTING_S)
            ratio += progress * (FRAGMENTED_RATIO - ALLOCATED_RATIO)
        return int(self._reserved_bytes * ratio)

    def own_bytes(self) -> int | None:
        """Return None: no device lists this process."""
        return None

    def set_fraction(self, fraction: float) -> None:
        """Keep the limit that it has by itself."""
