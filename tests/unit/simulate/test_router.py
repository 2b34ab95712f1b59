"""The router of a simulated cluster: whom it knows, whom it chooses, and what it sends again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from statistics import fmean

import pytest

from fleetkeeper.autoscale.signals.samples import Counters
from fleetkeeper.simulate.cluster import Cluster, ColdStart
from fleetkeeper.simulate.engine import H100_8B, Engine, EngineSpec
from fleetkeeper.simulate.requests import Request

T = 1000.0
UNBOUNDED = replace(H100_8B, queue_limits=None)
SMALL = replace(H100_8B, max_sequences=1, queue_limits=(4, 4, 4))
"""One request runs and four of each tier wait."""


def cluster_of(replicas: int, spec: EngineSpec = UNBOUNDED, routers: int = 1) -> Cluster:
    """A cluster with so many pods that all routers know."""
    cluster = Cluster(spec, Random(1), ColdStart(60.0), routers=routers)
    cluster.begin(T, replicas)
    return cluster


def engines_of(cluster: Cluster) -> list[Engine]:
    """The engines of all pods, in the order of their creation."""
    return [pod.engine for pod in cluster.pods.values() if pod.engine is not None]


def tries_of(engine: Engine) -> int:
    """The requests that an engine counted as arrivals."""
    counters = Counters._make(engine.counts.counters)
    return int(counters.arrivals_realtime + counters.arrivals_standard + counters.arrivals_batch)


def send(cluster: Cluster, count: int, now: float = T, tier: int = 1) -> int:
    """Send requests at one time; return how many were accepted."""
    return sum(cluster.route(Request(now, tier, 100, 50)) for _ in range(count))


# -- the choice --------------------------------------------------------------------------------------


def test_the_least_loaded_of_three_draws_with_replacement_is_chosen() -> None:
    """The one of rank i of n is chosen if all draws are of its rank or above, and one of them is it."""
    cluster = cluster_of(4)
    pods = list(cluster.pods.values())
    found: Counter[int] = Counter()
    for _ in range(6400):
        for busy, pod in enumerate(pods):
            pod.under_way[0] = busy
        before = [engine.waiting for engine in engines_of(cluster)]
        assert cluster.route(Request(T, 1, 1, 1))
        after = [engine.waiting for engine in engines_of(cluster)]
        (chosen,) = [n for n in range(4) if after[n] > before[n]]
        found[chosen] += 1
    shares = [found[n] / 6400 for n in range(4)]
    assert shares == pytest.approx([37 / 64, 19 / 64, 7 / 64, 1 / 64], abs=0.02)


def test_a_replica_four_times_as_slow_gets_a_third_of_what_the_others_get() -> None:
    """32 clients send their next request at once, as in the measurement of Envoy before four stand-ins."""
    done: list[Request] = []
    cluster = cluster_of(4)
    cluster.on_end = done.extend
    engines = engines_of(cluster)
    engines[0].slowness = 4.0
    now = T
    send(cluster, 32, now)
    while sum(map(tries_of, engines)) < 4000:
        now += 0.01
        for pod in cluster.pods.values():
            cluster.advance(pod, now)
        send(cluster, len(done), now)
        done.clear()
    slow, *others = map(tries_of, engines)
    assert slow / fmean(others) == pytest.approx(0.3, abs=0.05)


def test_loads_are_exact() -> None:
    """A replica that has just ended its requests is chosen again, however short ago they were sent."""
    cluster = cluster_of(2)
    one, two = cluster.pods.values()
    send(cluster, 40)
    cluster.advance(one, T + 0.2)
    assert one.engine is not None
    assert two.engine is not None
    one.engine.abort_all()
    one.under_way[0] = 0
    before = two.engine.load
    send(cluster, 8, T + 0.2)
    assert two.engine.load <= before + 3


def test_each_router_counts_its_own_requests() -> None:
    """A replica with many requests of one router is empty for the other."""
    cluster = cluster_of(2, routers=2)
    one, two = cluster.pods.values()
    one.under_way[:] = [1000, 0]
    two.under_way[:] = [0, 1000]
    send(cluster, 400)
    grown = [one.under_way[0] - 1000, one.under_way[1], two.under_way[0], two.under_way[1] - 1000]
    assert sum(grown) == 400
    # Each router chooses its busy replica once in eight times, and has half of the requests.
    assert grown == pytest.approx([25, 175, 175, 25], abs=35)


def test_more_routers_balance_worse() -> None:
    """Each knows a part of the requests, so replicas differ more."""

    def spread(routers: int) -> float:
        cluster = cluster_of(8, routers=routers)
        send(cluster, 160)
        loads = [engine.load for engine in engines_of(cluster)]
        assert sum(loads) == 160
        return sum((load - 20) ** 2 for load in loads) / 8

    assert spread(1) <= 2.0
    assert spread(16) >= 2 * spread(1)


def test_the_counts_are_those_of_the_requests_inside() -> None:
    """At any time: after ends, refusals, a crash and a drain."""
    ends: list[Request] = []
    cluster = cluster_of(3, SMALL, routers=2)
    cluster.on_end = cluster.on_lost = ends.extend
    random, now, accepted = Random(5), T, 0
    for step in range(300):
        now += random.expovariate(20.0)
        accepted += send(cluster, 1, now, random.randrange(3))
        if step == 100:
            cluster.crash(0, now)
        if step == 150:
            cluster.scale(2, now)
        if step % 20 == 0:
            cluster.move(now)
        for pod in (*cluster.pods.values(), *cluster.draining):
            cluster.advance(pod, now)
            if pod.engine is not None:
                assert sum(pod.under_way) == pod.engine.load
                assert min(pod.under_way) >= 0
    cluster.finish(now + 600)
    assert len(ends) == accepted


# -- refusals ----------------------------------------------------------------------------------------


def test_a_refused_request_is_sent_to_another_replica() -> None:
    """As long as one has room, no client sees a refusal."""
    cluster = cluster_of(4, SMALL)
    for engine in engines_of(cluster)[1:]:
        for _ in range(4):
            assert engine.arrive(Request(T, 1, 100, 50))
    assert send(cluster, 4) == 4
    assert [engine.waiting for engine in engines_of(cluster)] == [4, 4, 4, 4]
    assert send(cluster, 1) == 0


def test_four_replicas_are_tried_and_no_more() -> None:
    """Each of them counts the request."""
    for replicas, counted in ((6, 4), (4, 4), (2, 2), (1, 1)):
        cluster = cluster_of(replicas, replace(SMALL, queue_limits=(4, 0, 4)))
        assert send(cluster, 10) == 0
        assert sum(map(tries_of, engines_of(cluster))) == 10 * counted


@pytest.mark.parametrize("replicas", [1, 2, 6])
def test_what_a_tier_sheds_is_not_sent_again(replicas: int) -> None:
    """Otherwise four tries of each request would admit three quarters of them, not three tenths."""
    cluster = cluster_of(replicas)
    for engine in engines_of(cluster):
        engine.admit = (1.0, 0.3, 1.0)
    assert send(cluster, 2000) / 2000 == pytest.approx(0.3, abs=0.03)
    assert sum(map(tries_of, engines_of(cluster))) == 2000


# -- what a router knows -----------------------------------------------------------------------------


def test_a_new_replica_gets_requests_a_second_after_it_is_ready() -> None:
    """Before that the other one gets all, and a service without another one refuses."""
    for replicas in (1, 0):
        cluster = cluster_of(replicas)
        cluster.scale(replicas + 1, T)
        cluster.move(T + 60)
        new = list(cluster.pods.values())[-1]
        assert new.engine is not None
        assert send(cluster, 20, T + 60.9) == 20 * replicas
        assert new.engine.load == 0
        assert send(cluster, 40, T + 61) == 40
        assert new.engine.load >= 10


def test_a_replica_that_drains_gets_requests_for_a_second() -> None:
    """It serves them: its notice is longer."""
    lost: list[Request] = []

    def lose(requests: Iterable[Request]) -> None:
        lost.extend(requests)

    cluster = cluster_of(2)
    cluster.on_lost = lose
    cluster.scale(1, T + 2)
    (leaving,) = cluster.draining
    assert leaving.engine is not None
    assert send(cluster, 40, T + 2.9) == 40
    held = leaving.engine.load
    assert held >= 10
    assert send(cluster, 40, T + 3) == 40
    assert leaving.engine.load == held
    for second in range(3, 60):
        cluster.move(T + second)
    assert not cluster.draining
    assert not lost
