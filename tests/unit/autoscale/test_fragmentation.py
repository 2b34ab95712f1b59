"""Fragmented replicas are restarted at most once an hour, one at a time, only in a calm fleet, and only on evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api.status import InferenceServiceStatus
from fleetkeeper.api.types import BatchingMode, ScalingMode
from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.constants import FRAGMENTED_EVERY_S, FRAGMENTED_S
from fleetkeeper.autoscale.decision import ControlDecision, TickResult
from fleetkeeper.autoscale.memory import ControlMemory, memory_from_status
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.rules.control_breaker import ControlBreaker
from fleetkeeper.autoscale.rules.fragmentation import (
    FragmentationMemory,
    Reading,
    RestartReason,
    RestartView,
    Run,
    decide_fragmentation_restart,
    fragmentation_readings,
    watched,
)
from fleetkeeper.autoscale.rules.load_breaker import LoadBreaker, TierBreaker
from fleetkeeper.autoscale.signals.pod_history import PodTrack, accept
from fleetkeeper.autoscale.signals.samples import Gauges, PodSample
from fleetkeeper.autoscale.types import BreakerState, ControlSettings, PodView
from fleetkeeper.reconcile.status.control import report_to_status
from tests.support.control_cases import NOW, Loop, pod_view, reported_status, sample
from tests.support.lanes import keep_first

PODS = tuple(pod_view(f"chat-{i}") for i in range(3))
CALM = RestartView(enabled=True, replicas=3, recommended=3, pods=PODS)
LONG = Run(NOW - FRAGMENTED_S, NOW, 0.4)
DUE = FragmentationMemory({"chat-1": LONG})


def decided(view: RestartView, memory: FragmentationMemory) -> tuple[str, str]:
    """The reason, and the pod that goes or an empty string."""
    decision, _ = decide_fragmentation_restart(view, memory, NOW)
    assert decision.valid == bool(decision.value)
    return decision.reason, "".join(decision.value)


# -- one decision -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, RestartReason.FRAGMENTED),
        ({"enabled": False}, RestartReason.OFF),
        ({"replicas": 1, "recommended": 1, "pods": PODS[:1]}, RestartReason.ONLY_REPLICA),
        ({"replicas": 2, "recommended": 2, "pods": PODS[:2]}, RestartReason.FRAGMENTED),
        ({"rolling_out": True}, RestartReason.ROLLING_OUT),
        ({"replacing": True}, RestartReason.REPLACING),
        ({"recommended": 2}, RestartReason.CHANGING),
        ({"recommended": 4}, RestartReason.CHANGING),
        ({"in_effect": False}, RestartReason.CHANGING),
        ({"pods": PODS[:2]}, RestartReason.CHANGING),
        ({"pods": (*PODS, pod_view("chat-3"))}, RestartReason.CHANGING),
        ({"pods": (*PODS[:2], replace(PODS[2], deleting=True))}, RestartReason.CHANGING),
        ({"pods": (*PODS, replace(PODS[2], name="old", deleting=True))}, RestartReason.CHANGING),
        ({"breakers_closed": False}, RestartReason.BREAKER),
        ({"needed": "2 requests wait"}, RestartReason.NO_SPARE_CAPACITY),
    ],
    ids=str,
)
def test_a_replica_is_restarted_only_when_nothing_objects(
    change: dict[str, object], reason: RestartReason
) -> None:
    """Everything else that moves, or is not well, comes first."""
    got, pod = decided(replace(CALM, **change), DUE)  # type: ignore[arg-type]
    assert got == reason
    assert pod == ("chat-1" if reason is RestartReason.FRAGMENTED else "")


@pytest.mark.parametrize(
    ("runs", "pod"),
    [
        ({}, ""),
        ({"chat-0": Run(NOW - 599.9, NOW, 0.9)}, ""),
        ({"chat-0": Run(NOW - 600.0, NOW, 0.31)}, "chat-0"),
        ({"chat-0": Run(NOW - 600.0, NOW, 0.31), "chat-2": Run(NOW - 700, NOW, 0.5)}, "chat-2"),
        ({"chat-2": LONG, "chat-1": LONG}, "chat-1"),
        ({"chat-0": Run(NOW - 300.0, NOW, 0.9), "chat-2": LONG}, "chat-2"),
    ],
)
def test_the_most_fragmented_of_those_that_are_due_goes(runs: dict[str, Run], pod: str) -> None:
    """Ten minutes by the samples' own times; never two at once."""
    reason, chosen = decided(CALM, FragmentationMemory(runs))
    assert chosen == pod
    assert reason == (RestartReason.FRAGMENTED if pod else RestartReason.NONE)


