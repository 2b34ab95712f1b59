"""Lean records of live objects, with the fields that decisions need. Pure.

A missing field is unknown. An unreadable field gets a default if decisions can do without it. If it
identifies the object or counts something, the object is `Unread`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from sys import intern
from typing import Any

from fleetkeeper.adapters.kubernetes.fields import manager_of_replicas, owned_digest
from fleetkeeper.adapters.kubernetes.pod_records import pod_record
from fleetkeeper.api.names import (
    ANNOTATION_TEMPLATE_HASH,
    FIELD_MANAGER,
    GROUP,
    KIND,
    LABEL_SERVICE,
)
from fleetkeeper.common.budget import accelerators_of
from fleetkeeper.common.nodes import NodeNeeds
from fleetkeeper.reconcile.manifests.engine_document import model_of
from fleetkeeper.reconcile.types import (
    Child,
    Job,
    Kind,
    ObjectCondition,
    Pod,
    Revision,
    Workload,
)
from fleetkeeper_contract import rfc3339
from fleetkeeper_kube.reading import (
    UNREAD,
    Place,
    Unreadable,
    as_map,
    controller_uid,
    count,
    digits,
    maps,
    message,
    place_of,
    required_count,
    required_map,
    required_name,
    text,
    version_of,
)

ANNOTATION_REVISION = "deployment.kubernetes.io/revision"
MAX_CONDITIONS = 8
"""Conditions kept of a Deployment; Kubernetes writes three."""

JOB_ENDS = frozenset({"Complete", "Failed"})
"""The conditions with which Kubernetes ends a Job."""

Record = Child | Revision | Pod


@dataclass(frozen=True, slots=True)
class Seen(Place):
    """The record of an object that was seen."""

    service: str | None
    record: Record
    mark: int = 0
    """For a Deployment: unchanged as long as its digest cannot have changed."""


@dataclass(frozen=True, slots=True)
class Unread(Place):
    """An object that exists but cannot be read.

    `service` is the one that it claims to belong to; None if that cannot be read either.
    """

    service: str | None
    why: str


def observe(kind: str, live: Mapping[str, Any], before: Seen | None = None) -> Seen | Unread:
    """Return the readable or unreadable state of an object from any writer.

    Raises:
        Unreadable: its name or namespace cannot be read, so it cannot be identified.
    """
    place = place_of(kind, live)
    try:
        return seen(kind, live, before)
    except Unreadable as problem:
        why = str(problem)
    except Exception as defect:  # noqa: BLE001 -- one object must never stop the watch of all
        why = f"{type(defect).__name__}: {text(str(defect))}"
    service = _service_of(as_map(live.get("metadata")))
    return Unread(place.kind, place.namespace, place.name, place.version, service, why)


def seen(kind: str, live: Mapping[str, Any], before: Seen | None = None) -> Seen:
    """Return the record of a live object of this kind, with the service that it belongs to.

    The owner reference decides which service that is; without one, the label does. `before` is the
    last state, which saves computing the digest again: that is most of the work, and a Deployment
    changes its status a dozen times for one change of its spec.

    Raises:
        Unreadable: its identity or a count cannot be read.
    """
    if UNREAD in live:
        raise Unreadable(text(live[UNREAD]))
    meta = _identity(live)
    record: Record
    mark = 0
    if kind == "Pod":
        record = pod_record(live)
    elif kind == "ReplicaSet":
        record = revision_record(live)
    elif kind == Kind.DEPLOYMENT:
        mark = _mark(meta)
        known = before.record if before is not None and before.mark == mark else None
        record = workload_record(live, known.digest if isinstance(known, Workload) else None)
    elif kind == Kind.JOB:
        record = job_record(live)
    else:
        record = child_record(Kind(kind), live)
    return Seen(
        kind=intern(str(kind)),
        namespace=intern(text(meta.get("namespace"))),
        name=text(meta.get("name")),
        version=version_of(live),
        service=_service_of(meta),
        record=record,
        mark=mark,
    )


def _identity(live: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata, after checking that the fields that identify the object are readable.

    Raises:
        Unreadable: one of them is not.
    """
    meta = required_map(live.get("metadata"), "metadata")
    for field in ("name", "namespace", "uid"):
        if field in meta:
            required_name(meta[field], f"metadata.{field}")
    version = meta.get("resourceVersion")
    if version is not None and not digits(version):
        raise Unreadable("metadata.resourceVersion is not a number")
    labels = required_map(meta.get("labels"), "metadata.labels")
    if not isinstance(labels.get(LABEL_SERVICE, ""), str):
        raise Unreadable(f"the label {LABEL_SERVICE} is not a string")
    owners = meta.get("ownerReferences")
    if owners is not None and maps(owners) != owners:
        raise Unreadable("metadata.ownerReferences is not a list of objects")
    return meta


