"""Lean records of pods and of the events about them. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from sys import intern
from typing import Any

from fleetkeeper.api.names import (
    ANNOTATION_DELETION_COST,
    ANNOTATION_TEMPLATE_HASH,
    LABEL_COMPONENT,
    LABEL_SERVICE,
)
from fleetkeeper.common.budget import accelerators_of
from fleetkeeper.reconcile.observe.pod_problems import engine_line
from fleetkeeper.reconcile.types import Container, ObjectEvent, Pod, SecretUse, Termination
from fleetkeeper_contract import rfc3339
from fleetkeeper_kube.reading import (
    MESSAGE_LIMIT,
    as_map,
    controller_uid,
    count,
    maps,
    message,
    required_map,
    text,
)

MAX_SECRET_USES = 64
"""Variables from Secrets kept of a pod: those of `engine.env` (32), and some that webhooks add."""
MAX_IMAGE_VOLUMES = 33
"""Image volumes kept of a pod: those of a model and of its adapters."""
MAX_CONTAINERS = 32
"""Containers and init containers kept of a pod, this many of each."""
COST = re.compile(r"[+-]?[0-9]{1,9}")
TERMINATION_LIMIT = 8192
"""Characters read of a termination message; a kubelet writes at most 4096 bytes."""


def pod_record(live: Mapping[str, Any]) -> Pod:
    """Return the record of a pod.

    Raises:
        Unreadable: its metadata, spec or status cannot be read.
    """
    meta = required_map(live.get("metadata"), "metadata")
    spec = required_map(live.get("spec"), "spec")
    status = required_map(live.get("status"), "status")
    labels, annotations = as_map(meta.get("labels")), as_map(meta.get("annotations"))
    conditions = {text(c.get("type")): c for c in maps(status.get("conditions"))}
    ready, scheduled = conditions.get("Ready", {}), conditions.get("PodScheduled", {})
    is_ready = ready.get("status") == "True"
    node = text(spec.get("nodeName"))
    return Pod(
        name=text(meta.get("name")),
        uid=text(meta.get("uid")),
        service=text(labels.get(LABEL_SERVICE)),
        component=intern(text(labels.get(LABEL_COMPONENT))),
        revision_uid=controller_uid(meta),
        template_hash=text(annotations.get(ANNOTATION_TEMPLATE_HASH)),
        created=rfc3339.parse(meta.get("creationTimestamp")) or 0.0,
        phase=intern(text(status.get("phase")) or "Pending"),
        ip=text(status.get("podIP")),
        node=intern(node),
        ready=is_ready,
        ready_since=rfc3339.parse(ready.get("lastTransitionTime")) if is_ready else None,
        ejected_since=None if is_ready else _ejected_since(status, ready),
        scheduled=scheduled.get("status") == "True" or bool(node),
        unschedulable=_unschedulable(scheduled),
        deleting="deletionTimestamp" in meta,
        deletion_cost=_cost(annotations.get(ANNOTATION_DELETION_COST)),
        accelerators=accelerators_of(spec),
        containers=tuple(_containers(status)),
        has_claims=bool(spec.get("resourceClaims")),
        secret_uses=tuple(islice(_secret_uses(spec), MAX_SECRET_USES)),
        image_volumes=tuple(islice(_image_volumes(spec), MAX_IMAGE_VOLUMES)),
        scheduled_since=_scheduled_since(scheduled),
        deleting_since=_deleting_since(meta),
    )


def _scheduled_since(scheduled: Mapping[str, Any]) -> float | None:
    is_scheduled = scheduled.get("status") == "True"
    return rfc3339.parse(scheduled.get("lastTransitionTime")) if is_scheduled else None


def _deleting_since(meta: Mapping[str, Any]) -> float | None:
    """Return when the deletion was requested: deletionTimestamp is the end of the grace period."""
    ends = rfc3339.parse(meta.get("deletionTimestamp"))
    return None if ends is None else ends - count(meta.get("deletionGracePeriodSeconds"))


def _secret_uses(spec: Mapping[str, Any]) -> Iterable[SecretUse]:
    for container in maps(spec.get("containers")):
        for variable in maps(container.get("env")):
            reference = as_map(as_map(variable.get("valueFrom")).get("secretKeyRef"))
            if reference:
                yield SecretUse(
                    variable=intern(text(variable.get("name"))),
                    secret=intern(text(reference.get("name"))),
                    key=intern(text(reference.get("key"))),
                )


def _image_volumes(spec: Mapping[str, Any]) -> Iterable[str]:
    for volume in maps(spec.get("volumes")):
        reference = text(as_map(volume.get("image")).get("reference"))
        if reference:
            yield intern(reference)


def _ejected_since(status: Mapping[str, Any], ready: Mapping[str, Any]) -> float | None:
    """Return when a started container that still runs stopped being ready, or None.

    Ready turned False after the container's current run began, so its own readiness probe caused it.
    A container that is still starting was never ready.
    """
    turned = rfc3339.parse(ready.get("lastTransitionTime"))
    if turned is None:
        return None
    for found in maps(status.get("containerStatuses")):
        running = as_map(as_map(found.get("state")).get("running"))
        began = rfc3339.parse(running.get("startedAt"))
        is_out = found.get("started") is True and found.get("ready") is not True
        if is_out and began is not None and began < turned:
            return turned
    return None


def event_record(live: Mapping[str, Any]) -> ObjectEvent:
    """Return the record of an event of either events API, as `v1` shows it."""
    series = as_map(live.get("series"))
    seen_at = (
        series.get("lastObservedTime")
        or live.get("lastTimestamp")
        or live.get("eventTime")
        or live.get("firstTimestamp")
    )
    return ObjectEvent(
        pod_uid=text(as_map(live.get("involvedObject")).get("uid")),
        reason=text(live.get("reason")),
        message=message(live.get("message")),
        seen=rfc3339.parse(seen_at) or 0.0,
    )


def _containers(status: Mapping[str, Any]) -> Iterable[Container]:
    for key, init in (("initContainerStatuses", True), ("containerStatuses", False)):
        for found in maps(status.get(key))[:MAX_CONTAINERS]:
            state, last = as_map(found.get("state")), as_map(found.get("lastState"))
            waiting = as_map(state.get("waiting"))
            yield Container(
                name=intern(text(found.get("name"))),
                init=init,
                ready=found.get("ready") is True,
                restarts=count(found.get("restartCount")),
                waiting_reason=intern(text(waiting.get("reason"))),
                waiting_message=message(waiting.get("message")),
                running_since=rfc3339.parse(as_map(state.get("running")).get("startedAt")),
                terminated=_termination(state.get("terminated")),
                last_terminated=_termination(last.get("terminated")),
            )


def _termination(found: object) -> Termination | None:
    if not isinstance(found, Mapping):
        return None
    return Termination(
        exit_code=count(found.get("exitCode")),
        reason=intern(text(found.get("reason"))),
        message=_last_word(found.get("message")),
        finished=rfc3339.parse(found.get("finishedAt")),
    )


def _last_word(found: object) -> str:
    """Return the engine's termination line without the output it quotes; of other text, the end."""
    words = found[-TERMINATION_LIMIT:] if isinstance(found, str) else ""
    line = engine_line(words)
    if not line:
        return text(words[-MESSAGE_LIMIT:], MESSAGE_LIMIT)
    return json.dumps({key: message(line.get(key)) for key in ("class", "message")})


def _unschedulable(scheduled: Mapping[str, Any]) -> str:
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return message(scheduled.get("message")) or "Unschedulable"
    return ""


def _cost(annotation: object) -> int:
    """Return a pod's deletion cost; 0 if it is not a number or has more than nine digits."""
    found = annotation if isinstance(annotation, str) else ""
    return int(found) if COST.fullmatch(found) else 0
