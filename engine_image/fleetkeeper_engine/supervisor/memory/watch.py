"""Memory in use, its peak, and the memory cap. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleetkeeper_engine.devices.interface import DeviceMemory

SAMPLE_PERIOD_S = 0.1
OVER_CAP_PATIENCE_S = 10.0
"""New sequences stop after memory was above its cap for this long without a break."""

FRESH_S = 5.0
"""An older sample is not exported: absent differs from unchanged."""


@dataclass(frozen=True, slots=True)
class MemoryState:
    """The result of the samples so far."""

    cap_ratio: float
    used_ratio: float = 0.0
    used_bytes: int = 0
    peak_ratio: float = 0.0
    peak_bytes: int = 0
    above_since: float | None = None
    over_cap: bool = False
    own: bool = True
    """True if the last sample covered only this pod's processes."""
    sampled_at: float | None = None
    """When memory was last measured; None means never."""

    def is_fresh(self, now: float) -> bool:
        """Return whether the last sample is recent enough to export."""
        return self.sampled_at is not None and now - self.sampled_at <= FRESH_S


def decide_memory(state: MemoryState, use: DeviceMemory, now: float) -> MemoryState:
    """Return the state after one more sample.

    `over_cap` is set after 10 s above the cap, until one sample is at the cap or below it.
    """
    above_since = state.above_since
    if use.ratio <= state.cap_ratio:
        above_since = None
    elif above_since is None:
        above_since = now
    # The use of a whole device, which includes other pods, is not this pod's peak.
    is_first_own = use.own and not state.own
    peak_ratio, peak_bytes = (0.0, 0) if is_first_own else (state.peak_ratio, state.peak_bytes)
    return replace(
        state,
        used_ratio=use.ratio,
        used_bytes=use.used_bytes,
        peak_ratio=max(peak_ratio, use.ratio),
        peak_bytes=max(peak_bytes, use.used_bytes),
        above_since=above_since,
        over_cap=above_since is not None and now - above_since >= OVER_CAP_PATIENCE_S,
        own=use.own,
        sampled_at=now,
    )


def fullest(devices: Sequence[DeviceMemory]) -> DeviceMemory:
    """Return the memory of the fullest device, which the cap is about."""
    return max(devices, key=lambda device: device.ratio)
