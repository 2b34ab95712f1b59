"""The loop closed over modelled engines: what users would see in each scenario.

Each plays minutes to a day of virtual time; numbers are asserted with room, for they depend on the
seed, and every scenario is run with at least one seed that was not used to set a constant.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.simulate.engine import H100_8B, H100_70B
from fleetkeeper_contract.tiers import Tier
from tests.support.autoscale.simulated import Case, Record, played
from tests.support.lanes import keep_first

SETTINGS = ControlSettings(max_replicas=12, scale_down_delay_s=300.0)


def turns(record: Record) -> int:
    """Changes of direction of the allocated replicas and of the limits, counted separately."""

    def count(values: list[int]) -> int:
        moves = [b - a for a, b in pairwise(values) if a != b]
        return sum(1 for a, b in pairwise(moves) if (a > 0) != (b > 0))

    ticks = record.ticks
    return (
        count([tick.replicas for tick in ticks])
        + count([tick.sequences for tick in ticks])
        + count([tick.tokens for tick in ticks])
    )


def assert_safe(record: Record, settings: ControlSettings = SETTINGS) -> None:
    """Check what every scenario guarantees: bounds, and at most one step down per minute."""
    lowered = [time for time, by in record.replica_changes() if by < 0]
    for tick in record.ticks:
        assert settings.min_replicas <= tick.replicas <= settings.max_replicas
        assert settings.min_sequences <= tick.sequences <= settings.max_sequences
        assert settings.min_tokens <= tick.tokens <= settings.max_tokens
    assert all(b - a >= 60 for a, b in pairwise(lowered))


@pytest.mark.parametrize("rate", keep_first(1, [1.0, 4.0, 12.0, 20.0], pytest.mark.slow))
@pytest.mark.parametrize("seed", keep_first(1, [1, 7], pytest.mark.exhaustive))
def test_constant_load_has_no_limit_cycle(rate: float, seed: int) -> None:
    """At most 6 changes of direction in an hour, and the objective is attained."""
    record = played(Case(2400, lambda _: rate, SETTINGS, H100_70B, replicas=2, seed=seed))
    assert turns(record) <= 6 * 2400 / 3600
    assert record.outcome.wait_attainment >= 0.95
    assert_safe(record)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cold_start_s", keep_first(1, [60.0, 180.0, 300.0], pytest.mark.exhaustive)
)
def test_step_times_three(cold_start_s: float) -> None:
    """The first action comes within 15 s of a broken objective; it recovers; the load away, replicas go."""

    def rate(t: float) -> float:
        return 40.0 if 300 <= t < 1200 else 13.0

    record = played(Case(3300, rate, SETTINGS, H100_70B, replicas=2, cold_start_s=cold_start_s))
    broken = [tick.time for tick in record.ticks if tick.time > 300 and tick.queue_wait_s > 0.5]
    if broken:
        before = [tick for tick in record.ticks if tick.time <= 300][-1]
        acted = next(
            tick.time
            for tick in record.ticks
            if tick.time > 300
            and (tick.replicas, tick.sequences, tick.tokens, tick.decision.admission)
            != (before.replicas, before.sequences, before.tokens, before.decision.admission)
        )
        assert acted <= broken[0] + 15
    late = [tick for tick in record.ticks if 900 + cold_start_s / 2 <= tick.time < 1200]
    assert sum(tick.queue_wait_s <= 0.5 for tick in late) >= 0.95 * len(late)
    assert record.ticks[-1].replicas < record.outcome.most_replicas
    assert_safe(record)


@pytest.mark.exhaustive
def test_a_long_cold_start_is_bridged_by_the_batch() -> None:
    """Two replicas carry 16 requests/s; at 20 a third starts for ten minutes. Meanwhile limits stay wide."""
    record = played(
        Case(
            900,
            lambda t: 20.0 if t >= 200 else 13.0,
            SETTINGS,
            H100_70B,
            replicas=2,
            cold_start_s=600.0,
        )
    )
    pending = [tick for tick in record.ticks if tick.time > 200 and tick.replicas > tick.ready]
    assert len(pending) > 100
    assert min(tick.sequences for tick in pending) == pending[0].sequences
    assert all(tick.batch_time_s <= SETTINGS.batch_time_objective_s for tick in pending), (
        "never at the cost of batch time"
    )
    assert record.outcome.total_refused <= 0.1 * record.outcome.arrivals
    assert_safe(record)


@pytest.mark.slow
def test_a_ramp_is_followed() -> None:
    """From 4 to 20 requests/s in an hour, cold start 120 s: replicas come with the load, not ahead of it."""
    record = played(
        Case(
            3900,
            lambda t: 4 + min(t, 3600) * 16 / 3600,
            SETTINGS,
            H100_70B,
            replicas=1,
            cold_start_s=120,
        )
    )
    assert record.outcome.wait_attainment >= 0.85
    assert record.outcome.total_refused <= 0.01 * record.outcome.arrivals
    assert [by for _, by in record.replica_changes()] == [1, 1]
    assert_safe(record)


@pytest.mark.exhaustive
def test_bursts_do_not_make_replicas_swing() -> None:
    """Every 5 minutes 20 s of four times the load."""
    record = played(
        Case(
            2400,
            lambda t: 32.0 if t % 300 < 20 else 8.0,
            SETTINGS,
            H100_70B,
            replicas=2,
            cold_start_s=120,
        )
    )
    changes = [by for _, by in record.replica_changes()]
    assert sum(1 for a, b in pairwise(changes) if (a > 0) != (b > 0)) <= 3
    assert record.outcome.wait_attainment >= 0.85
    assert_safe(record)


@pytest.mark.exhaustive
def test_a_day_costs_less_than_its_peak() -> None:
    """A day's curve, played in a sixth of its time."""
    seconds = 14_400.0

    def rate(t: float) -> float:
        return 6.0 + 5.0 * math.sin(2 * math.pi * t / seconds - math.pi / 2)

    day = Case(
        seconds,
        rate,
        SETTINGS,
        H100_70B,
        replicas=1,
        cold_start_s=120,
        generated=300.0,
    )
    record = played(day)
    assert record.outcome.wait_attainment >= 0.95
    assert (
        record.outcome.replica_hours <= 0.95 * record.outcome.most_replicas * seconds / 3600
        or record.outcome.most_replicas == 1
    )
    assert turns(record) <= 6 * seconds / 3600
    assert_safe(record)


