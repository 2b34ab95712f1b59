"""Pods of a simulated cluster: starts, drains, crashes, and the HPA on top."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from statistics import median

import pytest

from fleetkeeper.simulate.autoscalers import Hpa
from fleetkeeper.simulate.cluster import Cluster, ColdStart, emptiest
from fleetkeeper.simulate.engine import H100_8B
from fleetkeeper.simulate.requests import Request
from tests.support.autoscale.control_cases import pod_view

T = 1000.0


class Ends:
    """What the cluster hands over."""

    def __init__(self) -> None:
        self.ended: list[Request] = []
        self.lost: list[Request] = []

    def cluster(self, replicas: int, cold_start: ColdStart | None = None) -> Cluster:
        """A cluster with so many ready pods at T."""

        def end(requests: Iterable[Request]) -> None:
            self.ended += requests

        def lose(requests: Iterable[Request]) -> None:
            self.lost += requests

        start = cold_start or ColdStart(60.0)
        cluster = Cluster(H100_8B, Random(1), start, on_end=end, on_lost=lose)
        cluster.begin(T, replicas)
        return cluster


def test_cold_starts_have_their_median_and_their_tail() -> None:
    """Without spread a constant; with it the median stays, and a tenth takes three times as long."""
    assert {ColdStart(60.0).draw(Random(seed)) for seed in range(5)} == {60.0}
    random = Random(1)
    drawn = [ColdStart(60.0, sigma=0.3).draw(random) for _ in range(4000)]
    assert median(drawn) == pytest.approx(60.0, rel=0.03)
    tail = [ColdStart(60.0, tail_ratio=0.1).draw(random) for _ in range(4000)]
    assert set(tail) == {60.0, 180.0}
    assert tail.count(180.0) / len(tail) == pytest.approx(0.1, abs=0.02)


def test_a_pod_is_ready_after_its_cold_start() -> None:
    """Not a second before; it is billed from its creation."""
    cluster = Ends().cluster(1)
    cluster.scale(2, T)
    cluster.move(T + 59)
    assert [view.ready for view in cluster.views()] == [True, False]
    cluster.move(T + 60)
    assert [view.ready for view in cluster.views()] == [True, True]
    cluster.finish(T + 100)
    assert cluster.pod_s == 200.0


def test_a_drained_pod_ends_its_requests_and_is_billed_until_then() -> None:
    """It gets no request any more, and loses none."""
    ends = Ends()
    cluster = ends.cluster(2)
    requests = [Request(T + 2, 1, 500, 400) for _ in range(8)]
    assert all(cluster.route(request) for request in requests)
    cluster.scale(1, T + 3)
    assert len(cluster.draining) == 1
    drained = cluster.draining[0]
    assert drained.engine is not None
    held = drained.engine.load
    assert held > 0
    for _ in range(20):
        assert cluster.route(Request(T + 4, 1, 10, 1))
    assert drained.engine.load == held
    second = T + 3
    while cluster.draining:
        second += 1
        cluster.move(second)
    assert len([row for row in ends.ended if row in requests]) >= held
    assert not ends.lost
    last = drained.engine.time
    assert second - 1 < last <= second
    assert cluster.pod_s == pytest.approx(last - T)


def test_a_crash_loses_the_requests_inside_and_the_container_starts_again() -> None:
    """Every request ends once: answered or lost."""
    ends = Ends()
    cluster = ends.cluster(1)
    requests = [Request(T + 2, 1, 500, 20 if n < 3 else 2000) for n in range(6)]
    assert all(cluster.route(request) for request in requests)
    cluster.crash(0, T + 5)
    assert len(ends.ended) == 3
    assert len(ends.lost) == 3
    assert {*ends.ended, *ends.lost} == set(requests)
    assert not cluster.route(Request(T + 6, 1, 10, 1))
    cluster.move(T + 64)
    assert not cluster.views()[0].ready
    cluster.move(T + 65)
    assert cluster.views()[0].ready
    assert cluster.route(Request(T + 66, 1, 10, 1))


def test_the_hpa_tolerates_a_tenth_doubles_and_waits_five_minutes_to_go_down() -> None:
    """Kubernetes' defaults."""
    cluster, measured = Ends().cluster(2), 0.0
    hpa = Hpa(lambda *_: measured, target=10.0, min_replicas=1, max_replicas=30)

    def after(value: float, second: float) -> int:
        nonlocal measured
        measured = value
        hpa.tick(cluster, T + second)
        return cluster.wanted

    assert after(21.5, 0) == 2, "within a tenth of the target"
    assert after(23.0, 15) == 3
    assert after(900.0, 30) == 7, "four more"
    assert after(900.0, 45) == 14, "twice as many"
    assert after(900.0, 60) == 28
    assert after(900.0, 75) == 30, "the maximum"
    assert after(20.0, 90) == 30
    assert after(20.0, 360) == 30
    assert after(20.0, 391) == 2, "the last high recommendation is older than 300 s"


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
