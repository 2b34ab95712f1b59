"""The router of an earlier release on a real API server, as its operator wrote it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from fleetkeeper.adapters.kubernetes.resources import CHILDREN
from fleetkeeper.api.names import FIELD_MANAGER, router_name
from fleetkeeper.api.parse import parse_service
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper.reconcile.manifests.router import Router
from fleetkeeper.reconcile.manifests.vllm_router import DEFAULTS
from fleetkeeper.reconcile.types import Kind
from tests.support.operators.operator_world import Live, World

IMAGE: Final = "fleetkeeper-router:earlier"
EVERYTHING: Final = (Kind.SERVICE_ACCOUNT, Kind.ROLE_BINDING, Kind.DEPLOYMENT)


async def give_vllm_router(
    world: World, name: str = "chat", kinds: Collection[Kind] = EVERYTHING
) -> None:
    """Give a service these children of an earlier release, and wait for the pods. No operator may run."""
    context = default_context()
    settings = context.router.model_copy(update={"image": IMAGE, **DEFAULTS})
    router = Router(settings, is_vllm_router=True, watches_pods=True)
    live = world.fis(name)
    assert live is not None
    service = parse_service(live)
    profile = context.catalog.resolve(service.spec.engine.profile)
    for child in desired_children(service, profile, context, replicas=1, router=router):
        kind = Kind(child["kind"])
        if kind in kinds and child["metadata"]["name"] == router_name(name):
            await world.client.request(
                "PATCH",
                CHILDREN[kind].path(world.namespace, router_name(name))
                + f"?fieldManager={FIELD_MANAGER}&force=true",
                body=child,
                content_type="application/apply-patch+yaml",
            )
    await world.until("the pods of vllm-router", lambda: _runs(router_of(world, name)))


def router_of(world: World, name: str = "chat") -> Live:
    """Return the Deployment of a service's router."""
    found = world.get("Deployment", router_name(name))
    assert found is not None
    return found


def _runs(live: Live) -> bool:
    status, wanted = live.get("status") or {}, live["spec"]["replicas"]
    (container,) = live["spec"]["template"]["spec"]["containers"]
    return bool(
        container["image"] == IMAGE
        and status.get("observedGeneration", 0) >= live["metadata"]["generation"]
        and status.get("replicas")
        == status.get("updatedReplicas")
        == status.get("availableReplicas")
        == wanted
    )
