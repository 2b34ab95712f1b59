"""The gateway on a real node: keys, no way around it, faults beside it, and what it logs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from fleetkeeper_local.demo import front_door
from fleetkeeper_local.demo.fleet import Fleet, PodFacts
from fleetkeeper_local.demo.front_door import FrontDoor
from fleetkeeper_local.demo.inject import processes_of
from fleetkeeper_local.demo.installation import Installation
from tests.support.node.gateway_load import SteadyLoad
from tests.support.node.node_world import Pods, until
from tests.support.node.service_world import await_operators, gateway_pods, identities, ordered

ASK = """
import json, sys, urllib.error, urllib.request
body = json.dumps({"model": "tiny", "prompt": "The queue", "max_tokens": 1}).encode()
for address in sys.argv[1:]:
    headers = {"Content-Type": "application/json", "X-Inference-Tier": "realtime", "Authorization": "Bearer made-up"}
    request = urllib.request.Request(f"http://{address}/v1/completions", data=body, headers=headers)
    try:
        status = urllib.request.urlopen(request, timeout=300).status
    except urllib.error.HTTPError as error:
        status = error.code
    print(address, status)
"""

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("calm_operator")]


@pytest.fixture(scope="module")
def closed_fleet(shared_fleet: Fleet) -> Iterator[Fleet]:
    """The shared fleet, whose engines accept only the gateway; open again afterwards."""
    fleet = ordered(shared_fleet, 1)
    running = identities(fleet)
    old = fleet.live()["spec"].get("networkPolicy")
    fleet.change({"networkPolicy": {"preset": "Gateway"}})
    front_door.set_access(fleet, "Gateway", fleet.base_url())
    assert identities(fleet) == running, "nothing restarts for it"
    yield fleet
    fleet.change({"networkPolicy": old})
    front_door.set_access(fleet, "Open", fleet.base_url())
    assert identities(fleet) == running


def test_a_key_of_the_command_line_works_until_its_limit_and_until_it_is_revoked(
    closed_fleet: Fleet, door: FrontDoor
) -> None:
    """The chapter of the demo: it compares the tokens told with those counted."""
    lines = front_door.chapter(door, closed_fleet.namespace, closed_fleet.name, print)
    (limited,) = (line for line in lines if "Retry-After" in line)
    assert 1 <= int(limited.rpartition(" ")[2]) <= 60
    key = door.create_key("revoked", closed_fleet.namespace)
    assert door.complete(key, closed_fleet.name).status == 200
    assert door.complete(key, "unknown").status == 404
    door.command("keys", "revoke", "revoked")
    until(lambda: door.models(key).status == 401, "the key is refused")


def test_a_key_of_another_namespace_sees_nothing(closed_fleet: Fleet, door: FrontDoor) -> None:
    """Right and existence look the same."""
    assert closed_fleet.namespace != "elsewhere"
    key = door.create_key("elsewhere", "elsewhere")
    assert door.models(key).body["data"] == []
    refused = door.complete(key, closed_fleet.name)
    unknown = door.complete(key, "unknown")
    assert (refused.status, unknown.status) == (404, 404)
    assert refused.body["error"]["code"] == unknown.body["error"]["code"]


@pytest.mark.promise("gateway-only")
def test_nobody_gets_around_the_gateway(
    closed_fleet: Fleet, door: FrontDoor, pods: Pods, python_image: str
) -> None:
    """Engines refuse by themselves: this node enforces no NetworkPolicy."""
    fleet = closed_fleet
    (engine,), (router,) = fleet.engines(), fleet.pods("router")
    service = fleet.base_url().removeprefix("http://").removesuffix("/v1")
    addresses = [service, f"{router.ip}:8080", f"{engine.ip}:8000"]
    script = f"import sys; sys.argv[1:] = {addresses!r}\n{ASK}"
    printed = pods.run("around", python_image, script)
    assert printed.split() == [word for address in addresses for word in (address, "401")]
    key = door.create_key("inside", fleet.namespace)
    assert door.complete(key, fleet.name).status == 200


def _kill_the_other(product: Installation, survivor: PodFacts) -> Callable[[], None]:
    (other,) = (pod for pod in gateway_pods(product) if pod.uid != survivor.uid)
    killed = processes_of(other.uid, lambda command: "fleetkeeper-gateway serve" in command)
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)

    def back() -> None:
        until(
            lambda: any(
                pod.restarts > other.restarts and pod.ready for pod in gateway_pods(product)
            ),
            "the killed replica serves again",
        )

    return back


def _delete_redis(product: Installation, survivor: PodFacts) -> Callable[[], None]:
    (redis,) = gateway_pods(product, "gateway-redis")
    product.cluster.kubectl(
        *("-n", product.namespace, "delete", "pod", redis.name, "--force", "--grace-period=0")
    )
    del survivor

    def back() -> None:
        until(
            lambda: any(
                pod.uid != redis.uid and pod.ready for pod in gateway_pods(product, "gateway-redis")
            ),
            "a new Redis",
        )

    return back


def _stop_operators(product: Installation, survivor: PodFacts) -> Callable[[], None]:
    scale = ("-n", product.namespace, "scale", f"deployment/{product.release}")
    before = len(product.operators())
    product.cluster.kubectl(*scale, "--replicas=0")
    until(lambda: not product.operators(), "the operators are gone")
    del survivor

    def back() -> None:
        product.cluster.kubectl(*scale, f"--replicas={before}")
        until(lambda: len(product.operators()) == before, "the operators are back")
        await_operators(product)

    return back


@pytest.mark.promise("usage")
@pytest.mark.parametrize("fault", [_kill_the_other, _delete_redis, _stop_operators])
def test_requests_continue_beside_a_fault_and_are_counted(
    closed_fleet: Fleet,
    door: FrontDoor,
    product: Installation,
    fault: Callable[[Installation, PodFacts], Callable[[], None]],
) -> None:
    """No request of a replica that lives fails, and usage tells exactly what the answers told."""
    survivor = gateway_pods(product)[0]
    name = fault.__name__.strip("_").replace("_", "-")
    before = door.counted(name)
    key = door.create_key(name, closed_fleet.namespace, "--requests-per-minute=100000")
    with SteadyLoad(door, key, closed_fleet.name, f"http://{survivor.ip}:8080") as load:
        load.await_more("before the fault")
        back = fault(product, survivor)
        try:
            load.await_more("after the fault")
        finally:
            back()
        load.await_more("after it")
    assert load.failures == []
    told = tuple(old + new for old, new in zip(before, load.told(), strict=True))
    until(lambda: door.counted(name) == told, f"usage {told}")


def test_logs_of_the_gateway_hold_no_key_and_no_error(
    closed_fleet: Fleet, door: FrontDoor, product: Installation
) -> None:
    """Of this whole module; the audit log names keys by their ID."""
    key = door.create_key("logged", closed_fleet.namespace)
    assert door.complete(key, closed_fleet.name).status == 200
    said = "\n".join(
        product.cluster.kubectl("-n", product.namespace, "logs", pod.name)
        for component in ("gateway", "gateway-usage")
        for pod in gateway_pods(product, component)
    )
    assert "logged" in said
    assert key not in said
    assert "fk_" not in said
    assert "The queue" not in said
    entries = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [entry for entry in entries if entry.get("level") in {"error", "critical"}] == []
    assert "Traceback" not in said
