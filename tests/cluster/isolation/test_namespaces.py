"""Of several namespaces one that cannot be read fails alone: the others are served throughout.

Rights are taken and given by RoleBindings. The API server checks them when a request starts, so a
watch that runs is cut here, as the server itself does every few minutes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import aiohttp
import pytest
import pytest_asyncio

from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S
from tests.support.operators.operator_process import OperatorProcess
from tests.support.operators.operator_world import World, operator_world, service
from tests.support.plane.watch_proxy import WatchProxy

SHORT_PAUSES = {
    "fleetkeeper_kube.reflector.MAX_DENIED_PAUSE_S": 2.0,
    "runtime.namespaces.MAX_PAUSE_S": 2.0,
    "runtime.resync.DENIED_RETRY_S": 2.0,
}
"""Between two attempts to read what was refused; usually up to half a minute."""
BINDING = "isolation-operator"


class Worlds:
    """Two namespaces of one operator: `good` stays readable, `other` does not."""

    def __init__(self, good: World, other: World, proxy: WatchProxy) -> None:
        self.good = good
        self.other = other
        self.proxy = proxy

    def operator(self) -> OperatorProcess:
        """Start an operator for both namespaces, which reads them behind the proxy."""
        names = json.dumps([self.other.namespace, self.good.namespace])
        operator = self.good.operator(kubeconfig=self.proxy.kubeconfig, waits=SHORT_PAUSES)
        return operator.start(FLEETKEEPER_NAMESPACES=names, FLEETKEEPER_RESYNC_S="5")

    def bind(self) -> None:
        """Give the operator its rights in `other`."""
        self.good.plane.kubectl(
            *("-n", self.other.namespace, "create", "rolebinding", BINDING),
            *(f"--user={self.good.user}", "--clusterrole=fleetkeeper-test-operator"),
        )

    def unbind(self) -> None:
        """Take them away."""
        self.good.plane.kubectl("-n", self.other.namespace, "delete", "rolebinding", BINDING)

    def authorize_again(self) -> None:
        """Cut every watch, so that each is authorized anew."""
        self.proxy.cut_watches()
        self.proxy.heal_watches(expired=False)


@pytest_asyncio.fixture
async def worlds(control_plane: ControlPlane) -> AsyncIterator[Worlds]:
    async with AsyncExitStack() as stack:
        good = await stack.enter_async_context(operator_world(control_plane, "isolation-good"))
        other = await stack.enter_async_context(operator_world(control_plane, "isolation-other"))
        proxy = await stack.enter_async_context(WatchProxy(control_plane, good.user))
        yield Worlds(good, other, proxy)


async def _metric(operator: OperatorProcess, name: str, holds: Callable[[float], bool]) -> None:
    """Wait until a metric's value is as wanted."""
    value = None
    async with asyncio.timeout(GUARD_S):
        while value is None or not holds(value):
            assert operator.alive, operator.log.read_text()[-3000:]
            await asyncio.sleep(0.1)
            value = await operator.metric(name)


async def _unreadable(operator: OperatorProcess, count: int) -> None:
    await _metric(operator, "fleetkeeper_namespace_unreadable", lambda value: value == count)


async def _said(operator: OperatorProcess, words: str, **fields: str) -> None:
    """Wait until the operator has logged this event with these fields."""
    wanted = {"event": words, **fields}.items()
    async with asyncio.timeout(GUARD_S):
        while not any(wanted <= line.items() for line in _log(operator)):
            assert operator.alive, operator.log.read_text()[-3000:]
            await asyncio.sleep(0.2)


def _log(operator: OperatorProcess) -> list[dict[str, str]]:
    lines = operator.log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


async def _answers(operator: OperatorProcess, path: str) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{operator.port}{path}") as answer,
    ):
        return answer.status


def _replicas(world: World) -> int:
    return int((world.get("Deployment", "chat") or {})["spec"]["replicas"])


async def _serves(world: World, replicas: int) -> None:
    """Change the service and wait until its Deployment follows."""
    await world.change(replicas=replicas)
    await world.until(
        f"scaled to {replicas}", lambda: _replicas(world) == replicas, timeout_s=GUARD_S
    )


