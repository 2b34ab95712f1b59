"""The writes for a service that is not blocked: its rollout, its replicas, and its children."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleetkeeper.api import names
from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.types import RolloutStrategy, RoutingPolicy
from fleetkeeper.common.activation import decide_suspended, parse_suspended
from fleetkeeper.common.sleep import Sleep, parse_sleep
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.children import ChildrenDecision, Conflict, decide_children
from fleetkeeper.reconcile.choice.engine import EngineDecision
from fleetkeeper.reconcile.choice.router import decide_router
from fleetkeeper.reconcile.digest import digest_of
from fleetkeeper.reconcile.inputs import ReconcileInputs
from fleetkeeper.reconcile.last_good import LastGood, decide_last_good, must_remember
from fleetkeeper.reconcile.manifests.address import desired_address
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper.reconcile.manifests.router import ENVOY, Router
from fleetkeeper.reconcile.observe.problem import Problem, say
from fleetkeeper.reconcile.plan import Action
from fleetkeeper.reconcile.prefetch import decide_prefetch
from fleetkeeper.reconcile.replicas import (
    ReplicaDecision,
    decide_marks,
    decide_replicas,
    gpus_of,
    over_budget,
)
from fleetkeeper.reconcile.rollout import decide_rollout
from fleetkeeper.reconcile.sleep import decide_sleep
from fleetkeeper.reconcile.status.assessment import Assessment
from fleetkeeper.reconcile.strategy import decide_lack, decide_strategy
from fleetkeeper.reconcile.swap import decide_swap
from fleetkeeper.reconcile.types import Kind
from fleetkeeper.reconcile.wanted import Wanted

CONTEST_REQUEUE_S = 60.0
"""The requeue interval during a contest over replicas, whose end causes no watch event."""
BUDGET_REQUEUE_S = 15.0
"""The requeue interval while the GPU budget limits a service: other services free GPUs."""


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """The result of one reconcile.

    If `remembers` is not empty, this reconcile only adds it to the present status: what the next one
    overwrites in the children.
    """

    assessment: Assessment
    engine: EngineDecision | None = None
    last_good: LastGood | None = None
    actions: tuple[Action, ...] = ()
    wants_templates: tuple[str, ...] = ()
    again_after_s: tuple[float | None, ...] = ()
    remembers: Mapping[str, Any] = field(default_factory=dict)


def decide_writes(
    inputs: ReconcileInputs, assessment: Assessment, wanted: Wanted
) -> ReconcileResult:
    """Decide the rollout, the replicas and the children of a service that is not blocked."""
    spec, wanted_hash = wanted.service.spec, wanted.template_hash
    last_good, good_again = decide_last_good(inputs, wanted_hash)
    suspended = decide_suspended(spec, inputs.status, inputs.facts.live_replicas)
    gpus = gpus_of(wanted.template, inputs)
    sleep = decide_sleep(inputs, spec, gpus, was_good=last_good is not None)
    assessment = replace(assessment, sleep=sleep.sleep)
    remembers = _remembers(inputs, last_good, wanted_hash, suspended, sleep.sleep)
    if remembers and not spec.paused:
        return ReconcileResult(assessment, wanted.engine, last_good, remembers=remembers)
    lack = decide_lack(inputs, spec)
    rollout = decide_rollout(inputs, spec.rollout, wanted_hash, last_good, lack)
    prefetch = decide_prefetch(inputs, wanted, rollout, last_good)
    revision = rollout.revision or prefetch.revision
    template = _template(inputs, wanted, revision, is_held=prefetch.holds)
    gpus = gpus_of(template, inputs)
    replicas = decide_replicas(inputs, spec, gpus)
    refused = over_budget(inputs, replicas, gpus)
    strategy, strategy_again = decide_strategy(inputs, spec, replicas.value)
    swap = decide_swap(
        inputs,
        spec,
        sleep.sleep,
        strategy=strategy,
        replicas=replicas.value,
        target="" if refused else _target_hash(inputs, wanted, revision, is_held=prefetch.holds),
    )
    if swap.sleep.state is not sleep.sleep.state:
        remembers = {"sleep": swap.sleep.to_status()}
        return ReconcileResult(assessment, wanted.engine, last_good, remembers=remembers)
    router = decide_router(inputs.context, wanted.service, inputs.snapshot)
    is_bypassed = _is_router_bypassed(inputs, wanted.service)
    assessment = replace(
        assessment,
        wanted_hash=wanted_hash,
        rollout=rollout,
        lack=lack,
        swap_problem=swap.problem,
        replicas=replicas,
        suspended_replicas=suspended,
        router_kind=None if spec.paused else _router_kind(router),
        is_router_bypassed=is_bypassed,
        prefetch=prefetch,
        write_problem=refused or assessment.write_problem,
    )
    is_at_rest = prefetch.holds and replicas.value == inputs.facts.live_replicas
    is_untouched = rollout.is_new or refused is not None or is_at_rest or swap.is_held_back
    children = _decide_children(
        inputs,
        wanted,
        replicas,
        strategy=strategy,
        template=None if is_untouched else template,
        prefetch=prefetch.job,
        router=router,
        is_router_bypassed=is_bypassed,
    )
    again = (
        good_again,
        sleep.again_after_s,
        rollout.again_after_s,
        strategy_again,
        swap.again_after_s,
        children.again_after_s,
        CONTEST_REQUEUE_S if replicas.contested_by else None,
        BUDGET_REQUEUE_S if replicas.limited_by or refused else None,
    )
    actions: tuple[Action, ...] = ()
    if not spec.paused:
        marks = decide_marks(inputs.facts, replicas.value, inputs.snapshot.pod_load)
        actions = (*(marks if _scales(children, wanted.service.name) else ()), *children.actions)
    return ReconcileResult(
        _with_conflicts(assessment, children.conflicts),
        wanted.engine,
        last_good,
        actions,
        _missing_templates(inputs, None if is_at_rest else revision),
        again,
    )


def _remembers(
    inputs: ReconcileInputs,
    last_good: LastGood | None,
    wanted_hash: str,
    suspended: int | None,
    sleep: Sleep,
) -> dict[str, Any]:
    """Return what only the children show, and the status must show before they change."""
    found: dict[str, Any] = {}
    if last_good is not None and must_remember(last_good, inputs.status, wanted_hash):
        found["lastGood"] = last_good.to_status()
    if suspended is not None and suspended != parse_suspended(inputs.status):
        found["suspendedReplicas"] = suspended
    if sleep.state is not parse_sleep(inputs.status).state:
        found["sleep"] = sleep.to_status()
        if last_good is not None:
            found["lastGood"] = last_good.to_status()
    return found


def _decide_children(
    inputs: ReconcileInputs,
    wanted: Wanted,
    replicas: ReplicaDecision,
    *,
    strategy: RolloutStrategy,
    template: Manifest | None,
    prefetch: Manifest | None,
    router: Router | None,
    is_router_bypassed: bool,
) -> ChildrenDecision:
    """Decide the writes of children. Without a pod template, omit the engine Deployment."""
    service = wanted.service
    desired = desired_children(
        service,
        wanted.profile,
        inputs.context,
        replicas=replicas.value,
        strategy=strategy,
        template=template or wanted.template,
        prefetch=prefetch,
        router=router,
        is_router_bypassed=is_router_bypassed,
        is_asleep=replicas.reason is Reason.ASLEEP or _awaits_address(inputs),
    )
    engine_key = (Kind.DEPLOYMENT, names.engine_name(service.name))
    untouched = {(Kind.SERVICE, names.address_name(service.name))} if is_router_bypassed else set()
    if template is None:
        untouched.add(engine_key)
    return decide_children(
        desired,
        inputs.snapshot,
        service=service.name,
        owner_uid=service.uid,
        now=inputs.now,
        untouched=frozenset(untouched),
    )


def _awaits_address(inputs: ReconcileInputs) -> bool:
    """Return True until the first engine of a wake has an address, which the router finds by DNS.

    A router that asks earlier learns that there is none, which DNS servers keep for 5 s and more.
    """
    facts = inputs.facts
    is_off = facts.router is not None and facts.router.desired_replicas == 0
    is_waking = parse_sleep(inputs.status).is_waking
    return is_waking and is_off and not any(pod.ip for pod in facts.engine_pods)


def _router_kind(router: Router | None) -> str | None:
    """Return the value of `status.router`; None, to keep it, until the last pod of another kind has ended."""
    if router is None or router.is_vllm_router:
        return ""
    return None if router.watches_pods else ENVOY


def _is_router_bypassed(inputs: ReconcileInputs, service: InferenceService) -> bool:
    """Return True while the address must select the engines, until the first router is ready.

    An immediate switch from routing policy None would leave the address without an endpoint. The
    live Kubernetes Service is recognized by the digest that it has without a router.
    """
    routing = service.spec.routing
    address = inputs.snapshot.children.get((Kind.SERVICE, names.address_name(service.name)))
    if routing.policy is RoutingPolicy.NONE or address is None or inputs.facts.ready_routers:
        return False
    plain = routing.model_copy(update={"policy": RoutingPolicy.NONE})
    unrouted = replace(service, spec=service.spec.model_copy(update={"routing": plain}))
    return address.digest == digest_of(desired_address(unrouted))


def _scales(children: ChildrenDecision, service: str) -> bool:
    """Return True if this reconcile writes the engine Deployment."""
    return any(
        item.kind == Kind.DEPLOYMENT and item.name == names.engine_name(service)
        for item in children.actions
    )


def _template(
    inputs: ReconcileInputs, wanted: Wanted, revision: str | None, *, is_held: bool
) -> Manifest | None:
    """Return the template to write: that of a ReplicaSet, else the wanted one unless it must wait."""
    if revision is not None:
        return inputs.snapshot.templates.get(revision)
    return None if is_held else wanted.template


def _target_hash(
    inputs: ReconcileInputs, wanted: Wanted, revision: str | None, *, is_held: bool
) -> str:
    """Return the hash of the template to write, as `_template` chooses it; "" if there is none."""
    if revision is None:
        return "" if is_held else wanted.template_hash
    found = [item for item in inputs.facts.revisions if item.name == revision]
    return found[0].template_hash if found else ""


def _missing_templates(inputs: ReconcileInputs, name: str | None) -> tuple[str, ...]:
    """Return the ReplicaSet whose template is to be written and that the snapshot lacks."""
    return (name,) if name and name not in inputs.snapshot.templates else ()


def _with_conflicts(assessment: Assessment, conflicts: Sequence[Conflict]) -> Assessment:
    """Return the assessment, blocked if a child's name is taken by another object."""
    foreign = [item for item in conflicts if not item.is_leftover]
    if not foreign:
        return assessment
    first = foreign[0]
    text = say(
        f"{first.kind} {first.name} already exists and does not belong to this service",
        "",
        "Fleetkeeper did not change it. Delete it, or give the InferenceService another name.",
    )
    return replace(assessment, blocked=Problem(Reason.NAME_CONFLICT, text))
