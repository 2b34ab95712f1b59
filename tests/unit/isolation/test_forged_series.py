"""Series that somebody else wrote in a pod's name take no replica and turn no request away."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fleetkeeper.adapters.prometheus import PrometheusReading
from fleetkeeper.adapters.prometheus.queries import parse_selector, queries_for
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import PodSample, Source
from fleetkeeper.autoscale.signals.series_map import edges_of
from fleetkeeper.autoscale.types import ControlSettings, PodView
from fleetkeeper.runtime.autoscaler.readings import Target
from fleetkeeper.runtime.autoscaler.sources import MeasuredSource
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.settings import SettingsError, load_settings
from tests.support.autoscale.control_cases import NOW, Loop, sample
from tests.support.operators.contained import new_defects

KEY = Key("team-a", "chat")
SETTINGS = ControlSettings(min_replicas=1, max_replicas=6, scale_down_delay_s=60.0)
IDLE = dict.fromkeys((
    "wait_count_standard", "wait_sum_s_standard", "wait_within_standard", "arrivals_standard",
    "arrivals_squared", "batch_time_count", "batch_time_sum_s", "batch_time_within", "steps",
    "schedule_calls", "prompt_tokens", "generation_tokens",
), 0.0)  # fmt: skip
OVERLOADED = {
    "wait_sum_s_standard": 40.0,
    "wait_within_standard": 0.0,
    "arrivals_standard": 40.0,
    "arrivals_batch": 1.0,
}
BUSY = {"arrivals_standard": 12.0, "wait_count_standard": 12.0, "wait_within_standard": 12.0}


@dataclass
class Fleet:
    """A service of four pods: what Prometheus says of it, and what the pods say."""

    said: Mapping[str, float]
    true: Mapping[str, float]
    disputed: bool = False
    can_read: bool = True
    direct_reads: int = 0
    loop: Loop = field(default_factory=lambda: Loop(SETTINGS, replicas=4))
    decision: ControlDecision | None = None

    def __post_init__(self) -> None:
        ours: Any = self
        self.source = MeasuredSource(
            ours, ours if self.can_read else None, may_send=lambda: True,
            monotonic=lambda: self.loop.now, defects=new_defects(),
        )  # fmt: skip

    def rows(self, per_second: Mapping[str, float], source: Source) -> list[PodSample]:
        """A sample of each pod."""
        rows = []
        for pod in self.loop.pods:
            row = sample(self.loop.now, pod.name, **dict[str, Any](per_second))
            gauges = row.gauges._replace(limit_generation=self.loop.generation)
            if per_second is IDLE:
                gauges = gauges._replace(running=0.0, kv_resident_tokens=0.0)
            elif per_second is BUSY:
                gauges = gauges._replace(kv_resident_tokens=0.8 * gauges.kv_capacity_tokens)
            rows.append(replace(row, gauges=gauges, source=source))
        return rows

    async def observe_samples(
        self, pods: Mapping[tuple[str, str], Edges], now: float, *, step_class: str
    ) -> PrometheusReading:
        """Prometheus."""
        del now, step_class
        if self.disputed:
            return PrometheusReading({}, frozenset(pods))
        rows = self.rows(self.said, Source.PROMETHEUS)
        return PrometheusReading({("team-a", row.pod): row for row in rows})

    async def scrape_samples(
        self,
        pods: Iterable[tuple[PodView, Edges]],
        *,
        deadline_s: float,
        doubted: Collection[str],
        **_: object,
    ) -> dict[str, PodSample | None]:
        """The pods."""
        del deadline_s, doubted
        self.direct_reads += 1
        by_name = {row.pod: row for row in self.rows(self.true, Source.DIRECT)}
        return {pod.uid: by_name[pod.name] for pod, _ in pods}

    async def tick(self) -> ControlDecision:
        """What the control loop does with one service."""
        directly = self.decision is not None and self.decision.asks_pods
        target = Target(KEY, edges_of(self.loop.settings), self.loop.pods, directly)
        readings = await self.source.observe([target], self.loop.now)
        self.decision = self.loop.tick(
            readings.samples.get(KEY, ()),
            prometheus_lost=KEY in readings.lost,
            checks_directly=readings.checks_directly(KEY),
            prometheus_disputed=KEY in readings.disputed,
        )
        return self.decision

    async def ticks(self, count: int) -> list[ControlDecision]:
        """Many of these."""
        return [await self.tick() for _ in range(count)]


@pytest.mark.promise("forged-series")
async def test_a_busy_fleet_is_not_shrunk_because_prometheus_calls_it_idle() -> None:
    """The pods are asked before a replica goes, and they say that three could not hold what they hold."""
    fleet = Fleet(said=IDLE, true=BUSY)
    decisions = await fleet.ticks(120)
    assert min(decision.want.replicas for decision in decisions) == 4
    assert fleet.direct_reads > 0


async def test_an_idle_fleet_shrinks_once_its_pods_were_read_directly() -> None:
    """For a minute; not a pod is called while nothing is to be taken away."""
    fleet = Fleet(said=IDLE, true=IDLE)
    lowered = 0
    for _ in range(60):
        decision = await fleet.tick()
        if decision.want.replicas < 4:
            lowered += 1
            assert decision.signals.is_direct
        if fleet.loop.now - NOW < SETTINGS.scale_down_delay_s:
            assert fleet.direct_reads == 0
    assert lowered > 0


async def test_a_steady_fleet_is_never_called() -> None:
    """At 4 requests a second and pod nothing is to be taken away: Prometheus is enough."""
    fleet = Fleet(said={}, true={})
    fleet.loop.settings = replace(SETTINGS, min_replicas=4)
    await fleet.ticks(100)
    assert fleet.direct_reads == 0


async def test_nobody_is_turned_away_because_prometheus_calls_a_fleet_overloaded() -> None:
    """The pods are asked first."""
    fleet = Fleet(said=OVERLOADED, true={})
    decisions = await fleet.ticks(60)
    assert fleet.direct_reads > 0
    assert all(decision.breakers.load.is_closed for decision in decisions)
    assert all(decision.admission.admit == (1.0, 1.0, 1.0) for decision in decisions)


async def test_a_true_overload_is_acted_on_within_half_a_minute() -> None:
    """Three readings of the pods are enough."""
    fleet = Fleet(said=OVERLOADED, true=OVERLOADED)
    decisions = await fleet.ticks(24)
    opened = [
        number for number, decision in enumerate(decisions) if not decision.breakers.load.is_closed
    ]
    assert opened
    assert opened[0] * 5.0 <= 30.0
    assert all(decisions[number].signals.is_direct for number in opened)


@pytest.mark.promise("forged-series")
async def test_pods_with_two_series_are_read_directly_and_count_as_measured() -> None:
    """That is no loss of Prometheus; the status says what is wrong and which setting helps."""
    fleet = Fleet(said=IDLE, true={}, disputed=True)
    decisions = await fleet.ticks(12)
    signals = decisions[-1].signals
    assert (signals.source, signals.reporting_pods) == (Source.DIRECT, 4)
    assert decisions[-1].state.inputs.prometheus_disputed
    assert not decisions[-1].breakers.source.is_silent
    assert fleet.direct_reads == 12, "once a tick, at the time that Prometheus is asked"


async def test_a_dispute_without_direct_reads_holds() -> None:
    """Neither series is believed: nothing is lowered and nobody is turned away."""
    fleet = Fleet(said=IDLE, true=BUSY, disputed=True, can_read=False)
    decisions = await fleet.ticks(60)
    assert min(decision.want.replicas for decision in decisions) == 4
    assert all(decision.breakers.load.is_closed for decision in decisions)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("", ""),
        ("{}", ""),
        ('job="fleetkeeper-engines"', 'job="fleetkeeper-engines"'),
        ('{job="a" , cluster=~"eu-.*|us"}', 'job="a", cluster=~"eu-.*|us"'),
        (r'job!="a\"b\\c"', r'job!="a\"b\\c"'),
    ],
)
def test_a_selector_is_added_to_every_query(given: str, want: str) -> None:
    """Inside the braces of the one series selector that a query has."""
    selector = parse_selector(given)
    assert selector == want
    for query in queries_for([Edges(0.5, 0.05)], step_class="decode", selector=selector):
        text = query.text(("team-a",))
        assert text.count("{") == text.count("}") == 1
        matchers = re.search(r"\{(.*)\}", text)
        assert matchers is not None
        assert not want or f", {want}, namespace=" in matchers[1], text


@pytest.mark.parametrize(
    "text",
    [
        'job="a"} or vector(0) #',
        'job="a"}) or ({job="b"',
        'job="a" or job="b"',
        "job=a",
        "job='a'",
        'job="a\\"',
        'job="a\nb"',
        'job="a" job="b"',
        '="a"',
        "up",
        '{job="a"}{',
        'job=`a`',
        'job="a", # ',
    ],
)  # fmt: skip
def test_a_selector_cannot_break_out_of_the_query(text: str) -> None:
    """The setting is refused at start, with its name and an example."""
    with pytest.raises(ValueError, match="label matchers"):
        parse_selector(text)
    for setting in ("prometheus_selector", "prometheus_batch_selector"):
        with pytest.raises(SettingsError, match=rf"{setting}.*label matchers"):
            load_settings(None, **{setting: text})