async def _later_resync(operator: OperatorProcess) -> None:
    """Wait until another full resync has ended."""
    name = "fleetkeeper_last_resync_timestamp_seconds"
    before = await operator.metric(name) or 0.0
    await _metric(operator, name, lambda value: value > before)


@pytest.mark.timeout(600)
async def test_a_namespace_that_may_not_be_read_at_the_start_stops_no_other(
    worlds: Worlds,
) -> None:
    good, other = worlds.good, worlds.other
    await good.create(service(replicas=1))
    await other.create(service(replicas=1))
    operator = await worlds.operator().leads()
    await good.ready()
    await _serves(good, 2)
    assert await _answers(operator, "/readyz") == 200
    await _unreadable(operator, 1)
    assert other.get("Deployment", "chat") is None
    worlds.bind()
    await other.until("served", lambda: other.get("Deployment", "chat"), timeout_s=GUARD_S)
    await other.ready()
    await _unreadable(operator, 0)
    assert operator.alive


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "ends", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["soon", "late"]
)
async def test_a_namespace_whose_rights_are_taken_away_is_held_until_they_are_back(
    worlds: Worlds, *, ends: bool
) -> None:
    """Before and after kopf, which tries a refused watch nine times, ends its watch of the namespace."""
    good, other = worlds.good, worlds.other
    worlds.bind()
    operator = await worlds.operator().leads()
    for world in (good, other):
        await world.create(service(replicas=1))
        await world.ready()
    await good.quiet()
    worlds.unbind()
    worlds.authorize_again()
    await _unreadable(operator, 1)
    mark = good.mark()
    await other.change(replicas=3)
    await _serves(good, 2)
    await _later_resync(operator)
    assert await _answers(operator, "/healthz") == 200
    written = [write for write in good.writes(mark) if write.namespace == other.namespace]
    assert written == []
    assert _replicas(other) == 1
    assert await operator.metric("fleetkeeper_services") == 2, "a held service was forgotten"
    if ends:
        await _said(operator, "watch of services ended", namespace=other.namespace)
    worlds.bind()
    await other.until("served again", lambda: _replicas(other) == 3, timeout_s=GUARD_S)
    await _unreadable(operator, 0)
    await _serves(good, 1)
    said = [line["event"] for line in _log(operator)]
    assert len([words for words in said if words.startswith("namespace cannot be read")]) == 1
    assert operator.alive


@pytest.mark.timeout(600)
async def test_a_namespace_that_is_deleted_and_made_again_is_served_again(worlds: Worlds) -> None:
    good, other = worlds.good, worlds.other
    worlds.bind()
    operator = await worlds.operator().leads()
    for world in (good, other):
        await world.create(service(replicas=1))
        await world.ready()
    plane = good.plane
    await asyncio.to_thread(plane.kubectl, "delete", "namespace", other.namespace, "--timeout=300s")
    worlds.authorize_again()
    await _unreadable(operator, 1)
    await _serves(good, 2)
    await _later_resync(operator)
    assert await _answers(operator, "/healthz") == 200
    plane.kubectl("create", "namespace", other.namespace)
    worlds.bind()
    await other.create(service(replicas=1))
    await other.until("served", lambda: other.get("Deployment", "chat"), timeout_s=GUARD_S)
    await other.ready()
    await _unreadable(operator, 0)
    await _serves(good, 1)
    assert operator.alive


@pytest.mark.timeout(600)
async def test_a_watch_of_services_that_breaks_in_one_namespace_is_started_again(
    worlds: Worlds,
) -> None:
    """An ERROR event ends kopf for good; a single namespace, or the cluster, ends the process so."""
    worlds.bind()
    operator = await worlds.operator().leads()
    for world in (worlds.good, worlds.other):
        await world.create(service(replicas=1))
        await world.ready()
    worlds.proxy.send_error("inferenceservices", code=500)
    await _said(operator, "watch of services ended")
    for world in (worlds.good, worlds.other):
        await _serves(world, 2)
    assert operator.alive


@pytest.mark.timeout(300)
async def test_an_operator_that_may_read_no_namespace_at_all_ends(worlds: Worlds) -> None:
    good = worlds.good
    good.plane.kubectl("-n", good.namespace, "delete", "rolebinding", "test-operator")
    operator = worlds.operator()
    assert await operator.ended(GUARD_S) == 2
