"""Inputs of the control loop, read from the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.names import ENGINE_CONTAINER, Component, engine_name
from fleetkeeper.api.parse import InferenceService, InvalidService, parse_service
from fleetkeeper.api.profiles.profile import ProfileCatalog, UnknownProfile
from fleetkeeper.autoscale.memory import ControlMemory, memory_from_status
from fleetkeeper.autoscale.rules.remedies import remedy_in_force
from fleetkeeper.autoscale.settings import settings_of
from fleetkeeper.autoscale.types import ControlSettings, PodView
from fleetkeeper.common.activation import parse_suspended
from fleetkeeper.common.nodes import ANY_NODE, NodeNeeds
from fleetkeeper.common.sleep import parse_sleep
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.choice.engine import parse_engine
from fleetkeeper.reconcile.observe.diagnosis import decide_diagnosis
from fleetkeeper.reconcile.observe.facts import GONE_PHASES, facts_of
from fleetkeeper.reconcile.rollout import is_scale_up_blocked
from fleetkeeper.reconcile.types import Kind, Pod, Snapshot, Workload
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.cache import Cache


@dataclass(frozen=True, slots=True)
class Fleet:
    """The live state of one service: the replicas of its engine Deployment, and its pods."""

    replicas: int
    pods: tuple[PodView, ...]
    out_of_memory_pods: tuple[str, ...] = ()
    """Names of pods whose engine ran out of accelerator memory."""
    scale_up_blocked: str = ""
    """Reason why more replicas would not help; empty if they would."""
    rolling_out: bool = False
    """True if a pod does not have the Deployment's template, or Kubernetes has not observed the
    last change."""
    gpus_per_replica: int = 0
    """Accelerators that a pod of the live template requests."""
    node_needs: NodeNeeds = ANY_NODE
    """What such a pod needs of a node."""


def parsed_service(resource: Manifest, *, floating_revisions: bool) -> InferenceService | None:
    """Return the service; None if it is invalid (the planner reports why)."""
    try:
        return parse_service(resource, allow_floating_revisions=floating_revisions)
    except InvalidService:
        return None


def read_settings(
    service: InferenceService, memory: ControlMemory, catalog: ProfileCatalog
) -> ControlSettings:
    """Return the spec in the loop's units, with the profile's bound and a remedy in force applied."""
    resumed, sleep = parse_suspended(service.status), parse_sleep(service.status)
    cap = _cap_percent(service, catalog)
    plain = settings_of(
        service.spec, service.generation, cap_percent=cap, resumed=resumed, sleep=sleep
    )
    remedy = remedy_in_force(memory.remedy, plain)
    if remedy is None:
        return plain
    return settings_of(
        service.spec,
        service.generation,
        max_sequences=remedy.max_sequences,
        cap_percent=remedy.cap_percent,
        resumed=resumed,
        sleep=sleep,
    )


def _cap_percent(service: InferenceService, catalog: ProfileCatalog) -> int:
    """Return the memory cap of the service's engines.

    A spec that asks for more than its profile allows is refused, and its engines keep a cap that the
    profile allows.
    """
    known = parse_engine(service.status)
    try:
        profile = catalog.resolve(known.profile if known else service.spec.engine.profile)
    except UnknownProfile:
        return service.spec.memory.cap_percent
    return profile.cap_percent(service.spec)


def starting_memory(service: InferenceService, now: float) -> ControlMemory:
    """Return the memory with which a new leader starts: what the status of the service holds."""
    return memory_from_status(
        service.status, service.generation, service.spec.memory.cap_percent, now
    )


def observe_fleet(cache: Cache, key: Key, now: float) -> Fleet | None:
    """Return the cached fleet; None while there is no engine Deployment."""
    children = cache.children(key)
    engine = children.get((Kind.DEPLOYMENT, engine_name(key.name)))
    if not isinstance(engine, Workload):
        return None
    pods = tuple(pod for pod in cache.pods(key) if pod.component == Component.ENGINE)
    views = tuple(_pod_view(pod) for pod in pods)
    rolling_out = _is_rolling_out(engine, pods)
    fleet = (
        Fleet(engine.desired_replicas, views)
        if all(pod.ready for pod in pods)
        else _troubled_fleet(cache, key, engine, views, now)
    )
    return replace(
        fleet,
        rolling_out=rolling_out,
        gpus_per_replica=engine.accelerators,
        node_needs=engine.node_needs,
    )


def is_unseen(service: InferenceService | None) -> bool:
    """Return whether the status does not show this spec as reconciled: its changes are to come."""
    return service is None or service.status.get("observedGeneration") != service.generation


def _is_rolling_out(engine: Workload, pods: Sequence[Pod]) -> bool:
    living = (pod for pod in pods if pod.phase not in GONE_PHASES)
    return engine.observed_generation < engine.generation or any(
        pod.template_hash != engine.template_hash for pod in living
    )


def _troubled_fleet(
    cache: Cache, key: Key, engine: Workload, views: tuple[PodView, ...], now: float
) -> Fleet:
    """Return the fleet with the problems that its unready pods show."""
    snapshot = Snapshot(
        resource={"metadata": {"namespace": key.namespace, "name": key.name}},
        children=cache.children(key),
        revisions=cache.revisions(key),
        pods=cache.pods(key),
    )
    facts = facts_of(snapshot, key.name)
    found = decide_diagnosis(snapshot, facts, now)
    out_of_memory = tuple(
        name for name, problem in found.by_pod if problem.reason is Reason.CUDA_OUT_OF_MEMORY
    )
    problems = found.current_problems
    blocked = problems[0].message if is_scale_up_blocked(facts, problems) else ""
    return Fleet(engine.desired_replicas, views, out_of_memory, blocked)


def _pod_view(pod: Pod) -> PodView:
    return PodView(
        name=pod.name,
        uid=pod.uid,
        created=pod.created,
        ready=pod.ready,
        ready_since=pod.ready_since,
        node=pod.node,
        deleting=pod.deleting,
        ip=pod.ip,
        scheduled_since=pod.scheduled_since,
        engine_since=_engine_since(pod),
    )


def _engine_since(pod: Pod) -> float | None:
    """Return when the engine's container first started; None if it does not run or was restarted."""
    engines = [
        item for item in pod.containers if item.name == ENGINE_CONTAINER and not item.restarts
    ]
    return engines[0].running_since if engines else None
