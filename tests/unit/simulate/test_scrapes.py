"""The samples that a simulated loop gets: each shows its engine at its own time, a phase and a lag old."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest

from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.types import ControlInputs, ControlSettings
from fleetkeeper.simulate.autoscalers import ControlLoop
from fleetkeeper.simulate.closed_loop import EPOCH_S, Scenario, run
from fleetkeeper.simulate.loads.arrivals import Mix, poisson
from fleetkeeper.simulate.requests import Request

SECONDS = 300.0
SETTINGS = ControlSettings(max_replicas=1)


class Observed:
    """A run with one pod: the arrivals of its requests, and the inputs of every tick."""

    def __init__(self, lag_s: float) -> None:
        self.arrivals: list[float] = []
        self.inputs: list[tuple[float, ControlInputs]] = []
        pattern = poisson(lambda _: 6.0, 6.0, Mix())

        def load(random: Random) -> Iterator[Request]:
            for request in pattern(random):
                self.arrivals.append(request.arrived)
                yield request

        loop = ControlLoop(SETTINGS, scrape_lag_s=lag_s, direct=lambda _: False, on_tick=self._tick)
        run(Scenario(SECONDS, load, lambda: loop, tail_s=0.0))

    def _tick(self, inputs: ControlInputs, _: ControlDecision) -> None:
        self.inputs.append((EPOCH_S + 5.0 * len(self.inputs), inputs))


@pytest.fixture(scope="module")
def observed() -> Observed:
    """The run that several tests read."""
    return Observed(0.5)


def test_a_sample_counts_the_requests_up_to_its_own_time(observed: Observed) -> None:
    """No request that arrived between the scrape and the tick is in the sample, and none waits in it."""
    rows = [sample for _, inputs in observed.inputs for sample in inputs.samples]
    assert len(rows) > 50
    for row in rows:
        arrived = bisect_right(observed.arrivals, row.time - EPOCH_S)
        assert row.counters.arrivals_standard == arrived
        waited = row.counters.wait_count_standard + row.gauges.waiting_standard
        assert waited == arrived


@pytest.mark.parametrize("lag_s", [0.5, 3.0])
def test_samples_are_one_scrape_interval_apart_and_at_least_the_lag_old(lag_s: float) -> None:
    """Of one pod every scrape is seen once, in the order of time."""
    rows = [
        (now, sample.time) for now, inputs in Observed(lag_s).inputs for sample in inputs.samples
    ]
    assert all(lag_s <= now - at <= lag_s + 5.0 for now, at in rows)
    times = [at for _, at in rows]
    assert [b - a for a, b in pairwise(times)] == pytest.approx([5.0] * (len(times) - 1))
