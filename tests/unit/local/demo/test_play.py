"""The play of the demo against a fleet of arithmetic and a clock of its own: each stage ends by its event."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import pytest

from fleetkeeper_local.demo import play as play_module
from fleetkeeper_local.demo.figure import FAULT, LOAD
from fleetkeeper_local.demo.play import Play
from fleetkeeper_local.demo.scenario import VLLM, Scenario
from fleetkeeper_local.load.schedule import Arrival

pytestmark = pytest.mark.exhaustive

ORDER_S, START_S, HANG_S = 20.0, 100.0, 30.0
"""From load that is too much to a second replica, from there until it is ready, from a hang to its end."""


class Clock:
    """Stands in for the module `time`: only sleeping lets it pass."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def time(self) -> float:
        return self.now_s

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass(frozen=True)
class Pod:
    """What the play observes."""

    name: str
    ready: bool = True

    @property
    def identity(self) -> str:
        return self.name


@dataclass
class World:
    """Cluster, operator and fleet: one replica carries `capacity_per_s`, more orders a second."""

    clock: Clock
    capacity_per_s: float
    rate_per_s: float = 0.0
    over_since_s: float | None = None
    frozen: Pod | None = None
    frozen_at_s: float = 0.0
    done: list[str] = field(default_factory=list)
    batch: list[str] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)
    name: str = "tiny"

    def engines(self) -> list[Pod]:
        now_s = self.clock.now_s
        if self.over_since_s is None and self.rate_per_s > self.capacity_per_s:
            self.over_since_s = now_s
        pods = [Pod("a")]
        if self.over_since_s is not None and now_s - self.over_since_s >= ORDER_S:
            pods.append(Pod("b", ready=now_s - self.over_since_s >= ORDER_S + START_S))
        if self.frozen is not None and now_s - self.frozen_at_s >= HANG_S:
            pods = [replace(pod, name=f"{pod.name}2") for pod in pods]
        return pods

    def condition(self, kind: str) -> dict[str, str]:
        assert kind == "MetricsAvailable"
        return {"status": "True"}

    def unpin(self) -> None:
        self.done.append("unpin")

    def submit(self) -> str:
        self.batch.append("submitted")
        return "submitted a batch"

    def record(self, stage: str) -> None:
        self.batch.append(stage)

    def kill_operators(self, _: object) -> int:
        self.done.append("kill")
        return 2

    def freeze_engine(self, _: object, pod: Pod) -> None:
        self.frozen, self.frozen_at_s = pod, self.clock.now_s
        self.done.append("freeze")

    def stop_prometheus(self) -> bool:
        self.done.append("stop Prometheus")
        return True

    def start_prometheus(self) -> None:
        self.done.append("start Prometheus")


def _played(
    monkeypatch: pytest.MonkeyPatch, capacity_per_s: float, scenario: Scenario = VLLM
) -> tuple[Play, World]:
    """A run whose first load is 2 requests a second."""
    clock = Clock()
    world = World(clock, capacity_per_s)

    class Load:
        """Tells the world its mean rate, sends nothing."""

        def __init__(self, _: str, __: str, arrivals: tuple[Arrival, ...], ___: object) -> None:
            self.rate_per_s = len(arrivals) / arrivals[-1].at_s
            world.sent.append([arrival.at_s for arrival in arrivals])
            self.started_at_s = clock.time()

        def start(self) -> Self:
            world.rate_per_s = self.rate_per_s
            return self

        def end(self) -> None:
            world.rate_per_s = 0.0

        def wait(self) -> list[object]:
            return []

    monkeypatch.setattr(play_module, "time", clock)
    monkeypatch.setattr(play_module, "Traffic", Load)
    anything: Any = world  # what it stands in for is a cluster, an installation and a fleet
    play = Play(
        anything,
        anything,
        anything,
        "http://nowhere",
        2.0,
        lambda _: None,
        work=anything,
        scenario=scenario,
    )
    play.run()
    return play, world


def _loads(play: Play) -> list[str]:
    return [span.text for span in play.spans if span.kind == LOAD]


FAULTS = ["unpin", "kill", "freeze", "stop Prometheus", "start Prometheus"]


def test_four_times_the_load_is_enough_where_the_measurement_was_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play, world = _played(monkeypatch, capacity_per_s=6.0)
    assert _loads(play) == ["x1: 2.0/s", "x4: 8.0/s", "x1 again: 2.0/s"]
    assert world.done[: len(FAULTS)] == FAULTS
    assert world.batch == ["x1", "submitted", "x4", "x1 again"]
    faults = {span.text for span in play.spans if span.kind == FAULT}
    assert faults == {"operators killed", "engine frozen", "Prometheus stopped"}


@pytest.mark.parametrize(("capacity_per_s", "last"), [(9.0, "x5: 10.0/s"), (14.0, "x8: 16.0/s")])
def test_the_load_rises_until_a_second_replica_is_ordered(
    monkeypatch: pytest.MonkeyPatch, capacity_per_s: float, last: str
) -> None:
    """Capacity was measured in a slow moment: one replica carries what should have been too much."""
    play, world = _played(monkeypatch, capacity_per_s)
    loads = _loads(play)
    assert loads[:2] == ["x1: 2.0/s", "x4: 8.0/s"]
    assert loads[-2:] == [last, "x1 again: 2.0/s"]
    assert world.done[: len(FAULTS)] == FAULTS
    assert play.ended_at_s is not None
    assert not [moment for moment in play.moments if "skipped" in moment.text]


def test_a_surge_can_rise_from_the_first_load(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = replace(VLLM, surge=(60.0,), ramp_s=300.0)
    play, world = _played(monkeypatch, 100.0, scenario)
    assert _loads(play)[1] == "x60: 120.0/s"
    (shown,) = (moment.text for moment in play.moments if "x60" in moment.text)
    assert shown == "load x60: 120.0 requests/s, reached in 300 s"
    sent = world.sent[1]
    rates = [sum(start <= at_s < start + 20 for at_s in sent) / 20 for start in (0, 150, 300, 350)]
    assert rates == pytest.approx([2.1, 2 * 60**0.55, 120.0, 120.0], rel=0.3)


def test_where_no_load_is_too_much_the_run_ends_and_says_what_was_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a second replica no engine is frozen and no operator killed; Prometheus still goes."""
    play, world = _played(monkeypatch, capacity_per_s=1_000.0)
    assert _loads(play)[-2:] == ["x8: 16.0/s", "x1 again: 2.0/s"]
    assert world.done[:3] == ["unpin", "stop Prometheus", "start Prometheus"]
    left = [moment.text for moment in play.moments if "skipped" in moment.text]
    assert [text.rpartition(": ")[2] for text in left] == ["kill_operators", "freeze"]
