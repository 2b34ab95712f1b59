"""The states of single replicas in the status: a bounded list for people on call.

A state has a time, the time of its change. It is read from the Kubernetes API where the API has it.
Otherwise it is the time of the reconcile whose status first reports the change, and is then kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.names import ENGINE_CONTAINER
from fleetkeeper.api.status import MAX_REPLICA_STATES
from fleetkeeper.api.status_enums import ReplicaStage
from fleetkeeper.reconcile.observe.facts import GONE_PHASES
from fleetkeeper.reconcile.status.assessment import Assessment
from fleetkeeper.reconcile.types import Pod
from fleetkeeper_contract import rfc3339

ENGINE_STAGES = frozenset({ReplicaStage.WEIGHTS, ReplicaStage.LOAD, ReplicaStage.WARM_UP})
"""Stages that only the engine knows."""

Status = dict[str, Any]


def status_replicas(assessment: Assessment, now: float) -> Status:
    """Return the states of the replicas, and the number of those that are left out.

    Replicas with a reason come first, then others that are not ready, then by name.
    """
    before = _previous(assessment.previous)
    pods = [pod for pod in assessment.pods if pod.phase not in GONE_PHASES]
    found = [(pod, *stage_and_reason(pod, assessment, before.get(pod.name) or {})) for pod in pods]
    found.sort(key=lambda item: (item[2] is None, item[1] is ReplicaStage.READY, item[0].name))
    listed = found[:MAX_REPLICA_STATES]
    states = []
    for pod, stage, reason in listed:
        # The engine measures the time of its stage at each reading: the first result is kept.
        start = assessment.starts.get(pod.name) if stage in ENGINE_STAGES else None
        changed = start.since if start else now
        states.append(_state(pod, stage, reason, before.get(pod.name) or {}, changed))
    return {
        "replicaStates": states or None,
        "unlistedReplicas": len(found) - len(listed) or None,
    }


def stage_and_reason(
    pod: Pod, assessment: Assessment, before: Mapping[str, Any]
) -> tuple[ReplicaStage, Reason | None]:
    """Return the stage of a replica, and why it makes no progress (None: unknown, or it does).

    `before` is its previous state. It stays while the control loop has no newer measurement.
    """
    problem = assessment.pod_problems.get(pod.name)
    reason = problem.reason if problem else None
    if pod.deleting:
        return ReplicaStage.DRAINING, None
    if _is_hung(pod, assessment, before):
        return ReplicaStage.FAILING, Reason.ENGINE_HUNG
    if pod.ready:
        return ReplicaStage.READY, None
    if pod.ejected_since is not None:
        return ReplicaStage.FAILING, reason or Reason.PODS_EJECTED
    return _start_stage(pod, assessment, before), reason


def _is_hung(pod: Pod, assessment: Assessment, before: Mapping[str, Any]) -> bool:
    if assessment.control is None:
        return assessment.control_pending and before.get("reason") == Reason.ENGINE_HUNG
    return pod.name in assessment.control.hung_pods


def _start_stage(pod: Pod, assessment: Assessment, before: Mapping[str, Any]) -> ReplicaStage:
    """Return the stage of a replica that was not ready yet."""
    if not pod.scheduled:
        return ReplicaStage.SCHEDULING
    if _has_ended(pod):
        return ReplicaStage.FAILING
    if _engine_since(pod) is None:
        return ReplicaStage.IMAGE
    if pod.name in assessment.starts:
        return assessment.starts[pod.name].stage
    known = [stage for stage in ENGINE_STAGES if stage == before.get("stage")]
    return known[0] if known else ReplicaStage.STARTING


def _has_ended(pod: Pod) -> bool:
    """Return True if a container failed. An init container that has done its work did not."""
    ends = [(c, end) for c in pod.containers for end in (c.terminated, c.last_terminated) if end]
    return any(not (container.init and end.exit_code == 0) for container, end in ends)


def _engine_since(pod: Pod) -> float | None:
    """Return when the engine's container started, None if it does not run."""
    times = [item.running_since for item in pod.containers if item.name == ENGINE_CONTAINER]
    return times[0] if times else None


def _state(
    pod: Pod, stage: ReplicaStage, reason: Reason | None, before: Mapping[str, Any], changed: float
) -> Status:
    """Return the state. `changed` is the time of a change for which the API has no time."""
    word = None if reason is None else str(reason)
    is_same = (before.get("stage"), before.get("reason")) == (str(stage), word)
    since = pod.ejected_since or (_since(pod, stage) if reason is None else None)
    state: Status = {"name": pod.name, "stage": str(stage)}
    if pod.node:
        state["node"] = pod.node
    if pod.template_hash:
        state["templateHash"] = pod.template_hash
    if word is not None:
        state["reason"] = word
    if since is not None:
        return {**state, "since": rfc3339.format(since)}
    is_kept = is_same and "since" in before
    return {**state, "since": before["since"] if is_kept else rfc3339.format(changed)}


def _since(pod: Pod, stage: ReplicaStage) -> float | None:
    """Return the time of the API at which the stage began, None if the API has none."""
    times = {
        ReplicaStage.SCHEDULING: pod.created,
        ReplicaStage.IMAGE: pod.scheduled_since,
        ReplicaStage.STARTING: _engine_since(pod),
        ReplicaStage.READY: pod.ready_since,
        ReplicaStage.DRAINING: pod.deleting_since,
    }
    return times.get(stage)


def _previous(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the previous states by name. Another author may have written anything."""
    states = status.get("replicaStates")
    listed: Sequence[Any] = states if isinstance(states, (list, tuple)) else ()
    return {str(item.get("name")): item for item in listed if isinstance(item, Mapping)}
