"""The image of a service's router: an upgrade of the operator restarts no router."""

from __future__ import annotations

from dataclasses import replace

from fleetkeeper.api.names import ANNOTATION_TEMPLATE_HASH, router_name
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.types import EngineUpdates, RoutingPolicy
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.reconcile.manifests.router import desired_router_deployment
from fleetkeeper.reconcile.types import Kind, Snapshot, Workload


def with_router_image(
    context: PlanContext, service: InferenceService, snapshot: Snapshot
) -> PlanContext:
    """Return the context with the image of the service's running router, if it is to be kept.

    It is kept while nothing else of the pod template changes. It is not kept if the service takes
    updates by itself, if the live template is not one that the operator wrote, or during a rollout:
    a wrong image could not be corrected otherwise.
    """
    if service.spec.routing.policy is RoutingPolicy.NONE:
        return context  # there may still be a router, of an earlier policy or by another hand
    live = snapshot.children.get((Kind.DEPLOYMENT, router_name(service.name)))
    if not isinstance(live, Workload) or live.image in ("", context.router.image):
        return context
    if service.spec.rollout.engine_updates is EngineUpdates.AUTOMATIC or not _runs(live):
        return context
    router = context.router.model_copy(update={"image": live.image})
    kept = replace(context, router=router)
    template = desired_router_deployment(service, kept)["spec"]["template"]
    if template["metadata"]["annotations"][ANNOTATION_TEMPLATE_HASH] != live.template_hash:
        return context
    return kept


def _runs(live: Workload) -> bool:
    """Return whether all pods have the live template, and one is available; True if it is not known yet."""
    if live.observed_generation < live.generation:
        return True
    return live.updated_replicas == live.replicas and live.available_replicas > 0