@pytest.mark.parametrize(
    ("ago_s", "goes"), [(0.0, False), (3599.0, False), (3600.0, True), (-86_400.0, False)]
)
def test_one_an_hour(ago_s: float, goes: bool) -> None:
    """Also when the clock was set back."""
    memory = replace(DUE, restarted=NOW - ago_s)
    decision, after = decide_fragmentation_restart(CALM, memory, NOW)
    assert decision.valid is goes
    assert decision.reason == (RestartReason.FRAGMENTED if goes else RestartReason.PACE)
    assert after.restarted == (NOW if goes else memory.restarted)


def test_the_detail_says_how_much_and_for_how_long() -> None:
    """In words for an event."""
    decision, _ = decide_fragmentation_restart(CALM, DUE, NOW)
    assert all(figure in decision.detail for figure in ("40.0%", "30%", "10 minutes"))


# -- the clock ----------------------------------------------------------------------------------------


def run_after(rows: Sequence[tuple[float, float]]) -> float:
    """For how many seconds a pod is above the limit after readings of (seconds, ratio); -1: it is not."""
    memory = FragmentationMemory()
    for time, ratio in rows:
        memory = watched(memory, [Reading("chat-0", NOW + time, ratio)], enabled=True)
    run = memory.runs.get("chat-0")
    return -1.0 if run is None else run.newest - run.since


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        ([(5.0 * i, 0.4) for i in range(121)], 600.0),
        ([(0, 0.4)], 0.0),
        ([(0, 0.3)], -1.0),
        ([(0, 0.4), (5, 0.3)], -1.0),
        ([(0, 0.4), (5, 0.2), (10, 0.4), (15, 0.4)], 5.0),
        ([(0, 0.4), (15, 0.4)], 15.0),
        ([(0, 0.4), (15.1, 0.4)], 0.0),
        ([(0, 0.4), (16, 0.4), (20, 0.4)], 4.0),
        ([(0, 0.4), (5, 0.4), (5, 0.4), (5, 0.4)], 5.0),
        ([(0, 0.4), (5, 0.0)], -1.0),
    ],
)
def test_the_clock_runs_from_one_sample_to_the_next(
    rows: list[tuple[float, float]], seconds: float
) -> None:
    """One sample at 30% or below, or a gap above three scrapes, and it begins anew."""
    assert run_after(rows) == pytest.approx(seconds)


def test_a_tick_without_a_reading_ends_the_run() -> None:
    """Whatever the reason: the replica is silent, young, stale, or gone."""
    held = FragmentationMemory({"chat-0": LONG, "chat-1": LONG})
    after = watched(held, [Reading("chat-1", NOW + 5, 0.4)], enabled=True)
    assert set(after.runs) == {"chat-1"}
    assert watched(after, [], enabled=True).runs == {}


def test_nothing_is_watched_while_it_is_off() -> None:
    """Switched on, the ten minutes begin; the hour is kept."""
    held = FragmentationMemory({"chat-0": LONG}, restarted=NOW - 60)
    after = watched(held, [Reading("chat-0", NOW + 5, 0.9)], enabled=False)
    assert after == FragmentationMemory({}, restarted=NOW - 60)


