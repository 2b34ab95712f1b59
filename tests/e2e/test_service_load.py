"""Load that comes and goes: limits and replicas follow it, also while Prometheus is lost.

In this order each test begins where the one before ended; alone each makes its own beginning.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fleetkeeper.autoscale.constants import DIRECT_WHOLE_S
from fleetkeeper_engine.limits import PREFILL_QUANTUM_TOKENS
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.inject import slowed_engine
from fleetkeeper_local.node.node import Node
from tests.support.lanes import keep_first
from tests.support.service_world import (
    HEAVY,
    SCALE_DOWN_DELAY_S,
    await_measured,
    complete,
    failures,
    limits,
    requests_served,
    says,
    steady,
)

pytestmark = pytest.mark.usefixtures("calm_operator")

OVERLOAD_PER_S = 30.0
"""Of longer answers: nearly twice what one replica on 0.8 of a core writes."""
EASY, HARD = {"batchTimeMilliseconds": 60_000}, {"batchTimeMilliseconds": 2}
"""Every step is within the one, none within the other."""
LIGHT_PER_S = 2.0
"""Of short answers: one replica is bored."""
SLOW_CPUS = 0.15
SLOW_AT_ONCE = 24
"""More than the 8 requests of difference below which a prefix decides, not the load."""
SHOWN_S = 60.0
"""The status shows a lost Prometheus within half of this, and so its return; one machine runs all here."""
LOST_S = DIRECT_WHOLE_S + SCALE_DOWN_DELAY_S + 30.0
"""Longer than the loop needs to remove a replica with Prometheus, which the same test shows."""


def test_batch_limits_change_in_running_engines(fleet: Fleet) -> None:
    """By signed orders under load, seen at the engine's control port: no restart, no request lost.

    An objective that no step meets takes them down. Under one that every step meets, waiting requests
    bring them up again.
    """
    await_measured(fleet)
    fleet.until(
        lambda: fleet.status()["breaker"]["control"] == "Closed", "what came before is over"
    )
    before = [pod.identity for pod in fleet.engines()]
    asked = fleet.live()["spec"]
    fleet.change({"breaker": {"mode": "Disabled"}})  # nothing but limits shall answer the load
    try:
        with steady(fleet, OVERLOAD_PER_S, seed=3, shape=HEAVY) as traffic:
            fleet.change({"objectives": EASY})
            floor = limits(fleet.engines()[0])["floor"]
            first = fleet.until(lambda: _moved(fleet, floor, down=False), "an order in force")
            fleet.change({"objectives": HARD})
            low = fleet.until(lambda: _lowered(fleet, first), "lower limits in force")
            fleet.change({"objectives": EASY})
            fleet.until(lambda: _moved(fleet, low, down=False), "higher limits in force")
    finally:
        fleet.change({name: asked[name] for name in ("breaker", "objectives")})
    assert failures(traffic.samples) == []
    assert [pod.identity for pod in fleet.engines()] == before


def _moved(fleet: Fleet, old: tuple[int, int], *, down: bool) -> tuple[int, int] | None:
    """The limits in force once both are at most the old ones and one is less (down), or any is more."""
    now = _in_force(fleet)
    if now is None or now == old:
        return None
    lower = all(value <= was for value, was in zip(now, old, strict=True))
    return now if lower is down else None


def _lowered(fleet: Fleet, first: tuple[int, int]) -> tuple[int, int] | None:
    """The limits in force once a third of the sequences is left: then requests wait, and ask for more."""
    now = _moved(fleet, first, down=True)
    return now if now is not None and now[0] <= first[0] // 3 else None


def _in_force(fleet: Fleet) -> tuple[int, int] | None:
    """The limits that its engine has from the operator and told in the status; None while they move.

    A step may hold more tokens than ordered: as many as what runs and one prefill need to get on.
    """
    now = limits(fleet.engines()[0])
    status = fleet.status()
    assert status["breaker"].get("reason") != "SignalsLost", "another objective is no lost engine"
    batching = status["batching"]
    told = (batching["sequences"], batching["tokens"])
    sequences, tokens = now["effective"]
    most = max(told[1], now["ceiling"][0] + PREFILL_QUANTUM_TOKENS)
    if now["wanted"] != told or sequences != told[0] or not told[1] <= tokens <= most:
        return None
    for floor, value, ceiling in zip(now["floor"], told, now["ceiling"], strict=True):
        assert floor <= value <= ceiling
    return told


def test_load_raises_replicas(fleet: Fleet) -> None:
    """More than one replica carries: the loop orders another, says why, and it takes its share."""
    await_measured(fleet)
    (old,) = fleet.engines()
    fleet.change({"replicas": None})
    with steady(fleet, OVERLOAD_PER_S, seed=4, shape=HEAVY) as flood:
        fleet.until(lambda: fleet.status()["scaling"]["desired"] == 2, "the order")
        fleet.until(lambda: says(fleet, "Replicas 1 -> 2: "), "the event")
    # The new one starts on the cores that the flood took; until it is a minute old none is taken away.
    with steady(fleet, LIGHT_PER_S, seed=13) as traffic:
        fleet.await_ready(2)
        fleet.until(lambda: all(requests_served(fleet).values()), "requests at the new replica")
    assert failures([*flood.samples, *traffic.samples]) == []
    assert old.identity in [pod.identity for pod in fleet.engines()]


def test_sessions_stick_to_their_replica(pair: Fleet) -> None:
    """Each session's requests all reach one replica, and sessions spread over both."""
    homes = set()
    url = pair.base_url()
    for session in range(8):
        before = requests_served(pair)
        for _ in range(4):
            complete(url, "tiny", tokens=2, logprobs=None, **{"X-Session-ID": f"session-{session}"})
        after = requests_served(pair)
        gained = {name: after[name] - before[name] for name in after if after[name] > before[name]}
        assert list(gained.values()) == [4], (session, gained)
        homes |= set(gained)
    assert len(homes) == 2


