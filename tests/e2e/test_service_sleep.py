"""A service that sleeps on a real node: without requests no pod is left, and the next request gets its answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fleetkeeper_local.demo import asleep, inject
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.front_door import FrontDoor
from fleetkeeper_local.demo.installation import GATEWAY, Installation
from fleetkeeper_local.node.node import Node
from tests.support.guards import GUARD_S
from tests.support.node.service_world import (
    await_operators,
    gateway_pods,
    kill_processes,
    says,
    service_fleet,
    simulated,
)

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("calm_operator")]
MARKS = "fleetkeeper-wake-marks"


@pytest.fixture(scope="module")
def rare(product: Installation) -> Iterator[Fleet]:
    """A service of its own, behind the gateway alone."""
    manifest = simulated(access="Gateway", networkPolicy={"preset": "Gateway"})
    with service_fleet(product, manifest) as fleet:
        fleet.await_ready(1)
        yield fleet


def test_a_request_wakes_a_service_whose_last_replica_is_gone(
    product: Installation, rare: Fleet, door: FrontDoor
) -> None:
    """The chapter of the demo: it waits until no engine pod is left, and sends one request."""
    lines = asleep.chapter(door, rare, print)
    assert "Ready is True (Asleep)." in lines
    sleep = asleep.awake(rare)
    assert marks(product)[rare.live()["metadata"]["uid"]] == "1.standard"
    assert (sleep["number"], len(sleep["startSeconds"])) == (1, 1)
    rare.until(lambda: says(rare, "releases its replicas", "Asleep"), "the event Asleep")
    rare.until(lambda: says(rare, "starts its replicas", "Waking"), "the event Waking")


def test_it_wakes_although_the_mark_and_the_operators_were_lost_while_it_slept(
    product: Installation, rare: Fleet, door: FrontDoor
) -> None:
    """The gateway writes its mark again, and an operator that starts reads it."""
    asleep.fall_asleep(rare)
    key = door.create_key("rare", rare.namespace)
    product.cluster.kubectl("-n", product.namespace, "delete", "configmap", MARKS)
    inject.kill_operators(product)
    asleep.ask(door, key, rare.name)
    assert asleep.awake(rare)["number"] == 2
    assert marks(product)[rare.live()["metadata"]["uid"]] == "2.standard"
    await_operators(product)


def test_a_request_whose_gateways_were_killed_wakes_it_once(
    product: Installation, rare: Fleet, door: FrontDoor, node: Node
) -> None:
    """The mark stands without them. No node takes the pod before they are gone, so the request is held."""
    asleep.fall_asleep(rare)
    before = rare.status()["sleep"]
    uid, mark = rare.live()["metadata"]["uid"], f"{before['number']}.standard"
    key = door.create_key("rare", rare.namespace)
    gateways = gateway_pods(product)
    product.cluster.kubectl("cordon", node.settings.node_name)
    try:
        with ThreadPoolExecutor(1) as clients:
            held = clients.submit(door.complete, key, rare.name)
            rare.until(lambda: marks(product).get(uid) == mark, "the mark")
            for pod in gateways:
                kill_processes(pod, lambda command: "fleetkeeper-gateway" in command)
            with pytest.raises(ConnectionError):
                held.result()
    finally:
        product.cluster.kubectl("uncordon", node.settings.node_name)
    old = {pod.identity for pod in gateways}
    rare.until(
        lambda: all(pod.ready and pod.identity not in old for pod in gateway_pods(product)),
        "gateways that started again",
    )
    # Pods are ready a moment before the node sends connections to them.
    rare.until(lambda: takes_connections(product), "the address of the gateways")
    asleep.ask(door, key, rare.name)
    after = asleep.awake(rare)
    assert after["number"] == before["number"]
    assert len(after["startSeconds"]) == len(before["startSeconds"]) + 1
    assert marks(product)[uid] == mark


def takes_connections(product: Installation) -> bool:
    """Return whether a pod is behind the gateway's address; the node refuses connections if none is."""
    address = product.cluster.cluster_ip(product.namespace, GATEWAY)
    try:
        socket.create_connection((address, 80), timeout=GUARD_S).close()
    except ConnectionRefusedError:
        return False
    return True


def marks(product: Installation) -> dict[str, str]:
    """Return the wake marks."""
    where = ("-n", product.namespace, "get", "configmap", MARKS, "-o", "jsonpath={.data}")
    found: dict[str, str] = json.loads(product.cluster.kubectl(*where))
    return found