def ratio_sample(time: float, pod: str, ratio: float, **gauges: float) -> PodSample:
    """A sample of a replica with little to do."""
    held = Gauges(
        running=4.0,
        limit_sequences=32.0,
        limit_tokens=1024.0,
        kv_capacity_tokens=400_000.0,
        kv_resident_tokens=40_000.0,
        memory_peak_ratio=0.75,
        memory_fragmentation_ratio=ratio,
    )
    return sample(time, pod, gauges=held._replace(**gauges))


def tracked(rows: Sequence[PodSample]) -> PodTrack:
    """A track that took these samples, each when it came."""
    track = PodTrack("chat-0")
    for row in rows:
        track = accept(track, row, 0.0, row.time)
    return track


WELL = [ratio_sample(NOW + 5 * i, "chat-0", 0.4) for i in range(4)]


@pytest.mark.parametrize(
    ("rows", "pod", "at_s", "count"),
    [
        (WELL, PODS[0], 15.0, 1),
        (WELL, PODS[0], 30.0, 1),
        (WELL, PODS[0], 30.1, 0),
        ([], PODS[0], 0.0, 0),
        (WELL[:1], PODS[0], 0.0, 0),
        (WELL, pod_view("chat-0", age_s=30), 15.0, 0),
        (WELL, replace(PODS[0], ready=False, ready_since=None), 15.0, 0),
        (WELL, replace(PODS[0], deleting=True), 15.0, 0),
        (WELL, pod_view("chat-9"), 15.0, 0),
        ([*WELL, ratio_sample(NOW + 20, "chat-0", math.nan)], PODS[0], 20.0, 0),
        ([*WELL, ratio_sample(NOW + 20, "chat-0", -0.1)], PODS[0], 20.0, 0),
        ([*WELL, ratio_sample(NOW + 20, "chat-0", math.inf)], PODS[0], 20.0, 0),
        ([*WELL, ratio_sample(NOW + 20, "chat-0", 1.2)], PODS[0], 20.0, 0),
        ([*WELL, ratio_sample(NOW + 20, "chat-0", 0.4, running=math.nan)], PODS[0], 20.0, 0),
        ([*WELL, replace(WELL[0], time=NOW + 20)], PODS[0], 20.0, 0),
        ([*WELL[:3], replace(WELL[3], missing=("fleetkeeper_steps_total",))], PODS[0], 15.0, 0),
    ],
    ids=[
        "well",
        "15 s old",
        "older",
        "nothing",
        "one sample",
        "young",
        "not ready",
        "leaving",
        "another pod",
        "NaN",
        "negative",
        "infinite",
        "above one",
        "another gauge is NaN",
        "engine restarted",
        "metrics missing",
    ],
)
def test_only_fresh_and_believed_samples_of_grown_replicas_are_read(
    rows: list[PodSample], pod: PodView, at_s: float, count: int
) -> None:
    """Never judged on too little."""
    readings = fragmentation_readings({"chat-0": tracked(rows)}, [pod], NOW + at_s)
    assert len(readings) == count
    assert all(0.0 <= reading.ratio <= 1.0 for reading in readings)


# -- a service, tick by tick ----------------------------------------------------------------------------

ON = ControlSettings(min_replicas=3, max_replicas=3, restart_fragmented=True)


@dataclass
class Fleet:
    """A service with little to do, whose replicas have these ratios; what was restarted, and when."""

    loop: Loop
    ratios: dict[str, float] = field(default_factory=dict)
    restarts: list[tuple[float, str]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, settings: ControlSettings = ON, replicas: int = 3, memory: ControlMemory | None = None
    ) -> Fleet:
        """With `chat-1` at 40%, the others at 5%."""
        loop = Loop(settings=settings, replicas=replicas, memory=memory or ControlMemory())
        return cls(loop, {pod.name: 0.05 for pod in loop.pods} | {"chat-1": 0.4})

    def rows(self) -> list[PodSample]:
        """Samples of now."""
        return [
            ratio_sample(
                self.loop.now,
                pod.name,
                self.ratios[pod.name],
                limit_generation=self.loop.generation,
            )
            for pod in self.loop.pods
            if pod.ready
        ]

    def tick(
        self, spoil: Callable[[list[PodSample]], list[PodSample]] = list, **inputs: Any
    ) -> tuple[ControlDecision, TickResult]:
        """One tick, told and concluded."""
        now = self.loop.now
        decision = self.loop.tick(spoil(self.rows()), put_outcomes=self.loop.outcomes, **inputs)
        report, self.loop.memory = build_report(
            decision, Allocation(decision.want.replicas), self.loop.memory, now
        )
        self.restarts += [(now - NOW, pod) for pod in decision.replace_pods]
        events = [*decision.events, *(r.event for r in decision.replace_pods.values())]
        self.told += [n.message for n in events if n.reason == "EngineFragmented"]
        return decision, report

    def run(self, seconds: float, **inputs: Any) -> tuple[ControlDecision, TickResult]:
        """Ticks of 5 s."""
        for _ in range(round(seconds / 5)):
            last = self.tick(**inputs)
        return last


