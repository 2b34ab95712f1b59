"""Changes of a running gateway on a real node: keys, another Redis, anonymous mode, and its removal."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fleetkeeper_local.common.report import say
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.demo import front_door
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.front_door import Answer, FrontDoor
from fleetkeeper_local.demo.installation import GATEWAY, Installation
from tests.support.node.gateway_load import SteadyLoad
from tests.support.node.node_world import until
from tests.support.node.own_redis import OwnRedis, own_redis
from tests.support.node.service_world import (
    await_operators,
    gateway_pods,
    identities,
    metrics,
    ordered,
)

CHANGED = "changed"
IN_FORCE_S = 2.0
ANONYMOUS_BATCH = 5
"""Requests of the tier batch a minute, of all clients without a key."""

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("calm_operator")]


@pytest.fixture(scope="module")
def redis(product: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRedis]:
    """A Redis of the user, with TLS and a password."""
    image = product.values["gateway"]["redis"]["image"]
    folder = tmp_path_factory.mktemp("redis")
    with own_redis(product.cluster, product.namespace, image, folder) as found:
        yield found


@pytest.fixture(scope="module")
def rollout(
    shared_fleet: Fleet, door: FrontDoor, product: Installation, redis: OwnRedis
) -> Iterator[SteadyLoad]:
    """The load during a rollout to that Redis and to anonymous mode, which is undone afterwards."""
    fleet = ordered(shared_fleet, 1)
    anonymous = {"enabled": True, "requestsPerMinute": f"batch={ANONYMOUS_BATCH}"}
    gateway = {**product.values["gateway"], "redis": redis.values, "anonymous": anonymous}
    key = door.create_key("rollout", fleet.namespace, "--requests-per-minute=100000")
    old = {pod.uid for pod in gateway_pods(product)}
    try:
        with SteadyLoad(door, key, fleet.name) as load:
            load.await_more("before the rollout")
            began = time.monotonic()
            Installation(product.cluster, {**product.values, "gateway": gateway}).install()
            until(
                lambda: old.isdisjoint(pod.uid for pod in gateway_pods(product)),
                "the old replicas are gone",
            )
            load.await_more("after it")
        say(f"rollout: {len(load.answers)} answers, {time.monotonic() - began:.0f} s")
        yield load
    finally:
        product.install(product.values)


def test_a_change_of_a_key_is_in_force_within_two_seconds(
    door: FrontDoor, product: Installation, cluster: ControlPlane
) -> None:
    """At each replica. Other load of the machine delays it, so the best of three tries counts."""
    key = door.create_key(CHANGED, "elsewhere")
    taken: list[float] = []
    while len(taken) < 3 and min(taken, default=math.inf) >= IN_FORCE_S:
        newer = door.command("keys", "rotate", CHANGED)
        accepted = _seconds_until(product, door, newer, 200)
        refused = _seconds_until_refused(product, door, cluster, key)
        say(f"a new key is accepted {accepted:.2f} s after the command has ended")
        say(f"an old key is refused at most {refused:.2f} s after its Secret has changed")
        taken.append(max(accepted, refused))
        key = newer
    assert min(taken) < IN_FORCE_S, taken


def _seconds_until(product: Installation, door: FrontDoor, key: str, status: int) -> float:
    """Return how long it takes from now until each replica answers a key with a status."""
    began = time.monotonic()
    urls = [f"http://{pod.ip}:8080" for pod in gateway_pods(product)]
    until(lambda: all(door.models(key, url=url).status == status for url in urls), str(status))
    return time.monotonic() - began


def _seconds_until_refused(
    product: Installation, door: FrontDoor, cluster: ControlPlane, key: str
) -> float:
    """Finish a rotation; return at most how long the old key was accepted after the Secret changed."""
    path = f"/api/v1/namespaces/{front_door.KEYS_NAMESPACE}/secrets/{CHANGED}"
    unchanged: list[float] = []

    def written() -> bool:
        looked = time.monotonic()
        secret = cluster.get(path)
        assert secret is not None
        if "," in base64.b64decode(secret["data"]["sha256"]).decode():
            unchanged.append(looked)
            return False
        return True

    with ThreadPoolExecutor(max_workers=1) as pool:
        command = pool.submit(door.command, "keys", "rotate", CHANGED, "--finish")
        until(written, "the Secret has one digest")
        _seconds_until(product, door, key, 401)
        took = time.monotonic() - unchanged[-1]
        command.result()
    return took


def test_a_rollout_fails_no_request(rollout: SteadyLoad) -> None:
    """Each replica is replaced, and the Redis of the old ones is removed meanwhile."""
    assert rollout.failures == []


def test_anonymous_mode_needs_no_key_and_no_right_on_secrets(
    rollout: SteadyLoad, shared_fleet: Fleet, door: FrontDoor, product: Installation
) -> None:
    """All clients together have its limits."""
    del rollout
    assert shared_fleet.name in str(door.models("made-up").body["data"])
    sent = 0
    while _code(_batch(door, shared_fleet)) != "rate_limit_exceeded":
        sent += 1
        assert sent < 10 * ANONYMOUS_BATCH
    assert sent >= ANONYMOUS_BATCH
    roles = ("-n", front_door.KEYS_NAMESPACE, "get", "roles,rolebindings", "-o", "name")
    assert f"{GATEWAY}-keys" not in product.cluster.kubectl(*roles)


def test_limits_are_shared_through_a_redis_with_tls_and_a_password(
    rollout: SteadyLoad,
    shared_fleet: Fleet,
    door: FrontDoor,
    product: Installation,
    redis: OwnRedis,
) -> None:
    """Of replicas and of the usage process, which settles there."""
    del rollout
    assert _batch(door, shared_fleet).status in {200, 429}
    until(lambda: _shared(product) == [1.0, 1.0, 1.0], f"limits are shared: {_shared(product)}")
    names = redis.keys()
    assert any("anonymous" in name for name in names), names


def _shared(product: Installation) -> list[float]:
    """Return what each process says about its limits."""
    return [
        metrics(pod, port)["fleetkeeper_gateway_limits_shared"]
        for component, port in (("gateway", 8081), ("gateway-usage", 8082))
        for pod in gateway_pods(product, component)
    ]


def _batch(door: FrontDoor, fleet: Fleet) -> Answer:
    """Ask without a key, with the tier that has a limit."""
    return door.complete("made-up", fleet.name, **{"X-Inference-Tier": "batch"})


def _code(answer: Answer) -> str:
    """Return the code of an error; empty for an answer."""
    return str((answer.body.get("error") or {}).get("code", ""))


@pytest.mark.exhaustive
def test_the_gateway_goes_and_comes_back_with_its_keys(
    shared_fleet: Fleet, door: FrontDoor, product: Installation
) -> None:
    """The namespace of the keys stays, and no engine and no router restarts for either."""
    key = door.create_key("kept", shared_fleet.namespace)
    running, values = identities(shared_fleet), product.values
    try:
        product.install({**values, "gateway": {"enabled": False}})
        until(lambda: not gateway_pods(product), "the gateway is gone")
    finally:
        product.install(values)
    await_operators(product)
    address = product.cluster.cluster_ip(product.namespace, GATEWAY)
    back = FrontDoor(product.cluster, f"http://{address}", product.namespace)
    until(lambda: back.models(key).status == 200, "the key is in force again")
    assert identities(shared_fleet) == running
