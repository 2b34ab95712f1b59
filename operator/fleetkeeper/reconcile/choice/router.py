"""The router of a service: an upgrade of the operator restarts none, so an earlier one is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from fleetkeeper.api.names import ANNOTATION_TEMPLATE_HASH, Component, router_name
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.types import EngineUpdates, RoutingPolicy
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.reconcile.manifests.router import Router, desired_router_deployment
from fleetkeeper.reconcile.manifests.vllm_router import DEFAULTS
from fleetkeeper.reconcile.types import Kind, Snapshot, Workload


def decide_router(
    context: PlanContext, service: InferenceService, snapshot: Snapshot
) -> Router | None:
    """Return the router of a service: the one that runs, if it is to be kept; None if it has none.

    It is kept while nothing else of the pod template changes. It is not kept if the service takes
    updates by itself, if the live template is not one that the operator wrote, or during a rollout:
    a wrong image could not be corrected otherwise.
    """
    if service.spec.routing.policy is RoutingPolicy.NONE:
        return None  # there may still be a router, of an earlier policy or by another hand
    live = snapshot.children.get((Kind.DEPLOYMENT, router_name(service.name)))
    if not isinstance(live, Workload):
        return Router(context.router)
    is_kept = service.spec.rollout.engine_updates is not EngineUpdates.AUTOMATIC and _runs(live)
    written = _written_with(context, live.image) if is_kept and live.image else ()
    router = next(
        (
            candidate
            for candidate in written
            if _hash_of(context, service, candidate) == live.template_hash
        ),
        Router(context.router),
    )
    account = snapshot.children.get((Kind.SERVICE_ACCOUNT, live.name))
    if router.is_vllm_router or account is None or account.controller_uid != service.uid:
        return router
    wanted = _hash_of(context, service, router)
    return replace(router, watches_pods=_still_watch_pods(snapshot, live, wanted))


def _written_with(context: PlanContext, image: str) -> Iterator[Router]:
    """Return the routers that an operator could have written with this image.

    Resources that the values of the chart do not name were its defaults, which have changed since.
    """
    settings = context.router.model_copy(update={"image": image})
    yield Router(settings)
    for cpu, memory in product(
        (settings.cpu, DEFAULTS["cpu"]), (settings.memory, DEFAULTS["memory"])
    ):
        before = settings.model_copy(update={"cpu": cpu, "memory": memory})
        yield Router(before, is_vllm_router=True, watches_pods=True)


def _hash_of(context: PlanContext, service: InferenceService, router: Router) -> str:
    template = desired_router_deployment(service, context, router)["spec"]["template"]
    return str(template["metadata"]["annotations"][ANNOTATION_TEMPLATE_HASH])


def _runs(live: Workload) -> bool:
    """Return whether all pods have the live template, and one is available; True if it is not known yet."""
    if live.observed_generation < live.generation:
        return True
    return live.updated_replicas == live.replicas and live.available_replicas > 0


def _still_watch_pods(snapshot: Snapshot, live: Workload, wanted: str) -> bool:
    """Return whether pods of an earlier release may exist: until the rollout is over, their account stays."""
    is_over = (
        live.template_hash == wanted and live.observed_generation >= live.generation and _runs(live)
    )
    return not is_over or any(
        pod.component == Component.ROUTER and pod.template_hash != wanted for pod in snapshot.pods
    )
