"""The JSON that the page polls, in the words of `top` and `explain`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from fleetkeeper.api.status_enums import BreakerState, ReplicaStage
from fleetkeeper.console.samples import Samples, Snapshot, in_ms, number
from fleetkeeper.fleet.explanation import (
    BREAKERS,
    Row,
    breaker_rows,
    decision_rows,
    evidence_rows,
    is_as_wanted,
    trouble_rows,
)
from fleetkeeper.fleet.view import (
    Measured,
    ServiceKey,
    ServiceView,
    failed_view,
    in_milliseconds,
    latency_in_milliseconds,
)

Document = dict[str, Any]

GOOD: Final = "good"
WARN: Final = "warn"
BAD: Final = "bad"
NORMAL: Final = frozenset({"Progressing", "Reconciling", "ScalingLimited"})
"""Conditions that alone make no problem: a start, a rollout, or a bound, which has its own column."""
NO_CONDITION: Final = "The operator has written no condition yet."
BREAKER_TITLES: Final = frozenset(title for _, title in BREAKERS)


def fleet_document(samples: Samples) -> Document:
    """Return one row per service, sorted by namespace and name.

    A service whose row cannot be made is shown as unreadable, and hides no other.
    """
    snapshot = samples.snapshot
    rows = [_row(view, snapshot.specs[key]) for key, view in snapshot.views.items()]
    return {**_frame(snapshot), "services": rows}


def _row(view: ServiceView, spec: Mapping[str, Any]) -> Document:
    try:
        return _summary(view, spec)
    except Exception as problem:  # noqa: BLE001 - no list of types foresees what tenants write
        return _summary(failed_view(view.namespace, view.name, problem), {})


def service_document(samples: Samples, key: ServiceKey) -> Document:
    """Return everything about a service; `service` is null if there is none of this name."""
    snapshot = samples.snapshot
    view = snapshot.views.get(key)
    if view is None:
        return {**_frame(snapshot), "service": None}
    times, series = samples.series(key)
    service = {
        **_summary(view, snapshot.specs[key]),
        "state": _pairs(row for row in decision_rows(view) if row[0] not in BREAKER_TITLES),
        "measurements": _pairs(evidence_rows(view)),
        "problems": _pairs(trouble_rows(view)),
        "breakers": _breakers(view),
        "conditions": [_condition(view, row) for row in view.conditions.values()],
        "replicaStates": [_replica(row) for row in view.status.get("replicaStates") or ()],
        "unlistedReplicas": view.status.get("unlistedReplicas") or 0,
        "changes": [
            {"time": change.time, "what": change.what, "text": change.in_words()}
            for change in reversed(view.changes)
        ],
        "capPercent": number((view.status.get("memory") or {}).get("capPercent")),
        "times": times,
        "series": series,
    }
    return {**_frame(snapshot), "service": service}


def _frame(snapshot: Snapshot) -> Document:
    return {"taken": snapshot.taken, "remark": snapshot.remark, "problem": snapshot.problem}


def _pairs(rows: Iterable[Row]) -> list[list[str]]:
    return [list(row) for row in rows]


def _summary(view: ServiceView, spec: Mapping[str, Any]) -> Document:
    ready = view.conditions.get("Ready") or {}
    limited = view.conditions.get("ScalingLimited") or {}
    troubles = list(trouble_rows(view))
    is_degraded = any(title.partition(" ")[0] not in NORMAL for title, _ in troubles)
    is_ready = ready.get("status") == "True"
    scaling = view.status.get("scaling") or {}
    message = troubles[0][1] if troubles else scaling.get("message")
    if not view.conditions:
        message = NO_CONDITION
    return {
        "namespace": view.namespace,
        "name": view.name,
        "simulated": view.is_simulated,
        "tone": _tone(view, is_ready=is_ready, has_trouble=is_degraded),
        "ready": (view.sleep.shown_state or "Ready")
        if is_ready
        else ready.get("reason") or "Unknown",
        "readyMessage": ready.get("message") or ("" if ready else NO_CONDITION),
        "readyReplicas": view.ready.split("/")[0],
        "wanted": view.wanted,
        "maxReplicas": (spec.get("scaling") or {}).get("maxReplicas"),
        "queueWait": _measured(view.queue_wait),
        "batchTime": _measured(view.batch_time),
        "ttft": latency_in_milliseconds(view.ttft_s),
        "itl": latency_in_milliseconds(view.itl_s),
        "sequences": view.sequences,
        "tokens": view.tokens,
        "breaker": view.breaker,
        "breakerTone": GOOD if view.breaker.lower() in {"closed", "-"} else BAD,
        "limitedBy": limited.get("reason") or "" if limited.get("status") == "True" else "",
        "message": message or "",
    }


def _tone(view: ServiceView, *, is_ready: bool, has_trouble: bool) -> str:
    if not is_ready:
        return BAD if view.conditions else WARN
    broken = view.queue_wait.is_broken or view.batch_time.is_broken
    return WARN if has_trouble or broken else GOOD


def _measured(measured: Measured) -> Document:
    return {
        "text": in_milliseconds(measured),
        "value": in_ms(measured.value_s),
        "objective": in_ms(measured.objective_s),
        "broken": measured.is_broken,
    }


def _breakers(view: ServiceView) -> list[Document]:
    states = view.status.get("breaker") or {}
    found = []
    for (name, _), (title, text) in zip(BREAKERS, breaker_rows(view), strict=True):
        state = states.get(name)
        values = state.values() if isinstance(state, Mapping) else [state or BreakerState.CLOSED]
        is_closed = all(value == BreakerState.CLOSED for value in values)
        found.append({"title": title, "text": text, "tone": GOOD if is_closed else BAD})
    return found


def _condition(view: ServiceView, condition: Mapping[str, Any]) -> Document:
    kind = str(condition.get("type"))
    return {
        "type": kind,
        "status": str(condition.get("status")),
        "tone": GOOD if is_as_wanted(view, condition) else BAD if kind == "Ready" else WARN,
        "reason": condition.get("reason") or "",
        "message": condition.get("message") or "",
        "since": condition.get("lastTransitionTime") or "",
    }


def _replica(state: Mapping[str, Any]) -> Document:
    stage = str(state.get("stage"))
    known = {str(member): member.text for member in ReplicaStage}
    failing = stage == ReplicaStage.FAILING or "reason" in state
    return {
        "name": state.get("name") or "",
        "stage": stage,
        "stageText": known.get(stage, ""),
        "tone": GOOD if stage == ReplicaStage.READY else BAD if failing else WARN,
        "node": state.get("node") or "",
        "reason": state.get("reason") or "",
        "since": state.get("since") or "",
    }
