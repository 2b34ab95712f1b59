"""Children survive the deletion of their service with `kubectl delete --cascade=orphan`.

The garbage collector removes the owner of each child while the operator's copy of the service is
still the one from before the deletion: here the watch of services is held back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE, POD
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_world import Live, World, operator_world, service
from tests.support.plane.watch_proxy import WatchProxy


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-orphan") as found:
        yield found


def _owners(world: World) -> dict[tuple[str, str], list[str]]:
    """The UID of each child and pod of chat, then those of its owners that are services."""
    pods = {key: live for key, live in world.objects.items() if key[0] == POD.kind}
    return {
        key: [live["metadata"]["uid"], *_service_owners(live)]
        for key, live in {**world.children(), **pods}.items()
    }


def _service_owners(live: Live) -> list[str]:
    owners = live["metadata"].get("ownerReferences") or ()
    return [owner["uid"] for owner in owners if owner["kind"] == INFERENCE_SERVICE.kind]


async def _delete(world: World, policy: str) -> None:
    path = INFERENCE_SERVICE.path(world.namespace, "chat")
    await world.client.request("DELETE", path, body={"propagationPolicy": policy})
    await world.until("chat gone", lambda: world.fis() is None)


def _was_read(world: World, since: int) -> bool:
    asked = {(request.verb, request.resource) for request in world.requests(since)}
    return ("get", INFERENCE_SERVICE.plural) in asked


async def test_children_and_pods_stay_when_their_service_is_deleted_without_them(
    world: World,
) -> None:
    async with WatchProxy(world.plane, world.user) as proxy:
        operator = await world.operator(kubeconfig=proxy.kubeconfig).start().leads()
        live = await world.create(service(replicas=1, routing={"policy": "LeastLoaded"}))
        await world.ready()
        await world.quiet()
        before = _owners(world)
        mark = world.mark()
        proxy.hold(INFERENCE_SERVICE.plural)
        await _delete(world, "Orphan")
        await world.until("chat read", lambda: _was_read(world, mark))
        await world.quiet()
        proxy.release()
        await world.quiet()
        assert world.writes(mark, events=True) == []
        assert _owners(world) == {
            key: [uid for uid in uids if uid != live["metadata"]["uid"]]
            for key, uids in before.items()
        }
        assert operator.alive


async def test_a_service_made_anew_under_the_name_adopts_what_was_kept(world: World) -> None:
    """The operator sees neither the deletion nor the creation until both are over."""
    async with WatchProxy(world.plane, world.user) as proxy:
        await world.operator(kubeconfig=proxy.kubeconfig).start().leads()
        manifest = service(replicas=1, routing={"policy": "LeastLoaded"})
        old = (await world.create(manifest))["metadata"]["uid"]
        await world.ready()
        await world.quiet()
        before = _owners(world)
        proxy.hold(INFERENCE_SERVICE.plural)
        await _delete(world, "Orphan")
        new = (await world.create(manifest))["metadata"]["uid"]
        await world.until("chat seen", lambda: world.fis() is not None)
        proxy.release()
        await world.ready()
        await world.quiet()
        assert _owners(world) == {
            key: [new if uid == old else uid for uid in uids] for key, uids in before.items()
        }
