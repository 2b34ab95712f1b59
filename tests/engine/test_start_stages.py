"""A real start reports its stages, and each has taken a time."""

from __future__ import annotations

from tests.support.engine.supervised_engine import RunningEngine


def test_a_real_start_has_three_stages_that_stay(engine: RunningEngine) -> None:
    """vLLM's workers report the end of load_model through shared memory."""
    first, again = engine.metrics(), engine.metrics()
    seconds = [
        first[f'fleetkeeper_start_seconds{{stage="{stage}"}}']
        for stage in ("weights", "load", "warm_up")
    ]
    assert all(value > 0.0 for value in seconds), seconds
    assert seconds == [
        again[f'fleetkeeper_start_seconds{{stage="{stage}"}}']
        for stage in ("weights", "load", "warm_up")
    ]
