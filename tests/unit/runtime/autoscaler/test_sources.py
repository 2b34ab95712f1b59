"""Prometheus first, the pods themselves where it is silent; never longer than a deadline, never uninvited."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fleetkeeper.adapters.prometheus import PrometheusError, PrometheusReading
from fleetkeeper.autoscale.signals.backlog import Backlog
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.signals.series_map import edges_of
from fleetkeeper.autoscale.types import ControlSettings, PodView
from fleetkeeper.runtime.autoscaler.readings import Target
from fleetkeeper.runtime.autoscaler.sources import MeasuredSource
from fleetkeeper.runtime.queue import Key
from tests.support.autoscale.control_cases import NOW, sample
from tests.support.operators.contained import new_defects


def target(name: str, namespace: str = "team-a", *, age_s: float = 600.0) -> Target:
    """A service with one ready pod."""
    pod = PodView(
        f"{name}-0", f"u-{namespace}-{name}", NOW - 900, True, NOW - age_s, ip="127.0.0.1"
    )
    return Target(Key(namespace, name), edges_of(ControlSettings()), (pod,))


@dataclass
class Doubles:
    """Prometheus and the engines' ports; `reach` pods can be called in one deadline."""

    down: bool = False
    known: tuple[str, ...] = ()
    disputed: tuple[str, ...] = ()
    reach: int = 1000
    answering: frozenset[str] = frozenset()
    called: list[list[str]] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)
    doubted: list[frozenset[str]] = field(default_factory=list)
    step_classes: list[str] = field(default_factory=list)
    clock: float = 0.0
    backlogs: Mapping[tuple[str, str], Backlog] = field(default_factory=dict)

    async def observe_samples(
        self, pods: Mapping[tuple[str, str], Edges], now: float, *, step_class: str
    ) -> PrometheusReading:
        """Prometheus."""
        self.step_classes.append(step_class)
        await asyncio.sleep(0)
        if self.down:
            raise PrometheusError("down")
        known = {f"{name}-0" for name in self.known} - {f"{name}-0" for name in self.disputed}
        return PrometheusReading(
            {pod: sample(now, pod[1]) for pod in pods if pod[1] in known},
            frozenset(pod for pod in pods if pod[1] in {f"{name}-0" for name in self.disputed}),
            backlogs=self.backlogs,
        )

    async def scrape_samples(
        self,
        pods: Iterable[tuple[PodView, Edges]],
        *,
        deadline_s: float,
        doubted: Collection[str],
        **_: object,
    ) -> dict[str, PodSample | None]:
        """The engines."""
        self.deadlines.append(deadline_s)
        self.clock += 1.0
        some = [pod for pod, _ in pods][: self.reach]
        self.called.append([pod.name for pod in some])
        self.doubted.append(frozenset(doubted))
        return {
            pod.uid: sample(NOW, pod.name) if pod.uid in self.answering else None for pod in some
        }

    def source(self, *, prometheus: bool = True, direct: bool = True) -> MeasuredSource:
        """What is tested."""
        ours: Any = self
        return MeasuredSource(
            ours if prometheus else None,
            ours if direct else None,
            may_send=lambda: True,
            monotonic=lambda: self.clock,
            defects=new_defects(),
            deadline_s=3.0,
        )


async def test_services_that_prometheus_knows_are_not_called() -> None:
    """Only the one of which it has nothing is read directly, and counts as lost."""
    doubles = Doubles(known=("chat",), answering=frozenset({"u-team-a-code"}))
    readings = await doubles.source().observe([target("chat"), target("code")], NOW)
    assert doubles.called == [["code-0"]]
    assert readings.lost == {Key("team-a", "code")}
    assert set(readings.samples) == {Key("team-a", "chat"), Key("team-a", "code")}


async def test_backlogs_of_services_are_handed_on_and_end_with_prometheus() -> None:
    """Also of a service whose pods Prometheus has lost."""
    waits = Backlog(5e6, NOW + 60, 9.0, NOW)
    doubles = Doubles(known=("chat",), backlogs={("team-a", "code"): waits})
    targets = [target("chat"), target("code")]
    assert (await doubles.source().observe(targets, NOW)).backlogs == {Key("team-a", "code"): waits}
    doubles.down = True
    assert (await doubles.source().observe(targets, NOW)).backlogs == {}