def _mark(meta: Mapping[str, Any]) -> int:
    """Return a hash that changes with every input of the digest.

    The generation covers the spec. Labels, annotations and owners are included as they are. The time
    of our entry in managedFields covers our own apply, which may give up a field without changing it.
    """
    annotations = as_map(meta.get("annotations"))
    owners = [(o.get("uid"), o.get("controller")) for o in maps(meta.get("ownerReferences"))]
    times = [
        entry.get("time")
        for entry in maps(meta.get("managedFields"))
        if entry.get("manager") == FIELD_MANAGER
    ]
    parts = (
        meta.get("uid"),
        meta.get("generation"),
        sorted((key, str(value)) for key, value in as_map(meta.get("labels")).items()),
        sorted(
            (key, str(value)) for key, value in annotations.items() if key != ANNOTATION_REVISION
        ),
        owners,
        times,
    )
    return hash(repr(parts))


def child_record(kind: Kind, live: Mapping[str, Any]) -> Child:
    """Return the record of a child of any kind but Deployment and Job."""
    return Child(**_child_fields(kind, live))


def job_record(live: Mapping[str, Any]) -> Job:
    """Return the record of a Job.

    Raises:
        Unreadable: its status cannot be read.
    """
    status = required_map(live.get("status"), "status")
    ends = (
        condition
        for condition in _conditions(status.get("conditions"))
        if condition.type in JOB_ENDS and condition.status == "True"
    )
    return Job(**_child_fields(Kind.JOB, live), end=next(ends, None))


def _surge_record(surge: object) -> int | None:
    """Return a surge that is a number. "0%" is the number 0; another percentage is unknown."""
    if surge == "0%":
        return 0
    return count(surge) if isinstance(surge, int) else None


def workload_record(live: Mapping[str, Any], known_digest: str | None = None) -> Workload:
    """Return the record of a Deployment.

    Raises:
        Unreadable: a count of it cannot be read.
    """
    meta = required_map(live.get("metadata"), "metadata")
    spec = required_map(live.get("spec"), "spec")
    status = required_map(live.get("status"), "status")
    surge = as_map(as_map(spec.get("strategy")).get("rollingUpdate")).get("maxSurge")
    pod = as_map(as_map(spec.get("template")).get("spec"))
    first: Mapping[str, Any] = next(iter(maps(pod.get("containers"))), {})

    def counted(field: str) -> int:
        return required_count(status.get(field), f"status.{field}")

    return Workload(
        **_child_fields(Kind.DEPLOYMENT, live, known_digest),
        generation=required_count(meta.get("generation"), "metadata.generation"),
        observed_generation=counted("observedGeneration"),
        template_hash=_template_hash(spec),
        desired_replicas=required_count(spec.get("replicas"), "spec.replicas", 1),
        replicas_manager=intern(text(manager_of_replicas(live))),
        max_surge=_surge_record(surge),
        accelerators=accelerators_of(pod),
        node_needs=_node_needs(pod),
        image=intern(text(first.get("image"))),
        model=message(model_of(pod)),
        replicas=counted("replicas"),
        ready_replicas=counted("readyReplicas"),
        updated_replicas=counted("updatedReplicas"),
        available_replicas=counted("availableReplicas"),
        conditions=tuple(_conditions(status.get("conditions"))),
    )


