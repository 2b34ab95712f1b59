"""All children of a service, in the order in which they are applied."""

from __future__ import annotations

from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.profiles.profile import EngineProfile
from fleetkeeper.api.types import RolloutStrategy, RoutingPolicy
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.reconcile.manifests.address import desired_address, desired_engines_address
from fleetkeeper.reconcile.manifests.control_config import desired_control_config
from fleetkeeper.reconcile.manifests.disruption import (
    desired_disruption_budget,
    desired_router_disruption_budget,
)
from fleetkeeper.reconcile.manifests.engine import desired_engine_deployment
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from fleetkeeper.reconcile.manifests.network import (
    desired_engine_policy,
    desired_prefetch_policy,
    desired_router_policy,
)
from fleetkeeper.reconcile.manifests.router import Router, desired_router_deployment
from fleetkeeper.reconcile.manifests.tuning import AS_SPECIFIED, EngineTuning
from fleetkeeper.reconcile.manifests.vllm_router import (
    desired_router_account,
    desired_router_binding,
)


def desired_children(
    service: InferenceService,
    profile: EngineProfile,
    context: PlanContext,
    *,
    replicas: int,
    tuning: EngineTuning = AS_SPECIFIED,
    strategy: RolloutStrategy = RolloutStrategy.SURGE,
    template: Manifest | None = None,
    prefetch: Manifest | None = None,
    router: Router | None = None,
    is_router_bypassed: bool = False,
    is_asleep: bool = False,
) -> tuple[Manifest, ...]:
    """Return every child that the service must have. Any other child is to be pruned.

    `profile` is the engine profile in use (`status.engine`), `replicas` the number of engine pods,
    `tuning` the values that a remedy lowered, and `strategy` Surge, Replace or Swap (Auto means Surge).
    `template` is the pod template of the engines, by default the spec's, and `prefetch` the Job that
    downloads their model, if one is needed. `router` is by default that of a new service, and
    `is_router_bypassed` whether clients reach the engines until it is ready. A service that `is_asleep` has no router pod. Keys and policies come before
    the pods that need them.

    Raises:
        EngineOptionRefused: the spec holds options or variables that the profile does not allow.
    """
    children = [
        desired_control_config(service, context),
        desired_engine_policy(service, profile, context, admits_clients=is_router_bypassed),
        desired_disruption_budget(service),
        desired_engine_deployment(
            service,
            template or desired_engine_template(service, profile, context, tuning),
            replicas=replicas,
            strategy=strategy,
        ),
    ]
    if service.spec.routing.policy is not RoutingPolicy.NONE:
        router = router or Router(context.router)
        children.append(desired_router_policy(service, context, watches_pods=router.watches_pods))
        if router.watches_pods:
            children += [
                desired_router_account(service),
                desired_router_binding(service, context.router),
            ]
        children += [
            desired_router_deployment(service, context, router, is_asleep=is_asleep),
            desired_engines_address(service),
        ]
        if service.spec.routing.replicas > 1:
            children.append(desired_router_disruption_budget(service))
    if prefetch is not None:
        children += [desired_prefetch_policy(service, profile, context), prefetch]
    children.append(desired_address(service))
    return tuple(children)