def test_prompts_with_the_same_beginning_stay_on_one_replica(pair: Fleet) -> None:
    """With PrefixAware; different beginnings spread over both, and no engine restarts."""
    asked = pair.live()["spec"]["routing"]
    before = [pod.identity for pod in pair.engines()]
    _route(pair, {"policy": "PrefixAware"})
    try:
        beginnings = [f"Topic {n}. " + f"{n} is what this text is about. " * 12 for n in range(6)]
        # A new beginning goes to the least loaded replica, so they come at the same time.
        with ThreadPoolExecutor(len(beginnings)) as pool:
            list(pool.map(lambda text: _ask(pair, text, tokens=64), beginnings))
        homes = set()
        for beginning in beginnings:
            served = requests_served(pair)
            for question in range(5):
                _ask(pair, f"{beginning}Question {question}", tokens=2)
            after = requests_served(pair)
            gained = {pod: after[pod] - served[pod] for pod in after if after[pod] > served[pod]}
            assert list(gained.values()) == [5], (beginning[:10], gained)
            homes |= set(gained)
        assert len(homes) == 2
    finally:
        _route(pair, {"policy": asked["policy"]})
    assert [pod.identity for pod in pair.engines()] == before


@pytest.mark.parametrize(
    "policy", keep_first(1, ("LeastLoaded", "PrefixAware"), pytest.mark.exhaustive)
)
def test_a_slow_replica_gets_fewer_requests(pair: Fleet, policy: str) -> None:
    """With a fifth of its CPU it answers later; the router counts what it has not answered."""
    asked = pair.live()["spec"]["routing"]
    _route(pair, {"policy": policy})
    slow, fast = pair.engines()
    try:
        with slowed_engine(slow, SLOW_CPUS):
            before = requests_served(pair)
            with ThreadPoolExecutor(SLOW_AT_ONCE) as pool:
                list(pool.map(lambda n: _ask(pair, f"{n} of ninety", tokens=32), range(90)))
            after = requests_served(pair)
    finally:
        _route(pair, {"policy": asked["policy"]})
    gained = {name: after[name] - before[name] for name in after}
    print(f"{policy}: {gained[slow.name]:.0f} of 90 at the slow replica")
    assert gained[slow.name] + gained[fast.name] == 90
    assert gained[slow.name] <= gained[fast.name] / 2
    assert {pod.identity for pod in pair.engines()} == {slow.identity, fast.identity}


def _ask(fleet: Fleet, prompt: str, tokens: int) -> None:
    complete(fleet.base_url(), "tiny", prompt=prompt, tokens=tokens)


def _route(fleet: Fleet, routing: dict[str, str]) -> None:
    """Change the routing, and return when only routers with it are left."""
    old = {pod.uid for pod in fleet.pods("router")}
    fleet.change({"routing": routing})
    fleet.until(
        lambda: (
            all(pod.ready and pod.uid not in old for pod in fleet.pods("router"))
            and fleet.is_ready()
        ),
        "routers with the new policy",
    )


def test_a_lost_prometheus_takes_no_replica_away_and_its_return_lets_them_fall(
    pair: Fleet, node: Node
) -> None:
    """Replicas are read directly while Prometheus is lost: the loop decides on, but never lowers.

    Once the loop reads Prometheus again, one replica goes sooner than the loop was watched before; no
    request is lost.
    """
    await_measured(pair)
    before = [pod.identity for pod in pair.engines()]

    def source() -> str:
        return str(pair.status()["breaker"]["source"])

    with steady(pair, LIGHT_PER_S, seed=11) as traffic:
        node.processes.stop(["prometheus"])
        lost = time.monotonic()
        try:
            pair.until(lambda: source() == "Open", "the breaker opens")
            assert time.monotonic() - lost < SHOWN_S
            pair.until(lambda: says(pair, "Prometheus", "PrometheusLost"), "the event")
            available = pair.condition("MetricsAvailable")
            assert (available["status"], available["reason"]) == ("True", "FreshMetrics")
            assert "read directly" in available["message"]
            pair.change({"replicas": None})  # the loop decides from here on, and one is enough
            _assert_stays_at_two(pair, LOST_S)
        finally:
            node.up()
        back = time.monotonic()
        pair.until(lambda: source() == "Closed", "the breaker closes")
        closed = time.monotonic()
        assert closed - back < SHOWN_S
        assert [pod.identity for pod in pair.engines()] == before
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


def _assert_stays_at_two(fleet: Fleet, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        deployed = fleet.kubectl("get", "deployment", "tiny", "-o", "jsonpath={.spec.replicas}")
        assert (fleet.status()["scaling"]["desired"], deployed) == (2, "2")
        time.sleep(1.0)
