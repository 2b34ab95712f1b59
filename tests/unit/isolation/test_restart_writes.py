"""A restart writes nothing when nothing changed, whether metrics come or not.

The operator runs against a double of the API server that counts writes; its control loop ticks, and
its clock is moved by the test. tests/cluster shows the same for the real process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.autoscale.types import LimitsRequest, PutOutcome
from fleetkeeper.common.values import Event
from fleetkeeper.reconcile.types import Kind, Pod
from fleetkeeper.runtime.autoscaler.fleet_events import GATHER_S, FleetEvents
from fleetkeeper.runtime.autoscaler.readings import Readings, Target
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.reconciler.control_view import NoControl
from tests.support.autoscale.loop_world import send_requests
from tests.support.operators.isolation_world import NAMESPACE, Operator


class Restartable(Operator):
    """An operator whose successor finds the same cluster.

    `metrics_are`: read, silent, lost, or unreachable like the engines, which then take no orders.
    """

    def __init__(
        self, *names: str, before: Restartable | None = None, metrics_are: str = "silent"
    ) -> None:
        self.before = before
        self.metrics_are = metrics_are
        super().__init__(*names)
        self.loop._started = self.clock

    def _build(self) -> None:
        if self.before is not None:
            self.server, self.clock = self.before.server, self.before.clock + 12.0
        super()._build()
        self.controller.settled_since = self.clock
        if self.before is not None:
            self.cache._members, self.cache._home = (
                self.before.cache._members,
                self.before.cache._home,
            )
            self.cache._same = self.before.cache._same

    def _add(self, name: str) -> Key:
        return super()._add(name) if self.before is None else Key(NAMESPACE, name)

    async def observe(self, targets: Sequence[Target], now: float) -> Readings:
        found = await super().observe(targets, now)
        if self.metrics_are == "read":
            return Readings(
                {
                    key: tuple(
                        replace(row, gauges=row.gauges._replace(limit_generation=self.generation))
                        for row in rows
                    )
                    for key, rows in found.samples.items()
                }
            )
        lost = (target.key for target in targets if self.metrics_are in {"lost", "unreachable"})
        return Readings({}, frozenset(lost))

    async def put_limits(self, requests: Sequence[LimitsRequest]) -> Sequence[PutOutcome]:
        outcomes = await super().put_limits(requests)
        is_taken = self.metrics_are != "unreachable"
        return [replace(outcome, succeeded=is_taken) for outcome in outcomes]

    @property
    def generation(self) -> float:
        """The newest order's, which every engine has read."""
        return float(max((request.generation for request in self.sent), default=0))

    async def live(self, seconds: float) -> None:
        """Lets the operator work. As in the process, reconciles do not wait for the first tick."""
        end = self.clock + seconds
        while self.clock < end:
            self.queue._release_due()
            await self.reconcile_queued()
            await self.loop.tick()
            await send_requests(self.loop)
            self.queue._release_due()
            await self.reconcile_queued()
            await self.recorder.drain()
            self.clock += 5.0

    async def grown(self) -> Restartable:
        """Creates the services' children and pods, which turn ready now, and lives ten minutes."""
        for live in self.server.services.values():
            self.feed.changed(live)
        await self.reconcile_queued()
        for key in self.keys:
            engine: Any = self.cache.children(key)[Kind.DEPLOYMENT, key.name]
            assert engine.desired_replicas == 1
            self.put_pod(key.name)
            self._make_young(key)
        await self.live(600.0)
        return self

    def _make_young(self, key: Key) -> None:
        found = self.cache.known("Pod", NAMESPACE, f"{key.name}-0")
        assert found is not None
        assert isinstance(found.record, Pod)
        self.server.version += 1
        pod = replace(found.record, created=self.clock - 20.0, ready_since=self.clock)
        self.cache.put(replace(found, version=self.server.version, record=pod))

    async def restarted(self) -> Restartable:
        """The next process, which has read the cluster."""
        names = [key.name for key in self.keys]
        new = Restartable(*names, before=self, metrics_are=self.metrics_are)
        self.server.status_writes.clear()
        self.server.events.clear()
        for live in new.server.services.values():
            new.feed.changed(live)
        return new


@pytest.mark.slow
@pytest.mark.parametrize("metrics_are", ["read", "silent", "lost", "unreachable"])
async def test_a_restart_writes_nothing_when_nothing_changed(metrics_are: str) -> None:
    operator = await Restartable("a", "b", metrics_are=metrics_are).grown()
    state = operator.server.services["a"]["status"]["breaker"]["control"]
    assert state == ("Closed" if metrics_are == "read" else "Open")
    before = {name: live["status"] for name, live in operator.server.services.items()}
    operator = await operator.restarted()
    await operator.live(600.0)
    after = {name: live["status"] for name, live in operator.server.services.items()}
    assert after == before
    assert operator.server.status_writes == []
    assert operator.server.events == []