async def test_pods_that_start_are_read_directly_and_delay_no_other() -> None:
    """Prometheus has no sample of an engine that does not run yet."""
    doubles = Doubles(known=("chat",), answering=frozenset({"u-new", "u-team-a-chat"}))
    new = PodView("chat-1", "u-new", NOW - 20, ip="127.0.0.2")
    waits = PodView("chat-2", "u-waits", NOW - 20)
    one = target("chat")
    readings = await doubles.source().observe([replace(one, pods=(*one.pods, new, waits))], NOW)
    assert doubles.called == [["chat-1"]]
    assert doubles.doubted == [frozenset({"u-new"})]
    assert [row.pod for row in readings.starts[one.key]] == ["chat-1"]
    assert [row.pod for row in readings.samples[one.key]] == ["chat-0"]
    silent = Doubles(known=("chat",))
    readings = await silent.source().observe([replace(one, pods=(*one.pods, new))], NOW)
    assert readings.starts == {}
    assert readings.lost == frozenset()


async def test_without_direct_reads_no_pod_is_ever_called() -> None:
    """Neither without a Prometheus nor while it is down; the loss is told all the same."""
    for prometheus in (True, False):
        doubles = Doubles(down=True)
        source = doubles.source(prometheus=prometheus, direct=False)
        for _ in range(3):
            readings = await source.observe([target("chat")], NOW)
            assert readings.samples == {}
            assert readings.lost == ({Key("team-a", "chat")} if prometheus else set())
        assert doubles.called == []


async def test_pods_of_one_name_in_two_namespaces_are_told_apart() -> None:
    """A sample goes to the service whose pod was called."""
    doubles = Doubles(down=True, answering=frozenset({"u-team-b-chat"}))
    both = [target("chat", "team-a"), target("chat", "team-b")]
    readings = await doubles.source().observe(both, NOW)
    assert set(readings.samples) == {Key("team-b", "chat")}


async def test_services_whose_turn_did_not_come_are_read_first_in_the_next_tick() -> None:
    """Five lost services, two pods a deadline, one of them dead: all are called within three ticks."""
    names = [f"s{number}" for number in range(5)]
    doubles = Doubles(down=True, reach=2, answering=frozenset(f"u-team-a-{n}" for n in names[1:]))
    source = doubles.source()
    for _ in range(3):
        await source.observe([target(name) for name in names], NOW)
    assert {pod for some in doubles.called for pod in some} == {f"{name}-0" for name in names}
    assert set(doubles.deadlines) == {3.0}


async def test_pods_and_prometheus_are_asked_at_once_while_it_is_down_and_it_is_believed_when_back() -> (
    None
):
    """One round of calls a tick; its first answer ends the direct reading."""
    doubles = Doubles(down=True, known=("chat",), answering=frozenset({"u-team-a-chat"}))
    source = doubles.source()
    for _ in range(3):
        readings = await source.observe([target("chat")], NOW)
        assert readings.lost
    assert len(doubles.called) == 3
    doubles.down = False
    assert not (await source.observe([target("chat")], NOW)).lost
    await source.observe([target("chat")], NOW)
    assert len(doubles.called) == 4


async def test_the_classes_of_steps_are_asked_for_in_turn() -> None:
    """A window is two ticks long: each class comes once in it."""
    doubles = Doubles(known=("chat",))
    source = doubles.source()
    for _ in range(4):
        await source.observe([target("chat")], NOW)
    assert doubles.step_classes[:2] == doubles.step_classes[2:]
    assert sorted(doubles.step_classes[:2]) == ["decode", "prefill"]


async def test_a_pod_that_prometheus_had_no_time_to_scrape_is_not_lost() -> None:
    """Ready for 10 s: nothing is missing yet; after 20 s it is."""
    doubles = Doubles()
    assert not (await doubles.source().observe([target("chat", age_s=10.0)], NOW)).lost
    assert (await doubles.source().observe([target("chat", age_s=21.0)], NOW)).lost