@pytest.mark.slow
def test_a_fragmented_replica_is_restarted_after_ten_minutes_and_told() -> None:
    """An event in plain words, an entry in the status, and not again for an hour though the figure stays."""
    fleet = Fleet.of()
    fleet.run(500)
    assert fleet.restarts == []
    _, report = fleet.run(200)
    assert [pod for _, pod in fleet.restarts] == ["chat-1"]
    assert 600 <= fleet.restarts[0][0] <= 625
    (told,) = fleet.told
    assert "chat-1 is drained" in told
    assert "40.0%" in told
    row = reported_status(report.report)["decisions"][-1]
    assert (row["what"], row["to"], row["reason"]) == ("restart", "chat-1", "EngineFragmented")
    InferenceServiceStatus.model_validate(report_to_status(report.report))
    fleet.run(7200)
    times = [time for time, _ in fleet.restarts]
    assert len(times) == 3
    assert all(b - a >= FRAGMENTED_EVERY_S for a, b in pairwise(times))


def test_the_worst_ratio_and_the_reason_are_gauges() -> None:
    """Where the spec asks for restarts; elsewhere the engines' own metric tells."""
    fleet = Fleet.of()
    _, report = fleet.run(60)
    gauges = {(name, labels): value for name, labels, value in report.metrics}
    assert gauges["signal_fragmentation_ratio", ()] == 0.4
    assert gauges["decision_restart", (("reason", "NoneFragmented"),)] == 0.0
    _, report = Fleet.of(replace(ON, restart_fragmented=False)).run(60)
    names = {name for name, _, _ in report.metrics}
    assert names.isdisjoint({"signal_fragmentation_ratio", "decision_restart"})


def test_a_held_restart_is_quiet() -> None:
    """The only replica stays; nothing in the status moves, nobody is told, the reason is a gauge."""
    fleet = Fleet.of(replace(ON, min_replicas=1, max_replicas=1), replicas=1)
    fleet.ratios["chat-0"] = 0.9
    _, first = fleet.run(1200)
    for _ in range(200):
        decision, report = fleet.tick()
        assert report.report == first.report
    assert decision.restart.reason == RestartReason.ONLY_REPLICA
    assert fleet.restarts == []
    assert fleet.told == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        replace(ON, scaling_mode=ScalingMode.ADVISORY),
        replace(ON, batching_mode=BatchingMode.ADVISORY),
        replace(ON, paused=True),
    ],
    ids=["scaling Advisory", "batching Advisory", "paused"],
)
def test_advisory_tells_and_does_nothing(settings: ControlSettings) -> None:
    """At the same pace, in the conditional, and no entry among what was changed."""
    fleet = Fleet.of(settings)
    _, report = fleet.run(4800)
    assert fleet.restarts == []
    assert len(fleet.told) == 2
    assert all("would be drained and restarted" in text for text in fleet.told)
    assert not [
        row for row in reported_status(report.report)["decisions"] if row["what"] == "restart"
    ]