@pytest.mark.parametrize("metrics_are", ["silent", "lost", "unreachable"])
async def test_at_rest_nothing_is_written_two_minutes_after_the_pods_are_ready(
    metrics_are: str,
) -> None:
    operator = await Restartable("a", "b", metrics_are=metrics_are).grown()
    operator.server.status_writes.clear()
    await operator.live(1800.0)
    assert operator.server.status_writes == []


async def test_what_the_new_process_knows_is_written_over_what_stood_there() -> None:
    """Metrics come back, or go, during the restart: the status follows once that is sure."""
    operator = await Restartable("a", metrics_are="read").grown()
    operator = await operator.restarted()
    operator.metrics_are = "silent"
    await operator.live(25.0)
    assert operator.server.status_writes == []
    await operator.live(60.0)
    assert operator.condition("a", "MetricsAvailable") == ("False", "NoMetrics")
    assert operator.condition("a", "Degraded") == ("True", "ControlBreakerOpen")
    operator = await operator.restarted()
    operator.metrics_are = "read"
    await operator.live(600.0)
    assert operator.condition("a", "MetricsAvailable") == ("True", "FreshMetrics")
    assert operator.condition("a", "Degraded") == ("False", "AsExpected")


async def test_a_restart_with_control_switched_off_takes_back_what_control_said() -> None:
    operator = await Restartable("a").grown()
    assert operator.condition("a", "Degraded") == ("True", "ControlBreakerOpen")
    operator = await operator.restarted()
    operator.controller._control = NoControl()
    await operator.reconcile_queued()
    assert operator.condition("a", "Degraded") == ("False", "AsExpected")


# -- one event for the fleet -----------------------------------------------------------------------


@pytest.mark.exhaustive
async def test_metrics_that_many_services_lose_together_are_one_event_of_the_fleet() -> None:
    """On the operator's Lease, with how many and which; each service's status says its own part."""
    names = [f"chat-{number:02}" for number in range(20)]
    operator = await Restartable(*names, metrics_are="read").grown()
    operator.server.events.clear()
    operator.metrics_are = "lost"
    await operator.live(600.0)
    assert sorted(operator.server.events) == [
        ("fleetkeeper", "ControlBreakerOpen"),
        ("fleetkeeper", "PrometheusLost"),
    ]
    assert {operator.condition(name, "Degraded")[1] for name in names} == {"ControlBreakerOpen"}


@pytest.mark.slow
async def test_what_was_gathered_is_told_at_the_end_of_the_process() -> None:
    """Its successor finds the breaker open in the status, and tells nothing."""
    names = [f"chat-{number:02}" for number in range(6)]
    operator = await Restartable(*names, metrics_are="read").grown()
    operator.server.events.clear()
    operator.metrics_are = "lost"
    while operator.condition("chat-00", "Degraded")[1] != "ControlBreakerOpen":
        await operator.live(5.0)
    assert ("fleetkeeper", "ControlBreakerOpen") not in operator.server.events
    operator.loop.flush_events()
    await operator.recorder.drain()
    assert operator.server.events.count(("fleetkeeper", "ControlBreakerOpen")) == 1


async def test_a_service_that_loses_its_metrics_alone_has_the_event() -> None:
    operator = await Restartable("a", "b", metrics_are="silent").grown()
    reasons = [event for event in operator.server.events if event[1] == "ControlBreakerOpen"]
    assert sorted(reasons) == [("a", "ControlBreakerOpen"), ("b", "ControlBreakerOpen")]


def test_services_that_follow_wait_for_the_next_event_of_the_fleet() -> None:
    """However slowly an outage spreads, and whatever the words: one event in ten minutes."""
    single: list[tuple[Key, Event]] = []
    fleet: list[Event] = []
    events = FleetEvents(lambda key, event: single.append((key, event)), fleet.append)
    lost = Event("Warning", "PrometheusLost", "Prometheus gives no fresh samples: held")
    own = Event("Warning", "EngineHung", "No steps: a-0")
    for second in range(0, 1200, 5):
        events.add(Key(NAMESPACE, f"s{second:04}"), lost, float(second))
        events.flush(float(second))
    events.add(Key(NAMESPACE, "a"), own, 1200.0)
    assert single == [(Key(NAMESPACE, "a"), own)]
    assert len(fleet) == 2
    assert fleet[0].reason == "PrometheusLost"
    assert fleet[0].message.startswith("4 services: Prometheus gives no fresh samples: held.")
    assert f"{NAMESPACE}/s0000, {NAMESPACE}/s0005" in fleet[0].message
    assert fleet[1].message.endswith("more")


def test_few_services_are_told_one_by_one_and_nothing_is_kept() -> None:
    single: list[tuple[Key, Event]] = []
    fleet: list[Event] = []
    events = FleetEvents(lambda key, event: single.append((key, event)), fleet.append)
    lost = Event("Warning", "PrometheusLost", "text")
    keys = [Key(NAMESPACE, name) for name in ("a", "b", "c")]
    for key in keys:
        events.add(key, lost, 0.0)
    events.flush(GATHER_S - 1.0)
    assert single == []
    events.flush(GATHER_S)
    events.flush(GATHER_S + 5.0)
    assert single == [(key, lost) for key in keys]
    assert fleet == []
    assert events._groups == {}
