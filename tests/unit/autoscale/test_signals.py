"""Raw samples become signals: grades, rates, coverage and sources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.autoscale.constants import AGEING_S, FRESH_S
from fleetkeeper.autoscale.signals.observe import observe_service
from fleetkeeper.autoscale.signals.pod_history import PodTrack, accept, grade_of
from fleetkeeper.autoscale.signals.samples import (
    Counters,
    Gauges,
    PodSample,
    Source,
)
from fleetkeeper.autoscale.signals.service_signals import Signals, SignalsMemory
from fleetkeeper.autoscale.types import ControlSettings, Grade
from tests.support.autoscale.control_cases import NOW, Loop, pod_view, sample


def observed(times: list[float], pods: int = 1, now: float | None = None) -> Signals:
    """Signals after samples of `pods` pods at `times`, seen at the last of them or at `now`."""
    views = tuple(pod_view(f"chat-{i}") for i in range(pods))
    memory, signals = SignalsMemory(), Signals()
    for time in times:
        rows = [sample(time, view.name) for view in views]
        signals, memory = observe_service(rows, views, memory, time)
    if now is not None:
        signals, memory = observe_service([], views, memory, now)
    return signals


@pytest.mark.parametrize(
    ("age_s", "grade"),
    [
        (0.0, Grade.FRESH),
        (FRESH_S, Grade.FRESH),
        (FRESH_S + 0.1, Grade.AGEING),
        (30.0, Grade.AGEING),
        (AGEING_S, Grade.AGEING),
        (AGEING_S + 0.1, Grade.STALE),
        (3600.0, Grade.STALE),
    ],
)
def test_grade_follows_age(age_s: float, grade: Grade) -> None:
    """FRESH up to 15 s, AGEING up to 60 s, then STALE."""
    track = accept(PodTrack("chat-0"), sample(NOW), 0.0, NOW)
    assert grade_of(track, NOW + age_s) is grade


def test_rates_come_from_successive_samples() -> None:
    """Rates over 30 s: 4 requests/s, 25 steps/s of 40 ms."""
    signals = observed([NOW + 5 * i for i in range(8)])
    assert signals.grade is Grade.FRESH
    assert signals.arrivals_per_s == pytest.approx(4.0)
    assert signals.served_per_s == pytest.approx(4.0)
    assert signals.batch_time_s == pytest.approx(0.04)
    assert signals.rates.steps == pytest.approx(25.0)


def test_one_sample_is_not_a_rate() -> None:
    """A single scrape has no rate: the service is not known yet."""
    assert observed([NOW]).grade is Grade.STALE


@pytest.mark.parametrize("pods", [1, 2, 3, 7])
def test_sums_grow_with_pods(pods: int) -> None:
    """Rates and running are summed, oldest waits are means."""
    signals = observed([NOW + 5 * i for i in range(4)], pods=pods)
    assert signals.arrivals_per_s == pytest.approx(4.0 * pods)
    assert signals.gauges.running == pytest.approx(20.0 * pods)
    assert signals.coverage == 1.0


@pytest.mark.parametrize("age_s", [0.0, 30.0, 59.0])
def test_pods_that_are_warming_up_are_not_used(age_s: float) -> None:
    """A pod's first minute is not representative."""
    views = (pod_view("chat-0", age_s=age_s, now=NOW), pod_view("chat-1"))
    memory, signals = SignalsMemory(), Signals()
    for i in range(-3, 1):
        rows = [sample(NOW + 5 * i, view.name) for view in views]
        signals, memory = observe_service(rows, views, memory, NOW + 0.001 * i)
    assert signals.reporting_pods == 1
    assert signals.coverage == 0.5


def test_pods_that_are_gone_or_not_ready_are_not_used() -> None:
    """Samples join with the pods that live: a ghost counts for nothing."""
    views = (
        pod_view("chat-0"),
        pod_view("chat-1", ready=False),
        replace(pod_view("chat-2"), deleting=True),
    )
    memory, signals = SignalsMemory(), Signals()
    for i in range(4):
        rows = [sample(NOW + 5 * i, name) for name in ("chat-0", "chat-1", "chat-2", "ghost")]
        signals, memory = observe_service(rows, views, memory, NOW + 5 * i)
    assert signals.reporting_pods == 1
    assert signals.arrivals_per_s == pytest.approx(4.0)
    assert set(memory.tracks) == {"chat-0"}


@pytest.mark.parametrize("silent", range(7))
def test_half_of_the_pods_must_report(silent: int) -> None:
    """For every k of 6 silent pods: known exactly when at least half report."""
    views = tuple(pod_view(f"chat-{i}") for i in range(6))
    memory, signals = SignalsMemory(), Signals()
    for i in range(4):
        rows = [sample(NOW + 5 * i, view.name) for view in views[silent:]]
        signals, memory = observe_service(rows, views, memory, NOW + 5 * i)
    assert signals.known is (6 - silent >= 3)
    assert signals.coverage == pytest.approx((6 - silent) / 6)


@pytest.mark.parametrize("paused", [False, True])
def test_an_engine_that_reports_that_it_is_hung_is_left_out_and_replaced(paused: bool) -> None:
    """Its pod is named, left out of the means, counted as seen, and replaced unless the service is paused."""
    loop = Loop(replicas=2, settings=replace(ControlSettings(), paused=paused))
    gauges = Gauges(waiting_standard=3.0, running=5.0, limit_sequences=32.0, hung=1.0)
    decision, replaced = None, list[str]()
    for _ in range(14):
        hung = PodSample("chat-1", loop.now, Counters(steps=41.0), gauges)
        decision = loop.tick([sample(loop.now), hung])
        replaced += decision.replace_pods
    assert decision is not None
    assert decision.signals.hung_pods == ("chat-1",)
    assert decision.signals.known
    assert replaced == ([] if paused else ["chat-1"])


def test_idle_is_known_not_missing() -> None:
    """0/0 with flat counters, pods up and nothing waiting is idle, never NaN."""
    loop = Loop(replicas=2)
    flat = dict.fromkeys(
        (
            "wait_count_standard",
            "wait_sum_s_standard",
            "wait_within_standard",
            "arrivals_standard",
            "arrivals_squared",
            "batch_time_count",
            "batch_time_sum_s",
            "batch_time_within",
            "steps",
            "schedule_calls",
            "prompt_tokens",
            "generation_tokens",
        ),
        0.0,
    )
    decision = loop.tick()
    for _ in range(8):
        decision = loop.tick(loop.samples(gauges=Gauges(kv_capacity_tokens=1e5), **flat))
    assert decision.signals.idle
    assert decision.signals.grade is Grade.FRESH
    assert decision.signals.batch_time_s == 0.0
    assert decision.signals.queue_wait_s == 0.0


def test_missing_metrics_are_named_and_their_pod_not_used() -> None:
    """A renamed metric is always reported."""
    loop = Loop(replicas=1)
    for _ in range(4):
        rows = [replace(row, missing=("fleetkeeper_steps_total",)) for row in loop.samples()]
        decision = loop.tick(rows)
    assert decision.signals.missing == ("fleetkeeper_steps_total",)
    assert not decision.signals.known


def test_source_is_direct_when_any_sample_is() -> None:
    """So that nothing is lowered on the fallback source."""
    loop = Loop(replicas=2)
    loop.steady(3)
    rows = loop.samples()
    rows[0] = replace(rows[0], source=Source.DIRECT)
    assert loop.tick(rows).signals.source is Source.DIRECT
