"""The replicas that a load needs: staffing, demand, pods by state and cold start."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.autoscale.capacity.demand import Demand, needed_replicas, smoothed
from fleetkeeper.autoscale.capacity.supply import (
    ColdStart,
    measured_cold_start,
    supply_of,
)
from fleetkeeper.autoscale.types import PodView
from tests.support.autoscale.control_cases import NOW, pod_view
from tests.support.lanes import examples


@pytest.mark.parametrize(
    ("arrivals", "carried", "want"),
    [
        (20.0, 8.0, 3),
        (16.0, 8.0, 2),
        (16.1, 8.0, 3),
        (0.0, 8.0, 0),
        (20.0, 0.0, 0),
        (1e300, 8.0, 1_000_000),
    ],
)
def test_staffing_worked_examples(arrivals: float, carried: float, want: int) -> None:
    """20 / 8 is 2.5. The number is bounded."""
    assert needed_replicas(arrivals, carried) == want


@given(st.floats(0, 500), st.floats(0, 500), st.floats(0.1, 60))
@examples(200)
def test_more_load_never_needs_fewer(a: float, b: float, carried: float) -> None:
    """Monotone in arrivals, and never below the load itself."""
    low, high = sorted((a, b))
    small, large = needed_replicas(low, carried), needed_replicas(high, carried)
    assert small <= large
    assert large >= high / carried


def test_the_first_rate_is_the_demand() -> None:
    """Nothing else is known."""
    assert smoothed(Demand(), 7.0) == Demand(7.0, 1)


def test_demand_worked_example() -> None:
    """A mean of 4/s, and 150 requests in 30 s: 24.5 of them may be chance, so 4.18/s are certain."""
    assert smoothed(Demand(4.0, 500), 5.0).per_s == pytest.approx(4.18, abs=0.005)


@pytest.mark.parametrize(("rate", "want"), [(4.6, 4.01), (3.5, 3.992), (0.0, 0.0), (40.0, 37.69)])
def test_only_a_certain_change_moves_the_demand_at_once(rate: float, want: float) -> None:
    """Within two deviations by a sixtieth of the difference."""
    assert smoothed(Demand(4.0, 500), rate).per_s == pytest.approx(want, abs=0.005)


def test_the_demand_of_a_constant_rate_varies_little() -> None:
    """Poisson arrivals of 10/s for an hour: half a minute varies by 6%, the demand by less than 4%."""
    random, demand = Random(3), Demand()
    recent: list[int] = []
    for tick in range(720):
        recent = [*recent[-5:], sum(random.random() < 0.01 for _ in range(5000))]
        demand = smoothed(demand, sum(recent) / (5.0 * len(recent)))
        if tick > 60:
            assert demand.per_s == pytest.approx(10.0, rel=0.1)


def test_the_demand_follows_a_step() -> None:
    """Up and down within one tick by all that is no chance, the rest within five minutes."""
    demand = Demand(10.0, 500)
    demand = smoothed(demand, 30.0)
    assert demand.per_s == pytest.approx(28.0, abs=0.01)
    for _ in range(60):
        demand = smoothed(demand, 30.0)
    assert demand.per_s == pytest.approx(29.3, abs=0.1)
    assert smoothed(demand, 10.0).per_s == pytest.approx(11.15, abs=0.01)


def test_pods_by_state() -> None:
    """Ready, pending, overdue after two cold starts, new for 30 s.

    A pod that is ready again is not new. Those being deleted count for nothing.
    """
    pods = (
        replace(pod_view("a"), ready_since=NOW - 30),
        replace(pod_view("e"), created=NOW - 100, ready_since=NOW - 29),
        replace(pod_view("f"), created=NOW - 200, ready_since=NOW - 5),
        replace(pod_view("b", ready=False), created=NOW - 100),
        replace(pod_view("c", ready=False), created=NOW - 121),
        replace(pod_view("d"), deleting=True),
    )
    supply = supply_of(pods, (), 60.0, NOW)
    assert (supply.ready, supply.pending, supply.overdue, supply.new) == (3, 1, 1, 1)


def test_cold_start_is_measured() -> None:
    """The first measurement replaces the assumption, later ones weigh 30%, none is believed above 30 min."""

    def started(took_s: float, at: float) -> PodView:
        return PodView(f"p{at}", "u", at - took_s, True, at)

    cold = measured_cold_start(ColdStart(), (started(80, NOW),))
    assert cold.seconds == 80
    assert measured_cold_start(cold, (started(80, NOW),)) == cold
    cold = measured_cold_start(cold, (started(180, NOW + 10),))
    assert cold.seconds == pytest.approx(110)
    assert measured_cold_start(ColdStart(), (started(1e9, NOW),)).seconds == 1800