def test_idle_goes_to_the_minimum_and_stays() -> None:
    """Down one by one after the delay; back up when requests come."""
    record = played(
        Case(
            2400,
            lambda t: 0.0 if t < 1500 else 6.0,
            SETTINGS,
            H100_8B,
            replicas=4,
            cold_start_s=60,
        )
    )
    at = {round(tick.time): tick.replicas for tick in record.ticks}
    assert at[1490] == 1
    assert at[300] == 4
    assert record.outcome.wait_attainment >= 0.95
    assert_safe(record)


@pytest.mark.promise("measurement-outage")
@pytest.mark.slow
def test_a_metrics_outage_of_fifteen_minutes_lowers_nothing() -> None:
    """Load falls without signals: replicas stay, the breaker opens within 30 s with an event; then down as usual."""

    def rate(t: float) -> float:
        return 16.0 if t < 600 else 2.0

    record = played(
        Case(
            3000,
            rate,
            SETTINGS,
            H100_70B,
            replicas=4,
            metrics=lambda t: not 600 <= t < 1500,
            direct=lambda _: False,
        )
    )
    during = [tick for tick in record.ticks if 600 <= tick.time < 1500]
    assert all(b.replicas >= a.replicas for a, b in pairwise(during))
    opened = next(t.time for t in during if t.decision.breakers.control.state is BreakerState.OPEN)
    assert opened - 600 <= 90
    assert record.ticks[-1].decision.breakers.control.state is BreakerState.CLOSED
    assert record.ticks[-1].replicas < 4
    assert_safe(record)


@pytest.mark.slow
def test_with_prometheus_gone_the_pods_are_read_and_decisions_go_on() -> None:
    """Load x3 in the outage: replicas come; none goes until Prometheus is back."""
    record = played(
        Case(
            1500,
            lambda t: 40.0 if t >= 400 else 13.0,
            SETTINGS,
            H100_70B,
            replicas=2,
            metrics=lambda t: not 300 <= t < 900,
            direct=lambda _: True,
        )
    )
    during = [tick for tick in record.ticks if 300 <= tick.time < 900]
    assert during[-1].replicas > during[0].replicas
    assert all(b.replicas >= a.replicas for a, b in pairwise(during))
    recorded = [message for time, message in record.events if 300 <= time < 330]
    assert any("Prometheus" in message for message in recorded)
    assert all(tick.decision.breakers.control.state is BreakerState.CLOSED for tick in during)