@pytest.mark.parametrize(
    ("settings", "inputs"),
    [
        (ON, {"rolling_out": True}),
        (ON, {"prometheus_lost": True}),
        (ON, {"allocated_replicas": 2}),
        (replace(ON, pinned_replicas=2), {}),
        (replace(ON, restart_fragmented=False), {}),
        (replace(ON, min_replicas=4, max_replicas=4), {}),
    ],
    ids=str,
)
def test_no_restart_while_anything_else_is_under_way(
    settings: ControlSettings, inputs: dict[str, object]
) -> None:
    """A roll-out, a lost Prometheus, an order that is not in effect, a pin, off, a bound."""
    fleet = Fleet.of(settings)
    fleet.run(3000, **inputs)
    assert fleet.restarts == []


def stuck_since(time: float) -> Callable[[list[PodSample]], list[PodSample]]:
    """One replica has work, has made no step since this time, and says that it hangs."""
    held = sample(time, "chat-2").counters

    def spoil(rows: list[PodSample]) -> list[PodSample]:
        return [
            replace(row, counters=held, gauges=row.gauges._replace(hung=1.0))
            if row.pod == "chat-2"
            else row
            for row in rows
        ]

    return spoil


def test_another_remedy_in_the_same_tick_comes_first() -> None:
    """Out of memory, or an engine that hangs: never two replicas at once."""
    calm = Fleet.of()
    calm.run(900)
    due_s = calm.restarts[0][0]
    full = Fleet.of()
    full.run(due_s)
    decision, _ = full.tick(out_of_memory_pods=("chat-2",))
    assert decision.restart.reason == RestartReason.REPLACING
    hanging = Fleet.of()
    hanging.run(due_s - 50)
    stuck = stuck_since(hanging.loop.now)
    for _ in range(14):
        decision, _ = hanging.tick(stuck)
    assert decision.signals.hung_pods == ("chat-2",)
    assert [pod for _, pod in hanging.restarts] == ["chat-2"]
    assert full.restarts == []


OPEN_TIER = TierBreaker(BreakerState.OPEN, NOW + 1e6, admit=0.0, reason="test")


@pytest.mark.parametrize("acts", [True, False], ids=["acting", "reporting"])
@pytest.mark.parametrize("which", ["control", "half-open", "load"])
def test_no_restart_while_a_breaker_is_not_closed(which: str, acts: bool) -> None:
    """Also where breakers only report: something is not well."""
    fleet = Fleet.of(replace(ON, breakers_act=acts))
    fleet.run(595)
    seen = 0
    for _ in range(60):
        memory = fleet.loop.memory
        if which == "load":
            breakers = replace(memory.breakers, load=LoadBreaker(batch=OPEN_TIER))
        else:
            state = BreakerState.OPEN if which == "control" else BreakerState.HALF_OPEN
            opened = ControlBreaker(state, fleet.loop.now, "Oscillating", "test", 120.0)
            breakers = replace(memory.breakers, control=opened)
        fleet.loop.memory = replace(memory, breakers=breakers)
        decision, _ = fleet.tick()
        is_open = not (decision.breakers.load.is_closed and decision.breakers.control.is_closed)
        seen += is_open
        assert not (is_open and decision.replace_pods)
    assert seen > 50
    assert fleet.restarts == []


def spoil_one(**gauges: float) -> Callable[[list[PodSample]], list[PodSample]]:
    """The fragmented replica's sample with other gauges."""

    def spoil(rows: list[PodSample]) -> list[PodSample]:
        return [
            replace(row, gauges=row.gauges._replace(**gauges)) if row.pod == "chat-1" else row
            for row in rows
        ]

    return spoil


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: [row for row in rows if row.pod != "chat-1"],
        lambda rows: [replace(row, time=row.time - 40) for row in rows],
        spoil_one(memory_fragmentation_ratio=math.nan),
        spoil_one(memory_fragmentation_ratio=math.inf),
        spoil_one(memory_fragmentation_ratio=7.0),
        spoil_one(memory_fragmentation_ratio=0.0),
    ],
    ids=["missing", "stale", "NaN", "infinite", "above one", "not exported"],
)
def test_one_spoilt_look_begins_the_ten_minutes_anew(
    spoil: Callable[[list[PodSample]], list[PodSample]],
) -> None:
    """Every nine minutes 30 s without good samples: never a restart, though all others say 40%."""
    fleet = Fleet.of()
    for _ in range(8):
        fleet.run(540)
        for _ in range(6):
            fleet.tick(spoil)
    assert fleet.restarts == []
    fleet.run(900)
    assert len(fleet.restarts) == 1


