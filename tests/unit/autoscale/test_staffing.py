"""The replicas that a load needs: staffing, forecast, pods by state and cold start."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.autoscale.capacity.forecast import Forecast, expected_per_s, smoothed
from fleetkeeper.autoscale.capacity.staffing import (
    Load,
    backlog_counts,
    headroom,
    needed_replicas,
    peakedness,
)
from fleetkeeper.autoscale.capacity.supply import (
    ColdStart,
    emptiest,
    measured_cold_start,
    supply_of,
)
from fleetkeeper.autoscale.signals.samples import Counters
from fleetkeeper.autoscale.types import PodView
from tests.support.control_cases import NOW, pod_view
from tests.support.lanes import examples


@pytest.mark.parametrize(
    ("realtime", "standard", "batch", "rho", "beta"),
    [
        (1, 0, 0, 0.75, 1.5),
        (0, 1, 0, 0.85, 0.75),
        (0, 0, 1, 0.95, 0.0),
        (1, 0, 1, 0.85, 0.75),
        (1, 1, 0, 0.8, 1.125),
        (0, 0, 0, 0.85, 0.75),
        (2, 1, 1, 0.825, 0.9375),
    ],
)
def test_headroom_follows_the_mix_of_tiers(
    realtime: float, standard: float, batch: float, rho: float, beta: float
) -> None:
    """From 0.75 and 1.5 (realtime) to 0.95 and 0 (batch only)."""
    rates = Counters(arrivals_realtime=realtime, arrivals_standard=standard, arrivals_batch=batch)
    assert headroom(rates) == pytest.approx((rho, beta))


@pytest.mark.parametrize(
    ("idc", "z"), [(0.0, 1.0), (1.0, 1.0), (3.0, 2.0), (16.0, 8.5), (100.0, 10.0)]
)
def test_peakedness_is_bounded(idc: float, z: float) -> None:
    """Within 1 and 10."""
    assert peakedness(idc) == z


def load(**changes: float) -> Load:
    """4 requests/s of 20 s at capacity 32, standard traffic."""
    base = Load(4.0, 20.0, 32.0, 0.85, 0.75, 1.0)
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({}, 3),
        ({"arrivals_per_s": 0.0}, 0),
        ({"rho": 0.75, "beta": 1.5}, 4),
        ({"burstiness": 16.0}, 4),
        ({"arrivals_per_s": 8.0}, 6),
        ({"capacity": 64.0}, 2),
        ({"capacity": 0.0}, 95),
        ({"backlog": 96.0, "completions_per_s": 1.6}, 4),
        ({"backlog": 960.0, "completions_per_s": 1.6}, 13),
        ({"backlog": 96.0, "completions_per_s": 0.0}, 3),
        ({"arrivals_per_s": 1e300}, 1_000_000),
    ],
)
def test_staffing_worked_examples(change: dict[str, float], want: int) -> None:
    """The formula's examples, its corner cases and its bound."""
    assert needed_replicas(load(**change)) == want


@given(
    st.floats(0, 500), st.floats(0, 500), st.floats(0.1, 60), st.floats(1, 256), st.floats(0, 20)
)
@examples(200)
def test_more_load_never_needs_fewer(
    a: float, b: float, service_s: float, capacity: float, idc: float
) -> None:
    """Monotone in arrivals, and never below the load itself."""
    low, high = sorted((a, b))
    small = needed_replicas(Load(low, service_s, capacity, 0.85, 0.75, idc))
    large = needed_replicas(Load(high, service_s, capacity, 0.85, 0.75, idc))
    assert small <= large
    assert large >= high * service_s / capacity - 0.1


@pytest.mark.parametrize(
    ("wait_s", "counts"), [(0.12, False), (0.125, False), (0.13, True), (5.0, True)]
)
def test_backlog_counts_from_a_quarter_of_the_objective(wait_s: float, counts: bool) -> None:
    """Below that it is the ordinary queue."""
    assert backlog_counts(wait_s, 0.5) is counts


@pytest.mark.parametrize(("horizon_s", "want"), [(0.0, 4.0), (60.0, 5.2), (600.0, 8.0), (1e9, 8.0)])
def test_forecast_worked_examples(horizon_s: float, want: float) -> None:
    """At most double the present rate."""
    assert expected_per_s(Forecast(4.0, 0.1, 50), 4.0, horizon_s) == pytest.approx(want)


def test_a_falling_forecast_never_lowers_the_present_rate() -> None:
    """Going down is not for forecasts."""
    assert expected_per_s(Forecast(4.0, -0.5, 50), 4.0, 180.0) == 4.0


def test_forecast_follows_a_ramp_and_forgets_it() -> None:
    """A steady ramp is seen ahead; at a constant rate the trend dies out."""
    forecast = Forecast()
    for i in range(60):
        forecast = smoothed(forecast, 4 + 0.1 * i)
    assert expected_per_s(forecast, 10.0, 60.0) > 10.5
    for _ in range(200):
        forecast = smoothed(forecast, 10.0)
    assert expected_per_s(forecast, 10.0, 60.0) == pytest.approx(10.0, rel=0.02)


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