def _node_needs(pod: Mapping[str, Any]) -> NodeNeeds:
    """Return what pods with this spec need of a node. What cannot be read is no requirement."""
    affinity = as_map(as_map(pod.get("affinity")).get("nodeAffinity"))
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return NodeNeeds(
        frozenset(_devices(pod)),
        frozenset((str(key), str(value)) for key, value in as_map(pod.get("nodeSelector")).items()),
        _json(required) if required else "",
        frozenset(map(_json, maps(pod.get("tolerations")))),
    )


def _devices(pod: Mapping[str, Any]) -> Iterator[str]:
    for claim in maps(pod.get("resourceClaims")):
        yield from (str(name) for field, name in claim.items() if field != "name")
    for container in maps(pod.get("containers")):
        limits = as_map(as_map(container.get("resources")).get("limits"))
        yield from (name for name in limits if "/" in name)


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _template_hash(spec: Mapping[str, Any]) -> str:
    template = as_map(as_map(spec.get("template")).get("metadata"))
    return text(as_map(template.get("annotations")).get(ANNOTATION_TEMPLATE_HASH))


def _child_fields(
    kind: Kind, live: Mapping[str, Any], known_digest: str | None = None
) -> dict[str, Any]:
    meta = required_map(live.get("metadata"), "metadata")
    return {
        "kind": kind,
        "name": text(meta.get("name")),
        "uid": text(meta.get("uid")),
        "resource_version": text(meta.get("resourceVersion")),
        "digest": known_digest or _digest(kind, live),
        "controller_uid": controller_uid(meta),
        "service": text(as_map(meta.get("labels")).get(LABEL_SERVICE)) or None,
        "deleting": "deletionTimestamp" in meta,
    }


def _digest(kind: Kind, live: Mapping[str, Any]) -> str:
    """Return the digest of our fields; "" if we own none or managedFields cannot be read.

    The digest then differs, and the apply that follows writes our entry of managedFields again.
    """
    try:
        # Items of a list have no kind, and the digest of a Deployment needs it to omit the replicas.
        return owned_digest({**live, "kind": kind.value})
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return ""


def revision_record(live: Mapping[str, Any]) -> Revision:
    """Return the record of a ReplicaSet.

    Raises:
        Unreadable: a count of it cannot be read.
    """
    meta = required_map(live.get("metadata"), "metadata")
    spec = required_map(live.get("spec"), "spec")
    status = required_map(live.get("status"), "status")
    return Revision(
        name=text(meta.get("name")),
        uid=text(meta.get("uid")),
        deployment_uid=controller_uid(meta) or "",
        number=digits(as_map(meta.get("annotations")).get(ANNOTATION_REVISION)),
        template_hash=_template_hash(spec),
        created=rfc3339.parse(meta.get("creationTimestamp")) or 0.0,
        desired_replicas=required_count(spec.get("replicas"), "spec.replicas", 1),
        replicas=required_count(status.get("replicas"), "status.replicas"),
        ready_replicas=required_count(status.get("readyReplicas"), "status.readyReplicas"),
    )


def _conditions(found: object) -> Iterable[ObjectCondition]:
    for condition in maps(found)[:MAX_CONDITIONS]:
        yield ObjectCondition(
            type=intern(text(condition.get("type"))),
            status=intern(text(condition.get("status"))),
            reason=intern(text(condition.get("reason"))),
            message=message(condition.get("message")),
        )


def _service_of(meta: Mapping[str, Any]) -> str | None:
    """Return the service that an object claims to belong to."""
    for owner in maps(meta.get("ownerReferences")):
        group = text(owner.get("apiVersion")).partition("/")[0]
        if owner.get("controller") and group == GROUP and owner.get("kind") == KIND:
            return text(owner.get("name")) or None
    return text(as_map(meta.get("labels")).get(LABEL_SERVICE)) or None
