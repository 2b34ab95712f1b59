"""The status of a service: built in every reconcile, written only when its content changes.

Times in the status are times of changes. Values that change continuously are metrics instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetkeeper.api import names
from fleetkeeper.api.conditions import ConditionType, Reason
from fleetkeeper.api.profiles.profile import effective_resources
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.choice.engine import EngineDecision
from fleetkeeper.reconcile.last_good import LastGood
from fleetkeeper.reconcile.replicas import ReplicaDecision, Source
from fleetkeeper.reconcile.status.assessment import Assessment
from fleetkeeper.reconcile.status.conditions import decide_conditions
from fleetkeeper.reconcile.status.control import report_to_status
from fleetkeeper.reconcile.status.replica_states import status_replicas
from fleetkeeper_contract import rfc3339

WRITE_EVERY_S = 10.0
"""The minimum time between two writes that change neither a condition nor a reconcile's input."""

MAX_WRITE_EVERY_S = 120.0
WRITE_EVERY_S_PER_REPLICA = 1.2
"""This minimum grows with the replicas: a rollout replaces them all, one after the other, and each
passes through five stages. So 100 replicas have a write each two minutes, not each ten seconds."""

MOVING_S = 3.0
"""The time for which the status does not report progress that Fleetkeeper's own write started."""

CONTROL_PIECES = ("scaling", "batching", "breaker", "memory", "remedy", "decisions")
"""Parts of the status from the control loop's report. Without a report they stay unchanged."""

MEMORY = ("engine", "rollback", "remedy", "suspendedReplicas", "sleep")
"""Parts of the status that later reconciles need and that are stored nowhere else."""

Status = dict[str, Any]


def desired_status(
    assessment: Assessment, engine: EngineDecision | None, last_good: LastGood | None, now: float
) -> Status:
    """Return the complete status without empty parts."""
    status: Status = {"observedGeneration": assessment.generation}
    status |= status_counts(assessment)
    status |= status_replicas(assessment, now)
    status |= status_identity(assessment)
    status |= status_engine(assessment, engine)
    status |= status_rollout(assessment, last_good)
    status |= status_suspension(assessment)
    status["sleep"] = status_sleep(assessment)
    status |= status_control(assessment, now)
    status["summary"] = status_summary(assessment, status)
    status["conditions"] = decide_conditions(assessment, now)
    return {key: value for key, value in status.items() if value not in ({}, None)}


def status_counts(assessment: Assessment) -> Status:
    """Return the numbers of engine pods: all, ready, available, and of the live template."""
    facts = assessment.facts
    return {
        "replicas": len(facts.engine_pods),
        "readyReplicas": facts.ready_replicas,
        "availableReplicas": facts.available_replicas,
        "updatedReplicas": facts.updated_replicas,
    }


def status_identity(assessment: Assessment) -> Status:
    """Return the address, the kind of the router, and the selector for the scale subresource.

    The gateway sends requests to a service with an address alone, so there is none while the Kubernetes
    Service belongs to somebody else. Without a readable spec, or while there is no such Service, the
    previous address is kept.
    """
    service, previous = assessment.service, assessment.previous
    status = {key: previous.get(key) for key in ("url", "selector", "router")}
    if service is not None:
        status["selector"] = names.selector_text(service.name)
        if assessment.owns_address:
            status["url"] = names.service_url(service.name, service.namespace)
    if assessment.router_kind is not None:
        status["router"] = assessment.router_kind or None
    if assessment.owns_address is False:
        status["url"] = None
    return status


def status_engine(assessment: Assessment, engine: EngineDecision | None) -> Status:
    """Return the profile in use and the values that follow from it, else the previous ones."""
    kept = {
        key: assessment.previous[key]
        for key in ("engine", "effective")
        if key in assessment.previous
    }
    if assessment.service is None or engine is None or engine.profile is None:
        return kept
    spec = assessment.service.spec
    effective: Status = {
        "accelerators": effective_resources(spec, engine.profile).accelerators,
    }
    if spec.breaker.fallback_replicas is not None:
        effective["fallbackReplicas"] = spec.breaker.fallback_replicas
    return {"engine": engine.to_status(), "effective": effective}


def status_rollout(assessment: Assessment, last_good: LastGood | None) -> Status:
    """Return the last good template and the rollback, which later reconciles need."""
    reported: Status = {}
    if last_good:
        reported["lastGood"] = last_good.to_status()
    if assessment.rollout.rollback:
        reported["rollback"] = assessment.rollout.rollback.to_status()
    elif assessment.blocked and "rollback" in assessment.previous:
        reported["rollback"] = assessment.previous["rollback"]
    return reported


def status_suspension(assessment: Assessment) -> Status:
    """Return the number of replicas to which the service returns, else the previous one."""
    is_unknown = assessment.service is None or assessment.blocked is not None
    kept = assessment.previous.get("suspendedReplicas")
    return {"suspendedReplicas": kept if is_unknown else assessment.suspended_replicas}


def status_sleep(assessment: Assessment) -> Status | None:
    """Return the sleep of the service, else the previous one."""
    if assessment.sleep is None:
        previous: Status | None = assessment.previous.get("sleep")
        return previous
    return assessment.sleep.to_status()


def status_control(assessment: Assessment, now: float) -> Status:
    """Return the parts from the control loop's report, else the previous ones.

    `scaling` is added if the report lacks it.
    """
    if assessment.control is None:
        previous = assessment.previous
        reported = {key: previous[key] for key in CONTROL_PIECES if key in previous}
    else:
        reported = report_to_status(assessment.control)
    if assessment.replicas is not None and (
        assessment.control is None or assessment.control.scaling is None
    ):
        before = assessment.previous.get("scaling")
        if not (assessment.control_pending and _is_desired(before, assessment.replicas.value)):
            reported["scaling"] = status_scaling(assessment.replicas, before, now)
    return reported


