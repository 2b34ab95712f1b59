"""Two replicas: how requests are routed to them, and what a lost Prometheus may do to them."""

from __future__ import annotations

import time
import uuid

import pytest

from fleetkeeper.autoscale.constants import DIRECT_WHOLE_S
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.node.node import Node
from tests.support.node.service_world import (
    SCALE_DOWN_DELAY_S,
    ask,
    await_measured,
    await_routed,
    complete,
    failures,
    requests_served,
    route,
    says,
    steady,
)

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("calm_operator")]

LIGHT_PER_S = 2.0
"""Of short answers: one replica is bored."""
SHOWN_S = 120.0
"""The status shows a lost Prometheus within a quarter of this, and so its return; one machine runs all here."""
LOST_S = DIRECT_WHOLE_S + SCALE_DOWN_DELAY_S + 30.0
"""Longer than the loop needs to remove a replica with Prometheus, which the same test shows."""


def test_sessions_stick_to_their_replica(pair: Fleet) -> None:
    """Each session's requests all reach one replica, and sessions spread over both."""
    await_routed(pair)
    homes = set()
    url = pair.base_url()
    for _ in range(12):
        # The router's hash spreads short names that are alike badly: eight of them can have one home.
        session = {"X-Session-ID": uuid.uuid4().hex}
        before = requests_served(pair)
        for _ in range(3):
            complete(url, pair.name, tokens=2, logprobs=None, **session)
        after = requests_served(pair)
        gained = {name: after[name] - before[name] for name in after if after[name] > before[name]}
        assert list(gained.values()) == [3], (session, gained)
        homes |= set(gained)
    assert len(homes) == 2


@pytest.mark.exhaustive
def test_prompts_with_the_same_beginning_stay_on_one_replica(pair: Fleet) -> None:
    """With PrefixAware; different beginnings spread over both, and no engine restarts."""
    asked = pair.live()["spec"]["routing"]
    before = [pod.identity for pod in pair.engines()]
    route(pair, {"policy": "PrefixAware"})
    try:
        # More than the 1,024 bytes that are the key. Twelve of them have one home once in 2,048 runs.
        beginnings = [f"Topic {n}. " + f"{n} is what this text is about. " * 40 for n in range(12)]
        homes = set()
        for beginning in beginnings:
            served = requests_served(pair)
            for question in range(5):
                ask(pair, f"{beginning}Question {question}", tokens=2)
            after = requests_served(pair)
            gained = {pod: after[pod] - served[pod] for pod in after if after[pod] > served[pod]}
            assert list(gained.values()) == [5], (beginning[:10], gained)
            homes |= set(gained)
        assert len(homes) == 2
    finally:
        route(pair, {"policy": asked["policy"]})
    assert [pod.identity for pod in pair.engines()] == before


@pytest.mark.promise("missing-measurements", "not-in-path", "measurement-outage")
def test_a_lost_prometheus_takes_no_replica_away_and_harms_no_request(
    pair: Fleet, node: Node
) -> None:
    """Replicas are read directly while Prometheus is lost: the loop decides on, but never lowers."""
    with steady(pair, LIGHT_PER_S, seed=11) as traffic:
        _lose_prometheus(pair, node, SCALE_DOWN_DELAY_S + 10.0)
    assert failures(traffic.samples) == []


@pytest.mark.exhaustive
def test_replicas_fall_once_prometheus_is_back_and_not_before(pair: Fleet, node: Node) -> None:
    """Once the loop reads Prometheus again, one goes sooner than the loop was watched before."""
    with steady(pair, LIGHT_PER_S, seed=11) as traffic:
        closed = _lose_prometheus(pair, node, LOST_S)
        pair.until(lambda: pair.status()["scaling"]["desired"] == 1, "fewer replicas")
        fell_s = time.monotonic() - closed
        print(f"replicas fell {fell_s:.0f} s after the loop read Prometheus again")
        assert fell_s < LOST_S
        assert pair.status()["scaling"]["reason"] == "LoadFell"
        pair.until(lambda: says(pair, "Replicas 2 -> 1: "), "the event")
        pair.await_ready(1)
        seen = len(traffic.samples)
        pair.until(lambda: len(traffic.samples) >= seen + 5, "load on what is left")
    assert failures(traffic.samples) == []


def _lose_prometheus(fleet: Fleet, node: Node, lost_s: float) -> float:
    """Stop Prometheus for a while, in which one replica would be enough. Return when the loop read it again."""

    def source() -> str:
        return str(fleet.status()["breaker"]["source"])

    await_measured(fleet)
    before = [pod.identity for pod in fleet.engines()]
    node.processes.stop(["prometheus"])
    lost = time.monotonic()
    try:
        fleet.until(lambda: source() == "Open", "the breaker opens")
        assert time.monotonic() - lost < SHOWN_S
        fleet.until(lambda: says(fleet, "Prometheus", "PrometheusLost"), "the event")
        available = fleet.condition("MetricsAvailable")
        assert (available["status"], available["reason"]) == ("True", "FreshMetrics")
        assert "read directly" in available["message"]
        fleet.change({"replicas": None})  # the loop decides from here on
        _assert_stays_at_two(fleet, lost_s)
        assert [pod.identity for pod in fleet.engines()] == before
    finally:
        node.up()
    back = time.monotonic()
    fleet.until(lambda: source() == "Closed", "the breaker closes")
    closed = time.monotonic()
    assert closed - back < SHOWN_S
    return closed


def _assert_stays_at_two(fleet: Fleet, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        deployed = fleet.kubectl("get", "deployment", fleet.name, "-o", "jsonpath={.spec.replicas}")
        assert (fleet.status()["scaling"]["desired"], deployed) == (2, "2")
        time.sleep(1.0)