@pytest.mark.promise("without-prometheus")
@pytest.mark.exhaustive
def test_without_any_prometheus_an_idle_fleet_goes_to_its_minimum() -> None:
    """Direct readings of every pod are evidence too, once they were whole for the delay; a gap starts it anew."""
    scenario = Case(
        1500,
        lambda _: 2.0,
        SETTINGS,
        H100_70B,
        replicas=3,
        prometheus=False,
        direct=lambda t: not 200 <= t < 210,
    )
    record = played(scenario)
    lowered = [time for time, by in record.replica_changes() if by < 0]
    assert record.ticks[-1].replicas == 1
    assert lowered[0] >= 210 + SETTINGS.scale_down_delay_s
    assert all(tick.decision.breakers.control.state is BreakerState.CLOSED for tick in record.ticks)
    assert not [text for _, text in record.events if "Prometheus" in text]
    assert_safe(record)


def overloaded(seconds: float, rate: float = 70.0, seed: int = 1) -> Record:
    """Two replicas that carry 16 requests/s get more from the fifth minute on; no other ever comes."""
    return played(
        Case(
            seconds,
            lambda t: rate if t >= 300 else 8.0,
            SETTINGS,
            H100_70B,
            replicas=2,
            pods_come=lambda _: False,
            tiers=(0.3, 0.5, 0.2),
            seed=seed,
        )
    )


@pytest.mark.exhaustive
def test_pods_that_never_come_are_not_requested_twice() -> None:
    """The allocation is bounded. Meanwhile tiers are shed, batch first and realtime never."""
    record = overloaded(1500)
    assert record.outcome.most_replicas <= SETTINGS.max_replicas
    assert record.ticks[-1].ready == 2
    surge = [tick.decision.breakers.load for tick in record.ticks if tick.time >= 300]
    opened = [
        next(
            n
            for n, load in enumerate(surge)
            if load.by_tier()[tier.label].state is BreakerState.OPEN
        )
        for tier in (Tier.BATCH, Tier.STANDARD)
    ]
    assert opened[0] < opened[1] <= 12
    assert all(tick.decision.admission.admit[0] == 1.0 for tick in record.ticks)
    assert_safe(record)


@pytest.mark.slow
@pytest.mark.parametrize("seed", keep_first(1, [1, 2, 7], pytest.mark.exhaustive))
def test_an_overload_costs_neither_throughput_nor_batch_time(seed: int) -> None:
    """24 requests/s for what carries 16: those are served, realtime whole, and limits stay wide."""
    record = overloaded(1200, 24.0, seed)
    surge = [tick for tick in record.ticks if tick.time >= 420]
    assert fmean(tick.decision.signals.served_per_s for tick in surge) >= 15
    # 7.2 of the 24 are realtime; half a minute varies by a fifth.
    assert fmean(tick.decision.signals.rates.wait_count_realtime for tick in surge) >= 6.8
    assert min(tick.decision.signals.rates.wait_count_realtime for tick in surge) >= 5
    assert fmean(tick.queue_wait_s for tick in surge) <= 2
    assert record.outcome.batch_attainment >= 0.95
    assert len({(tick.sequences, tick.tokens) for tick in surge}) == 1, "no limit moves"
    assert surge[-1].sequences >= 150
    assert_safe(record)


@pytest.mark.promise("safe-state")
@pytest.mark.slow
def test_engines_that_refuse_puts_open_the_control_breaker_and_it_recovers() -> None:
    """Ten minutes of refusals: safe state, no scale-down, closed again afterwards."""
    record = played(
        Case(
            2400,
            lambda _: 8.0,
            SETTINGS,
            H100_70B,
            replicas=2,
            puts=lambda t: not 300 <= t < 900,
        )
    )
    states = {
        tick.decision.breakers.control.state for tick in record.ticks if 300 <= tick.time < 900
    }
    assert BreakerState.OPEN in states
    assert record.ticks[-1].decision.breakers.control.state is BreakerState.CLOSED
    for before, after in pairwise(record.ticks):
        if not after.decision.breakers.control.is_closed:
            assert after.replicas >= before.replicas


