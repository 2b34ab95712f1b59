"""The replicas that a load needs: staffing, demand, pods by state and cold start."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.autoscale.capacity.forecast import Demand, smoothed
from fleetkeeper.autoscale.capacity.staffing import (
    Load,
    backlog_counts,
    mean_sequences,
    needed_replicas,
    peakedness,
)
from fleetkeeper.autoscale.capacity.supply import (
    ColdStart,
    emptiest,
    measured_cold_start,
    supply_of,
)
from fleetkeeper.autoscale.types import PodView
from tests.support.control_cases import NOW, pod_view
from tests.support.lanes import examples


@pytest.mark.parametrize(
    ("idc", "z"), [(0.0, 1.0), (1.0, 1.0), (3.0, 2.0), (16.0, 8.5), (100.0, 10.0)]
)
def test_peakedness_is_bounded(idc: float, z: float) -> None:
    """Within 1 and 10."""
    assert peakedness(idc) == z


@pytest.mark.parametrize(
    ("capacity", "attainment", "z", "want"),
    [
        (100.0, 0.95, 1.0, 84.85),
        (100.0, 0.5, 1.0, 100.0),
        (100.0, 0.99, 1.0, 79.29),
        (100.0, 0.95, 4.0, 72.07),
        (1.0, 0.95, 1.0, 0.22),
        (0.0, 0.95, 1.0, 0.0),
    ],
)
def test_mean_sequences_worked_examples(
    capacity: float, attainment: float, z: float, want: float
) -> None:
    """84.85 + 1.645 sqrt(84.85) is 100; an attainment of 50% leaves no reserve."""
    assert mean_sequences(capacity, attainment, z) == pytest.approx(want, abs=0.01)


@given(st.floats(0, 512), st.floats(0.5, 0.999), st.floats(1, 10))
@examples(200)
def test_the_mean_and_its_spread_are_the_capacity(
    capacity: float, attainment: float, z: float
) -> None:
    """B + k sqrt(z B) = C, for any capacity, attainment and burstiness."""
    mean = mean_sequences(capacity, attainment, z)
    spread = NormalDist().inv_cdf(attainment) * math.sqrt(z * mean)
    assert mean + spread == pytest.approx(capacity, abs=1e-6)


@pytest.mark.parametrize(
    ("load", "want"),
    [
        (Load(20.0, 8.0), 3),
        (Load(16.8, 8.0), 2),
        (Load(16.9, 8.0), 3),
        (Load(0.0, 8.0), 0),
        (Load(20.0, 8.0, backlog=480.0), 4),
        (Load(20.0, 8.0, backlog=4800.0), 13),
        (Load(20.0, 0.0), 0),
        (Load(1e300, 8.0), 1_000_000),
    ],
)
def test_staffing_worked_examples(load: Load, want: int) -> None:
    """20 / 8 - 0.1 is 2.4; 480 that wait need one replica for a minute. The number is bounded."""
    assert needed_replicas(load) == want


@given(st.floats(0, 500), st.floats(0, 500), st.floats(0.1, 60), st.floats(0, 1000))
@examples(200)
def test_more_load_never_needs_fewer(a: float, b: float, carried: float, backlog: float) -> None:
    """Monotone in arrivals and backlog, and never below the load itself."""
    low, high = sorted((a, b))
    small, large = needed_replicas(Load(low, carried)), needed_replicas(Load(high, carried))
    assert small <= large <= needed_replicas(Load(high, carried, backlog))
    assert large >= high / carried - 0.1


@pytest.mark.parametrize(
    ("wait_s", "counts"), [(0.12, False), (0.125, False), (0.13, True), (5.0, True)]
)
def test_backlog_counts_from_a_quarter_of_the_objective(wait_s: float, counts: bool) -> None:
    """Below that it is the ordinary queue."""
    assert backlog_counts(wait_s, 0.5) is counts


def test_the_first_rate_is_the_demand() -> None:
    """Nothing else is known."""
    assert smoothed(Demand(), 7.0, 1.0) == Demand(7.0, 1)


def test_demand_worked_example() -> None:
    """A mean of 4/s, and 150 requests in 30 s: 24.5 of them may be chance, so 4.18/s are certain."""
    assert smoothed(Demand(4.0, 500), 5.0, 1.0).per_s == pytest.approx(4.18, abs=0.005)


@pytest.mark.parametrize(
    ("rate", "z", "want"),
    [(4.6, 1.0, 4.01), (3.5, 1.0, 3.992), (5.0, 10.0, 4.017), (0.0, 1.0, 0.0), (40.0, 1.0, 37.69)],
)
def test_only_a_certain_change_moves_the_demand_at_once(rate: float, z: float, want: float) -> None:
    """Within two deviations by a sixtieth of the difference; bursty arrivals vary more."""
    assert smoothed(Demand(4.0, 500), rate, z).per_s == pytest.approx(want, abs=0.005)


def test_the_demand_of_a_constant_rate_varies_little() -> None:
    """Poisson arrivals of 10/s for an hour: half a minute varies by 6%, the demand by less than 4%."""
    random, demand = Random(3), Demand()
    recent: list[int] = []
    for tick in range(720):
        recent = [*recent[-5:], sum(random.random() < 0.01 for _ in range(5000))]
        demand = smoothed(demand, sum(recent) / (5.0 * len(recent)), 1.0)
        if tick > 60:
            assert demand.per_s == pytest.approx(10.0, rel=0.1)


def test_the_demand_follows_a_step() -> None:
    """Up and down within one tick by all that is no chance, the rest within five minutes."""
    demand = Demand(10.0, 500)
    demand = smoothed(demand, 30.0, 1.0)
    assert demand.per_s == pytest.approx(28.0, abs=0.01)
    for _ in range(60):
        demand = smoothed(demand, 30.0, 1.0)
    assert demand.per_s == pytest.approx(29.3, abs=0.1)
    assert smoothed(demand, 10.0, 1.0).per_s == pytest.approx(11.15, abs=0.01)


def test_pods_by_state() -> None:
    """Ready, pending, overdue after two cold starts; those being deleted count for nothing."""
    pods = (
        pod_view("a"),
        replace(pod_view("b", ready=False), created=NOW - 100),
        replace(pod_view("c", ready=False), created=NOW - 121),
        replace(pod_view("d"), deleting=True),
    )
    supply = supply_of(pods, 60.0, NOW)
    assert (supply.ready, supply.pending, supply.overdue) == (1, 1, 1)


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


def test_the_emptiest_goes_first() -> None:
    """Not ready before ready, then the least running, then the youngest."""
    pods = (
        pod_view("busy"),
        pod_view("idle"),
        pod_view("idle-new", age_s=100),
        pod_view("pending", ready=False),
    )
    running = [("busy", 30.0), ("idle", 1.0), ("idle-new", 1.0)]
    assert emptiest(pods, running, 3) == ("pending", "idle-new", "idle")
    assert emptiest(pods, running, 0) == ()
