"""The memory cap as a rule over samples."""

from __future__ import annotations

from fleetkeeper_engine.devices.interface import DeviceMemory
from fleetkeeper_engine.supervisor.memory.watch import MemoryState, decide_memory


def test_above_the_cap_for_10_s_new_sequences_stop_until_one_sample_is_below() -> None:
    state = MemoryState(cap_ratio=0.8)
    seen = []
    for tenth in range(131):
        used = 79 if tenth == 50 else 81
        state = decide_memory(state, DeviceMemory(used, 100), tenth / 10)
        seen.append(state.over_cap)
    assert not any(seen)
    for tenth in range(131, 160):
        state = decide_memory(state, DeviceMemory(81, 100), tenth / 10)
    assert state.over_cap
    state = decide_memory(state, DeviceMemory(80, 100), 16.0)
    assert not state.over_cap
    assert (state.peak_ratio, state.peak_bytes) == (0.81, 81)