def test_engines_that_do_not_export_it_are_never_restarted() -> None:
    """CPU engines: the figure is 0."""
    fleet = Fleet.of()
    fleet.ratios = dict.fromkeys(fleet.ratios, 0.0)
    decision, _ = fleet.run(1800)
    assert decision.restart.reason == RestartReason.NONE
    assert fleet.restarts == []


def test_a_busy_fleet_is_left_alone() -> None:
    """Those who stay could not carry what runs: the same test as for a step down."""
    fleet = Fleet.of()

    def busy(rows: list[PodSample]) -> list[PodSample]:
        return [replace(row, gauges=row.gauges._replace(running=27.0)) for row in rows]

    for _ in range(300):
        decision, _ = fleet.tick(busy)
    assert decision.restart.reason == RestartReason.NO_SPARE_CAPACITY
    assert fleet.restarts == []


@pytest.mark.slow
def test_a_new_leader_waits_a_full_hour() -> None:
    """Whatever the status says: the one before may have restarted a replica in its last second."""
    before = Fleet.of()
    _, report = before.run(700)
    assert len(before.restarts) == 1
    memory = memory_from_status(
        {**reported_status(report.report), "observedGeneration": 1}, 1, 80, NOW
    )
    after = Fleet.of(memory=memory)
    after.run(3600)
    assert after.restarts == []
    after.run(60)
    assert [pod for _, pod in after.restarts] == ["chat-1"]


# -- properties -----------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a replica showed in the last ten minutes, kept apart from the code under test."""

    rows: list[tuple[float, float]] = field(default_factory=list)

    def is_proven(self, now: float) -> bool:
        """Whether samples without a gap above 15 s cover ten minutes and are all above 30%."""
        wanted = [row for row in self.rows if row[0] >= now - FRAGMENTED_S - 20]
        times = [time for time, _ in wanted]
        while len(wanted) > 1 and times[-1] - times[1] >= FRAGMENTED_S:
            wanted, times = wanted[1:], times[1:]
        gaps = [b - a for a, b in pairwise(times)]
        return (
            bool(times)
            and times[-1] - times[0] >= FRAGMENTED_S
            and max(gaps) <= 15.0
            and all(0.3 < ratio <= 1.0 for _, ratio in wanted)
        )


@pytest.mark.parametrize("seed", keep_first(1, range(3), pytest.mark.exhaustive))
def test_at_most_one_an_hour_on_proof_in_a_day_of_random_ticks(seed: int) -> None:
    """Ratios that wander, gaps, modes and troubles: every restart is alone, proven, and an hour from the last."""
    random = Random(seed)
    memory, restarts = FragmentationMemory(), list[float]()
    ratios = {pod.name: random.uniform(0.1, 0.6) for pod in PODS}
    seen = {pod.name: Seen() for pod in PODS}
    trouble, enabled, left = "", True, 0
    for tick in range(17_280):
        now = NOW + 5 * tick
        if left == 0:
            trouble = random.choice(["", "", "", "", "breaker", "rolling", "scaling", "needed"])
            enabled, left = random.random() < 0.9, random.randint(1, 300)
        left -= 1
        readings = []
        for pod, ratio in ratios.items():
            ratios[pod] = min(0.9, max(0.0, ratio + random.gauss(0, 0.002)))
            if random.random() < 0.002:
                ratios[pod] = random.choice([0.1, 0.5])
            if random.random() < 0.99:
                readings.append(Reading(pod, now - 1, ratios[pod]))
                seen[pod].rows.append((now - 1, ratios[pod]))
        view = replace(
            CALM,
            enabled=enabled,
            breakers_closed=trouble != "breaker",
            rolling_out=trouble == "rolling",
            recommended=2 if trouble == "scaling" else 3,
            needed="busy" if trouble == "needed" else "",
        )
        memory = watched(memory, readings, enabled=enabled)
        decision, memory = decide_fragmentation_restart(view, memory, now)
        if not decision.valid:
            continue
        (pod,) = decision.value
        assert enabled
        assert not trouble
        assert seen[pod].is_proven(now)
        assert not restarts or now - restarts[-1] >= FRAGMENTED_EVERY_S
        restarts.append(now)
        ratios[pod] = 0.1
    assert 1 <= len(restarts) <= 24, "it must also be able to act"


