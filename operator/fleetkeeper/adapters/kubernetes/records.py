"""From live objects to the lean records that decisions need. Pure; missing parts mean unknown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from sys import intern
from typing import Any

from fleetkeeper.adapters.kubernetes.fields import manager_of_replicas, owned_digest
from fleetkeeper.api.names import (
    ANNOTATION_DELETION_COST,
    ANNOTATION_TEMPLATE_HASH,
    FIELD_MANAGER,
    GROUP,
    KIND,
    LABEL_COMPONENT,
    LABEL_SERVICE,
)
from fleetkeeper.plan.model import (
    Child,
    Container,
    Kind,
    ObjectCondition,
    ObjectEvent,
    Pod,
    Revision,
    Termination,
    Workload,
)
from fleetkeeper.plan.reasons import engine_line

ANNOTATION_REVISION = "deployment.kubernetes.io/revision"
MESSAGE_LIMIT = 1024
"""Characters kept of messages of others."""

Record = Child | Revision | Pod


@dataclass(frozen=True, slots=True)
class Seen:
    """A record, where it was seen, and how new it is."""

    kind: str
    namespace: str
    name: str
    version: int
    service: str | None
    record: Record
    mark: int = 0
    """Of a Deployment: equal as long as its digest cannot have changed."""


def seen(kind: str, live: Mapping[str, Any], before: Seen | None = None) -> Seen:
    """The record of a live object of this kind, with the service that it belongs to.

    The owner reference decides to whom it belongs; where there is none, the label does. `before` is
    what was seen of it last: a Deployment changes its status a dozen times for one change of its
    spec, and a digest is most of the work.
    """
    meta = live.get("metadata") or {}
    labels = meta.get("labels") or {}
    record: Record
    mark = 0
    if kind == "Pod":
        record = pod_record(live)
    elif kind == "ReplicaSet":
        record = revision_record(live)
    elif kind == Kind.DEPLOYMENT:
        mark = _mark(live)
        known = before.record if before is not None and before.mark == mark else None
        record = workload_record(live, known.digest if isinstance(known, Workload) else None)
    else:
        record = child_record(Kind(kind), live)
    return Seen(
        kind=intern(str(kind)),
        namespace=intern(str(meta.get("namespace", ""))),
        name=str(meta.get("name", "")),
        version=version_of(live),
        service=_owning_service(meta) or labels.get(LABEL_SERVICE),
        record=record,
        mark=mark,
    )


def _mark(live: Mapping[str, Any]) -> int:
    """Changes with everything that the digest is made of.

    The spec moves the generation. Of the metadata, labels, annotations and owners are taken as they
    are; our own apply, which may give a field up without changing it, moves its entry's time.
    """
    meta = live.get("metadata") or {}
    annotations = meta.get("annotations") or {}
    owners = ((o.get("uid"), o.get("controller")) for o in _maps(meta.get("ownerReferences")))
    times = (
        entry.get("time")
        for entry in _maps(meta.get("managedFields"))
        if entry.get("manager") == FIELD_MANAGER
    )
    return hash(
        (
            meta.get("uid"),
            meta.get("generation"),
            tuple(sorted((meta.get("labels") or {}).items())),
            tuple(sorted(item for item in annotations.items() if item[0] != ANNOTATION_REVISION)),
            tuple(owners),
            tuple(times),
        )
    )


def version_of(live: Mapping[str, Any]) -> int:
    """The resourceVersion as a number: Kubernetes promises that greater is newer (KEP-5504)."""
    text = str((live.get("metadata") or {}).get("resourceVersion") or "0")
    return int(text) if text.isdigit() else 0


def child_record(kind: Kind, live: Mapping[str, Any]) -> Child:
    """A child of any kind but Deployment."""
    return Child(**_child_fields(kind, live))


def workload_record(live: Mapping[str, Any], known_digest: str | None = None) -> Workload:
    """A Deployment."""
    spec, status = live.get("spec") or {}, live.get("status") or {}
    template = (spec.get("template") or {}).get("metadata") or {}
    surge = ((spec.get("strategy") or {}).get("rollingUpdate") or {}).get("maxSurge")
    return Workload(
        **_child_fields(Kind.DEPLOYMENT, live, known_digest),
        generation=_count((live.get("metadata") or {}).get("generation")),
        observed_generation=_count(status.get("observedGeneration")),
        template_hash=str((template.get("annotations") or {}).get(ANNOTATION_TEMPLATE_HASH, "")),
        desired_replicas=_count(spec.get("replicas"), 1),
        replicas_manager=intern(manager_of_replicas(live)),
        max_surge=surge if isinstance(surge, int) else None,
        replicas=_count(status.get("replicas")),
        ready_replicas=_count(status.get("readyReplicas")),
        updated_replicas=_count(status.get("updatedReplicas")),
        available_replicas=_count(status.get("availableReplicas")),
        conditions=tuple(_conditions(status.get("conditions"))),
    )


def _child_fields(
    kind: Kind, live: Mapping[str, Any], known_digest: str | None = None
) -> dict[str, Any]:
    meta = live.get("metadata") or {}
    # Items of a list carry no kind, and the digest of a Deployment leaves its replicas out.
    digest = known_digest or owned_digest({**live, "kind": kind.value})
    return {
        "kind": kind,
        "name": str(meta.get("name", "")),
        "uid": str(meta.get("uid", "")),
        "resource_version": str(meta.get("resourceVersion", "")),
        "digest": digest,
        "controller_uid": _controller_uid(meta),
        "service": (meta.get("labels") or {}).get(LABEL_SERVICE),
        "deleting": "deletionTimestamp" in meta,
    }


def revision_record(live: Mapping[str, Any]) -> Revision:
    """A ReplicaSet."""
    meta, spec, status = (
        live.get("metadata") or {},
        live.get("spec") or {},
        live.get("status") or {},
    )
    template = (spec.get("template") or {}).get("metadata") or {}
    number = str((meta.get("annotations") or {}).get(ANNOTATION_REVISION, ""))
    return Revision(
        name=str(meta.get("name", "")),
        uid=str(meta.get("uid", "")),
        deployment_uid=_controller_uid(meta) or "",
        number=int(number) if number.isdigit() else 0,
        template_hash=str((template.get("annotations") or {}).get(ANNOTATION_TEMPLATE_HASH, "")),
        created=seconds_of(meta.get("creationTimestamp")) or 0.0,
        desired_replicas=_count(spec.get("replicas"), 1),
        replicas=_count(status.get("replicas")),
        ready_replicas=_count(status.get("readyReplicas")),
    )


def pod_record(live: Mapping[str, Any]) -> Pod:
    """A pod."""
    meta, spec, status = (
        live.get("metadata") or {},
        live.get("spec") or {},
        live.get("status") or {},
    )
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    conditions = {c.get("type"): c for c in _maps(status.get("conditions"))}
    ready, scheduled = conditions.get("Ready") or {}, conditions.get("PodScheduled") or {}
    is_ready = ready.get("status") == "True"
    return Pod(
        name=str(meta.get("name", "")),
        uid=str(meta.get("uid", "")),
        service=str(labels.get(LABEL_SERVICE, "")),
        component=intern(str(labels.get(LABEL_COMPONENT, ""))),
        revision_uid=_controller_uid(meta),
        template_hash=str(annotations.get(ANNOTATION_TEMPLATE_HASH, "")),
        created=seconds_of(meta.get("creationTimestamp")) or 0.0,
        phase=intern(str(status.get("phase") or "Pending")),
        ip=str(status.get("podIP") or ""),
        node=intern(str(spec.get("nodeName") or "")),
        ready=is_ready,
        ready_since=seconds_of(ready.get("lastTransitionTime")) if is_ready else None,
        ejected_since=None if is_ready else _ejected_since(status, ready),
        scheduled=scheduled.get("status") == "True" or bool(spec.get("nodeName")),
        unschedulable=_unschedulable(scheduled),
        deleting="deletionTimestamp" in meta,
        deletion_cost=_cost(annotations.get(ANNOTATION_DELETION_COST)),
        containers=tuple(_containers(status)),
    )


def _ejected_since(status: Mapping[str, Any], ready: Mapping[str, Any]) -> float | None:
    """When a started container that still runs stopped being ready; a starting one never was ready.

    Ready turned False after the container's present run began: only its own readiness does that.
    """
    turned = seconds_of(ready.get("lastTransitionTime"))
    if turned is None:
        return None
    for found in _maps(status.get("containerStatuses")):
        running = (found.get("state") or {}).get("running") or {}
        began = seconds_of(running.get("startedAt"))
        is_out = bool(found.get("started")) and not found.get("ready")
        if is_out and began is not None and began < turned:
            return turned
    return None


def event_record(live: Mapping[str, Any]) -> ObjectEvent:
    """An event of either API, as `v1` shows it."""
    series = live.get("series") or {}
    seen_at = (
        series.get("lastObservedTime")
        or live.get("lastTimestamp")
        or live.get("eventTime")
        or live.get("firstTimestamp")
    )
    return ObjectEvent(
        pod_uid=str((live.get("involvedObject") or {}).get("uid", "")),
        reason=str(live.get("reason") or ""),
        message=_short(live.get("message")),
        seen=seconds_of(seen_at) or 0.0,
    )


def seconds_of(timestamp: object) -> float | None:
    """Seconds since the epoch of an RFC 3339 time; None where there is no readable one."""
    if not isinstance(timestamp, str):
        return None
    try:
        return datetime.fromisoformat(timestamp).timestamp()
    except ValueError:
        return None


def _containers(status: Mapping[str, Any]) -> Iterable[Container]:
    for key, init in (("initContainerStatuses", True), ("containerStatuses", False)):
        for found in _maps(status.get(key)):
            state, last = found.get("state") or {}, found.get("lastState") or {}
            waiting = state.get("waiting") or {}
            yield Container(
                name=intern(str(found.get("name", ""))),
                init=init,
                ready=bool(found.get("ready")),
                restarts=_count(found.get("restartCount")),
                waiting_reason=intern(str(waiting.get("reason") or "")),
                waiting_message=_short(waiting.get("message")),
                terminated=_termination(state.get("terminated")),
                last_terminated=_termination(last.get("terminated")),
            )


def _termination(found: object) -> Termination | None:
    if not isinstance(found, Mapping):
        return None
    return Termination(
        exit_code=_count(found.get("exitCode")),
        reason=intern(str(found.get("reason") or "")),
        message=_last_word(found.get("message")),
        finished=seconds_of(found.get("finishedAt")),
    )


def _last_word(message: object) -> str:
    """The engine's termination line without the output that it quotes; of other words the end."""
    text = str(message or "")
    line = engine_line(text)
    if not line:
        return text[-MESSAGE_LIMIT:]
    return json.dumps({key: _short(line.get(key)) for key in ("class", "message")})


