"""A pod that is replaced is deleted as it was seen, and left the time to drain."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from fleetkeeper.adapters.kubernetes.records import Seen
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter
from fleetkeeper.autoscale.rules.removal import Cause, Removal
from fleetkeeper.autoscale.signals.samples import Gauges, PodSample
from fleetkeeper.autoscale.types import PodView
from fleetkeeper.common.values import Event
from fleetkeeper.reconcile.types import Pod
from fleetkeeper.runtime.autoscaler.pod_replacement import PodReplacer
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.reconciler.live_services import LiveServices
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from tests.support.autoscale.control_cases import sample
from tests.support.plane.loopback_api import served

CHAT = Key("team-a", "chat")
SERVICE: dict[str, Any] = {
    "metadata": {"name": "chat", "namespace": "team-a", "uid": "u1", "resourceVersion": "3"}
}
WHY = "40.0% of the memory that its allocator holds is unused"
REMOVAL = Removal(Cause.FRAGMENTED, WHY, Event("Normal", "EngineFragmented", WHY))


async def fragmented(pod: PodView) -> PodSample:
    """The pod says so itself."""
    return sample(100.0, pod.name, gauges=Gauges(memory_fragmentation_ratio=0.4))


def cache_with_a_pod() -> Cache:
    """chat-0 of team-a/chat, last seen at version 41."""
    cache = Cache(now=lambda: 100.0, changed=lambda _: None)
    cache.put_service(SERVICE)
    pod = Pod("chat-0", "uid-0", "chat", "engine", "r1", "t1", 1.0, ready=True, ready_since=2.0)
    cache.put(Seen("Pod", "team-a", "chat-0", 41, "chat", pod))
    return cache


@pytest.mark.parametrize(("status", "leaves"), [(200, True), (404, True), (409, False)])
async def test_a_replaced_pod_is_deleted_by_uid_and_version_with_its_own_grace_period(
    status: int, leaves: bool
) -> None:
    """No grace period is named, so the pod's own holds and preStop drains; one that moved on stays."""
    asked: list[tuple[str, str, dict[str, Any]]] = []

    async def handler(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response(SERVICE)
        asked.append((request.method, request.path, json.loads(await request.read())))
        return web.json_response({"kind": "Status", "code": status}, status=status)

    cache = cache_with_a_pod()
    async with served(handler) as client:
        writer = KubernetesWriter(client, fence=lambda: None)
        replacer = PodReplacer(
            *(writer, cache, OperatorMetrics()),
            is_unchanged=LiveServices(client, cache).is_unchanged,
            read_pod=fragmented,
        )
        assert await replacer.replace(CHAT, PodView("chat-0", "uid-0", 1.0), REMOVAL) is leaves
        assert not await replacer.replace(CHAT, PodView("chat-9", "uid-9", 1.0), REMOVAL)
    ((method, path, options),) = asked
    assert (method, path) == ("DELETE", "/api/v1/namespaces/team-a/pods/chat-0")
    assert options["preconditions"] == {"uid": "uid-0", "resourceVersion": "41"}
    assert "gracePeriodSeconds" not in options
    assert [pod.deleting for pod in cache.pods(CHAT)] == [leaves]