def _is_desired(scaling: object, value: int) -> bool:
    return isinstance(scaling, Mapping) and scaling.get("desired") == value


def status_scaling(decision: ReplicaDecision, before: object, now: float) -> Status:
    """Return the number of replicas and its reason; `since` is the time of the last change.

    An unchanged number keeps the reason for which it was set.
    """
    known = before if isinstance(before, Mapping) else {}
    is_same = known.get("desired") == decision.value and "since" in known
    if is_same and decision.source is Source.UNCHANGED:
        return dict(known)
    reported: Status = {
        "desired": decision.value,
        "reason": str(decision.reason),
        "message": decision.message,
    }
    is_same = is_same and known.get("reason") == reported["reason"]
    return {**reported, "since": known["since"] if is_same else rfc3339.format(now)}


def status_summary(assessment: Assessment, status: Status) -> Status:
    """Return the values of the printer columns."""
    wanted = assessment.replicas.value if assessment.replicas else assessment.facts.live_replicas
    return {
        "ready": f"{assessment.facts.ready_replicas}/{wanted if wanted is not None else 0}",
        "breaker": _breaker_summary(status.get("breaker")),
    }


def _breaker_summary(breaker: object) -> str:
    """Return the breakers that are not closed: "control open", "batch open", "prometheus lost".

    If all are closed, the text is "closed".
    """
    if not isinstance(breaker, Mapping):
        return "closed"
    load = breaker.get("load")
    states = {"control": breaker.get("control"), **(load if isinstance(load, Mapping) else {})}
    texts = {"Open": "open", "HalfOpen": "half-open"}
    reported = [
        f"{name} {texts[str(state)]}" for name, state in states.items() if str(state) in texts
    ]
    if str(breaker.get("source")) == "Open":
        reported.append("prometheus lost")
    return ", ".join(reported) or "closed"


def decide_status_write(
    desired: Manifest,
    present: Mapping[str, Any],
    *,
    written: float | None,
    children_written: float | None,
    now: float,
) -> tuple[Manifest | None, float | None]:
    """Return the status to write, or None and the seconds until a write is due (None: up to date).

    Changes of conditions and of the inputs of later reconciles are written at once, other changes
    at most once in 10 s, and less often in large services. For 3 s after a write to a child, a
    status that only reports progress waits: often the progress ends by then and one write is
    enough. Problems never wait. The first `lastGood` alone causes no write: it is added to the
    next one.

    `written` and `children_written` are the times of the last writes of the status and of a child.
    A write in the same plan counts as now.
    """
    if desired == present or _adds_only_last_good(desired, present):
        return None, None
    left = 0.0
    if children_written is not None and _only_moves(desired) and _remembers(desired, present):
        left = children_written + MOVING_S - now
    if written is not None and not _is_urgent(desired, present):
        left = max(left, written + _write_every_s(desired, present) - now)
    return (None, left) if left > 0 else (desired, None)


def _write_every_s(desired: Mapping[str, Any], present: Mapping[str, Any]) -> float:
    """Return the minimum time between two writes that only report movement.

    A new reason of a replica does not wait longer because there are many replicas.
    """
    if _reasons(desired) - _reasons(present):
        return WRITE_EVERY_S
    replicas = float(desired.get("replicas") or 0)
    return max(WRITE_EVERY_S, min(WRITE_EVERY_S_PER_REPLICA * replicas, MAX_WRITE_EVERY_S))


def _reasons(status: Mapping[str, Any]) -> set[tuple[Any, Any]]:
    """Return the replicas that make no progress, with their reasons."""
    return {
        (item.get("name"), item["reason"])
        for item in status.get("replicaStates") or ()
        if "reason" in item
    }


def _adds_only_last_good(desired: Mapping[str, Any], present: Mapping[str, Any]) -> bool:
    """Return True if the first last good template is the only change."""
    return "lastGood" not in present and (
        {key: value for key, value in desired.items() if key != "lastGood"} == present
    )


def _only_moves(status: Mapping[str, Any]) -> bool:
    """Return True if the status reports progress and no problem.

    NoReadyRouter counts as progress: engines may all be ready a moment before the first router.
    """
    found = {item.get("type"): item for item in status.get("conditions") or ()}
    states = {kind: item.get("status") for kind, item in found.items()}
    ready = found.get(ConditionType.READY, {}).get("reason")
    return (
        (states.get(ConditionType.PROGRESSING) == "True" or ready == Reason.NO_READY_ROUTER)
        and ConditionType.STALLED not in states
        and states.get(ConditionType.DEGRADED) != "True"
    )


def _remembers(desired: Mapping[str, Any], present: Mapping[str, Any]) -> bool:
    """Return True if a crash now would lose nothing that later reconciles need."""
    return all(desired.get(key) == present.get(key) for key in MEMORY if present or key != "engine")


def _is_urgent(desired: Mapping[str, Any], present: Mapping[str, Any]) -> bool:
    return _meaning(desired) != _meaning(present)


def _meaning(status: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what readers and reconciles act on: memory, and conditions without their messages."""
    conditions = tuple(
        sorted(
            (
                item.get("type"),
                item.get("status"),
                item.get("reason"),
                item.get("observedGeneration"),
            )
            for item in status.get("conditions") or ()
        )
    )
    memory = tuple(status.get(key) for key in ("observedGeneration", *MEMORY))
    return (conditions, *memory)
