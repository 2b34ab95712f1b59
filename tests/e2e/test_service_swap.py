"""An only replica is replaced on a real node while requests come through the gateway: none of them fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.front_door import Answer, FrontDoor
from fleetkeeper_local.demo.installation import Installation
from tests.support.node.service_world import says, service_fleet, simulated

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("calm_operator")]
HOLD_S = 55.0
"""The default of `gateway.hold.seconds`."""
CLIENTS = 4
PAUSE_S = 0.3
STARTUP_S = 60
"""The minimum of the schema: a revision that no node fits fails after that."""


@dataclass(frozen=True)
class Call:
    """A request that was sent once."""

    answer: Answer
    sent_s: float
    ended_s: float

    @property
    def waited_s(self) -> float:
        return self.ended_s - self.sent_s


@pytest.fixture(scope="module")
def single(product: Installation) -> Iterator[Fleet]:
    """A service with one replica behind the gateway alone, whose revision was good for a minute."""
    manifest = simulated(
        access="Gateway",
        networkPolicy={"preset": "Gateway"},
        rollout={"strategy": "Swap", "startupSeconds": STARTUP_S},
    )
    with service_fleet(product, manifest) as fleet:
        fleet.await_ready(1)
        yield fleet


@contextmanager
def steady_requests(door: FrontDoor, key: str, model: str) -> Iterator[list[Call]]:
    """Send requests of several clients, each once; the list is complete after the block."""
    calls: list[Call] = []
    ended = threading.Event()

    def client() -> None:
        while not ended.is_set():
            sent_s = time.monotonic()
            answer = door.complete(key, model)
            calls.append(Call(answer, sent_s, time.monotonic()))
            ended.wait(PAUSE_S)

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients: list[Future[None]] = [pool.submit(client) for _ in range(CLIENTS)]
        try:
            yield calls
        finally:
            ended.set()
        for sender in clients:
            sender.result()


def hash_of(fleet: Fleet) -> str:
    """Return the template of the only engine pod that is not ending."""
    (state,) = [item for item in fleet.status()["replicaStates"] if item["stage"] != "Draining"]
    return str(state["templateHash"])


def is_swapping(fleet: Fleet) -> bool:
    return (fleet.status().get("sleep") or {}).get("state") == "Swapping"


def await_good(fleet: Fleet) -> None:
    """Return when the live template is the last good one: its pod was ready for a minute."""
    fleet.until(
        lambda: fleet.status().get("lastGood", {}).get("templateHash") == hash_of(fleet),
        "the last good template",
    )


def test_no_request_fails_while_the_only_replica_is_replaced(
    single: Fleet, door: FrontDoor
) -> None:
    """Before, during and after the swap. The new replica may start while the old one drains."""
    key = door.create_key("swap", single.namespace)
    before = {pod.uid for pod in single.engines()}
    with steady_requests(door, key, single.name) as calls:
        single.change({"resources": {"cpu": "25m"}})
        single.until(lambda: is_swapping(single), "Swapping")
        assert {pod.uid for pod in single.engines()} == before
        single.await_ready(1)
        single.until(lambda: not is_swapping(single), "awake")
        answered = len(calls)
        single.until(lambda: len(calls) > answered + CLIENTS, "requests after the swap")
    assert [
        (call.answer.status, call.answer.body) for call in calls if call.answer.status != 200
    ] == []
    assert not before & {pod.uid for pod in single.engines()}
    assert len(single.status()["sleep"]["startSeconds"]) == 1
    single.until(lambda: says(single, "replica is replaced", "Swapping"), "the event Swapping")
    single.until(lambda: says(single, "no longer holds", "SwapEnded"), "the event SwapEnded")


def test_a_revision_that_cannot_start_returns_and_held_requests_are_answered(
    single: Fleet, door: FrontDoor
) -> None:
    """It fails after a minute, longer than the hold: who came early gets 503, who came late an answer."""
    await_good(single)
    good = hash_of(single)
    key = door.create_key("swap-back", single.namespace)
    with steady_requests(door, key, single.name) as calls:
        single.change({"placement": {"nodeSelector": {"no": "such-node"}}})
        single.until(lambda: is_swapping(single), "Swapping")
        single.until(lambda: "rollback" in single.status(), "rolled back")
        assert is_swapping(single)
        single.until(lambda: not is_swapping(single), "awake")
        answered = len(calls)
        single.until(lambda: len(calls) > answered + CLIENTS, "requests after the swap")
    assert single.condition("Stalled")["reason"] == "RolledBack"
    assert hash_of(single) == good
    refused = [call for call in calls if call.answer.status != 200]
    assert {call.answer.status for call in refused} <= {503}
    assert {call.answer.body["error"]["code"] for call in refused} <= {"service_waking"}
    assert all(call.waited_s >= HOLD_S - 1 for call in refused), (
        "refused before the hold had passed"
    )
    held = [call for call in calls if call.answer.status == 200 and call.waited_s > 2.0]
    assert held, "no request waited and was answered"
