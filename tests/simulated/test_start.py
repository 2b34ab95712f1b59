"""Many simulated engines on one machine."""

from __future__ import annotations

import psutil
import pytest

from tests.simulated.conftest import MIB, StartSimulated

AT_ONCE = 20
MAX_PROCESSOR_S = 60.0
"""Two cores for the 30 seconds in which twenty engines are to be ready."""
MAX_PSS_BYTES = 130 * MIB


@pytest.mark.exhaustive
def test_twenty_engines_start_at_once_on_two_cores(start: StartSimulated) -> None:
    """Judged by processor time, because a machine under test is shared."""
    engines = [start(wait=False) for _ in range(AT_ONCE)]
    waited = [engine.wait_ready() for engine in engines]
    families = [
        (supervisor, *supervisor.children())
        for supervisor in (psutil.Process(engine.process.pid) for engine in engines)
    ]
    seconds = [sum(sum(item.cpu_times()[:2]) for item in family) for family in families]
    taken = [sum(item.memory_full_info().pss for item in family) for family in families]
    print(
        f"{AT_ONCE} engines: {sum(seconds):.1f} processor seconds, {max(waited):.0f} s until the last "
        f"was ready; most memory of one {max(taken) / MIB:.0f} MiB (PSS)"
    )
    assert sum(seconds) <= MAX_PROCESSOR_S
    assert max(taken) <= MAX_PSS_BYTES