SPOILS: dict[str, Callable[[list[PodSample]], list[PodSample]]] = {
    "well": list,
    "nothing": lambda rows: rows[:0],
    "half": lambda rows: rows[: len(rows) // 2],
    "stale": lambda rows: [replace(row, time=row.time - 120) for row in rows],
    "nan": lambda rows: [
        replace(row, gauges=row.gauges._replace(memory_fragmentation_ratio=math.nan))
        for row in rows
    ],
    "future": lambda rows: [replace(row, time=row.time + 3600) for row in rows],
    "gone back": lambda rows: [sample(row.time, row.pod, origin=row.time - 1) for row in rows],
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_restart_on_missing_data_or_of_the_last_replica_in_random_hours(seed: int) -> None:
    """The whole loop, with silence and garbage of every kind, restarted pods and new leaders."""
    random = Random(seed)
    pods = 1 if seed == 0 else random.randint(2, 3)
    settings = replace(ON, min_replicas=pods, max_replicas=pods)
    fleet = Fleet.of(settings, replicas=pods)
    fleet.ratios = dict.fromkeys(fleet.ratios, 0.5)
    kind, left, made, began = "well", 200, pods, NOW - 1e9
    for _ in range(4000):
        if left == 0:
            kind = random.choice([*SPOILS, *["well"] * 9])
            left = random.randint(150, 400) if kind == "well" else random.randint(1, 12)
            if random.random() < 0.03:
                began = fleet.loop.now
                fleet.loop.memory = memory_from_status({}, 1, 80, began)
        left -= 1
        now, count = fleet.loop.now, len(fleet.restarts)
        decision, _ = fleet.tick(SPOILS[kind])
        fresh = fleet.restarts[count:]
        if fresh:
            assert kind == "well"
            assert pods > 1
            assert len(fresh) == 1
            assert now - began >= FRAGMENTED_EVERY_S
            assert decision.signals.coverage == 1.0
            assert decision.breakers.load.is_closed
            assert decision.breakers.control.is_closed
            name = f"chat-{made}"
            stay = [pod for pod in fleet.loop.pods if pod.name != fresh[0][1]]
            fleet.loop.pods = (*stay, pod_view(name, age_s=-120.0, now=now))
            fleet.ratios[name] = 0.5
            made += 1
    times = [time for time, _ in fleet.restarts]
    assert all(b - a >= FRAGMENTED_EVERY_S for a, b in pairwise(times))
    assert bool(times) is (pods > 1)


@given(
    st.lists(
        st.tuples(st.floats(0.1, 60), st.floats(0, 1.5), st.booleans()), min_size=1, max_size=200
    )
)
def test_a_run_is_never_longer_than_its_samples(rows: list[tuple[float, float, bool]]) -> None:
    """Any times and ratios: a run covers only samples above the limit, none further apart than 15 s."""
    memory, now, since = FragmentationMemory(), NOW, None
    last = -math.inf
    for step, ratio, is_read in rows:
        now += step
        readings = [Reading("chat-0", now, ratio)] if is_read else []
        memory = watched(memory, readings, enabled=True)
        if not is_read or ratio <= 0.3:
            since = None
        elif since is None or now - last > 15.0:
            since = now
        last = now
        run = memory.runs.get("chat-0")
        assert (run.since if run else None) == since