def _conditions(found: object) -> Iterable[ObjectCondition]:
    for condition in _maps(found):
        yield ObjectCondition(
            type=intern(str(condition.get("type", ""))),
            status=intern(str(condition.get("status", ""))),
            reason=intern(str(condition.get("reason") or "")),
            message=_short(condition.get("message")),
        )


def _unschedulable(scheduled: Mapping[str, Any]) -> str:
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return _short(scheduled.get("message")) or "Unschedulable"
    return ""


def _owning_service(meta: Mapping[str, Any]) -> str | None:
    for owner in _maps(meta.get("ownerReferences")):
        group = str(owner.get("apiVersion", "")).partition("/")[0]
        if owner.get("controller") and group == GROUP and owner.get("kind") == KIND:
            return str(owner.get("name", "")) or None
    return None


def _controller_uid(meta: Mapping[str, Any]) -> str | None:
    for owner in _maps(meta.get("ownerReferences")):
        if owner.get("controller"):
            return str(owner.get("uid", "")) or None
    return None


def _cost(annotation: object) -> int:
    try:
        return int(str(annotation))
    except ValueError:
        return 0


def _count(value: object, default: int = 0) -> int:
    return value if isinstance(value, int) else default


def _short(message: object) -> str:
    return str(message or "")[:MESSAGE_LIMIT]


def _maps(found: object) -> list[Mapping[str, Any]]:
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []
