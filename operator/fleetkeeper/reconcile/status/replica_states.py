"""The states of single replicas in the status: a bounded list for people on call.

A state has a time, the time of its change. It is read from the Kubernetes API where the API has it.
Otherwise it is the time of the first reconcile that saw the change, and is then kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleetkeeper.api import rfc3339
from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.status import MAX_REPLICA_STATES
from fleetkeeper.api.status_enums import ReplicaStage
from fleetkeeper.reconcile.observe.facts import GONE_PHASES
from fleetkeeper.reconcile.status.assessment import Assessment
from fleetkeeper.reconcile.types import Pod

Status = dict[str, Any]


def status_replicas(assessment: Assessment, now: float) -> Status:
    """Return the states of the replicas, and the number of those that are left out.

    Replicas with a reason come first, then others that are not ready, then by name.
    """
    pods = [pod for pod in assessment.pods if pod.phase not in GONE_PHASES]
    found = [(pod, *stage_and_reason(pod, assessment)) for pod in pods]
    found.sort(key=lambda item: (item[2] is None, item[1] is ReplicaStage.READY, item[0].name))
    listed = found[:MAX_REPLICA_STATES]
    before = _previous(assessment.previous)
    states = [
        _state(pod, stage, reason, before.get(pod.name), now) for pod, stage, reason in listed
    ]
    return {
        "replicaStates": states or None,
        "unlistedReplicas": len(found) - len(listed) or None,
    }


def stage_and_reason(pod: Pod, assessment: Assessment) -> tuple[ReplicaStage, Reason | None]:
    """Return the stage of a replica, and why it makes no progress (None: unknown, or it does)."""
    problem = assessment.pod_problems.get(pod.name)
    reason = problem.reason if problem else None
    if pod.deleting:
        return ReplicaStage.DRAINING, None
    hung = assessment.control.hung_pods if assessment.control else ()
    if pod.name in hung:
        return ReplicaStage.FAILING, Reason.ENGINE_HUNG
    if pod.ready:
        return ReplicaStage.READY, None
    if pod.ejected_since is not None:
        return ReplicaStage.FAILING, reason or Reason.PODS_EJECTED
    if not pod.scheduled:
        return ReplicaStage.SCHEDULING, reason
    if _has_ended(pod):
        return ReplicaStage.FAILING, reason
    return (ReplicaStage.IMAGE if _engine_since(pod) is None else ReplicaStage.STARTING), reason


def _has_ended(pod: Pod) -> bool:
    """Return True if a container failed. An init container that has done its work did not."""
    ends = [(c, end) for c in pod.containers for end in (c.terminated, c.last_terminated) if end]
    return any(not (container.init and end.exit_code == 0) for container, end in ends)


def _engine_since(pod: Pod) -> float | None:
    """Return when the engine's container started, None if it does not run."""
    times = [item.running_since for item in pod.containers if not item.init]
    return times[0] if times else None


def _state(
    pod: Pod,
    stage: ReplicaStage,
    reason: Reason | None,
    before: Mapping[str, Any] | None,
    now: float,
) -> Status:
    word = None if reason is None else str(reason)
    kept = before or {}
    is_same = (kept.get("stage"), kept.get("reason")) == (str(stage), word) and "since" in kept
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
    return {**state, "since": kept["since"] if is_same else rfc3339.format(now)}


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