@pytest.mark.exhaustive
def test_two_breakers_at_once() -> None:
    """Overload, and metrics lost in the middle of it: traffic is let in while blind, and all closes in the end."""
    record = played(
        Case(
            2700,
            lambda t: 60.0 if 300 <= t < 700 else 8.0,
            SETTINGS,
            H100_70B,
            replicas=2,
            cold_start_s=300,
            metrics=lambda t: not 500 <= t < 650,
            direct=lambda _: False,
            tiers=(0.2, 0.6, 0.2),
        )
    )
    blind = [tick for tick in record.ticks if 580 <= tick.time < 650]
    assert all(tick.decision.admission.admit == (1.0, 1.0, 1.0) for tick in blind)
    assert any(tick.decision.breakers.control.state is BreakerState.OPEN for tick in blind)
    last = record.ticks[-1].decision
    assert last.breakers.control.state is BreakerState.CLOSED
    assert last.breakers.load.is_closed
    assert_safe(record)


@pytest.mark.slow
def test_realtime_is_protected_while_replicas_start() -> None:
    """Overload by batch work: batch waits, realtime does not."""
    record = played(
        Case(
            900,
            lambda t: 70.0 if t >= 300 else 10.0,
            ControlSettings(max_replicas=2),
            H100_70B,
            replicas=2,
            tiers=(0.1, 0.1, 0.8),
        )
    )
    late = [tick for tick in record.ticks if tick.time > 500]
    waits = [tick.decision.signals.gauges.oldest_wait_s_realtime for tick in late]
    assert sum(wait <= 0.5 for wait in waits) >= 0.9 * len(waits)
    assert late[-1].decision.signals.gauges.waiting_batch > 0


@pytest.mark.slow
@pytest.mark.parametrize("load", keep_first(1, [(8.7, 2), (9.0, 3)], pytest.mark.exhaustive))
def test_refused_requests_order_a_replica(load: tuple[float, int]) -> None:
    """The load breaker empties the queue of an overloaded replica, which is no sign that it copes."""
    rate, seed = load
    case = Case(600, lambda _: rate, SETTINGS, H100_70B, tiers=(0.2, 0.6, 0.2), seed=seed)
    record = played(case)
    refusing = [t.time for t in record.ticks if t.decision.admission.admit != (1.0, 1.0, 1.0)]
    assert record.replica_changes(), "none was ordered"
    time, by = record.replica_changes()[0]
    assert by == 1
    assert time - refusing[0] <= 15
    assert_safe(record)


@pytest.mark.slow
@pytest.mark.parametrize("seed", keep_first(1, [4, 1, 3], pytest.mark.exhaustive))
def test_a_full_short_queue_orders_a_replica(seed: int) -> None:
    """Ten times the load in the second minute, a queue of 8: who is refused does not wait."""

    def rate(t: float) -> float:
        return 136.0 if t >= 75 else 13.6

    engine = replace(H100_8B, queue_limits=(8, 8, 1024))
    record = played(Case(200, rate, SETTINGS, engine, seed=seed))
    time, by = record.replica_changes()[0]
    assert by == 1
    assert 75 < time <= 90
    assert_safe(record)


def test_same_scenario_same_record() -> None:
    """Seeded and pure."""
    scenario = Case(300, lambda _: 6.0, SETTINGS)
    one, two = played(scenario), played(scenario)
    assert [tick.decision for tick in one.ticks] == [tick.decision for tick in two.ticks]


@pytest.mark.slow
@pytest.mark.parametrize("seed", keep_first(1, [1, 2, 7], pytest.mark.exhaustive))
def test_the_limits_come_back_after_a_crowded_minute(seed: int) -> None:
    """Every step takes twice as long for a minute: limits fall with it, not to the floor, and return."""
    settings = replace(SETTINGS, min_replicas=2, max_replicas=2)
    record = played(
        Case(
            1200,
            lambda _: 10.0,
            settings,
            H100_70B,
            replicas=2,
            seed=seed,
            slowness=lambda t: 2.0 if 600 <= t < 660 else 1.0,
        )
    )
    before = [tick for tick in record.ticks if tick.time < 600][-1]
    after = [tick for tick in record.ticks if tick.time >= 600]
    assert min(tick.sequences for tick in after) >= 4 * settings.min_sequences
    assert (after[-1].sequences, after[-1].tokens) >= (before.sequences - 20, before.tokens)
    assert all(tick.queue_wait_s <= 0.5 for tick in after if tick.time >= 720)
    assert record.outcome.wait_attainment >= 0.95
    assert_safe(record, settings)
