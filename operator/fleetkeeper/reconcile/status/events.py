"""The Kubernetes Events of a reconcile, recorded only when something changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleetkeeper.api.conditions import ConditionType, Reason, Status, previous_condition
from fleetkeeper.common.sleep import parse_sleep
from fleetkeeper.common.values import Event, Manifest
from fleetkeeper.reconcile.children import Why
from fleetkeeper.reconcile.plan import Action, Apply, Delete
from fleetkeeper.reconcile.status.assessment import Assessment
from fleetkeeper.reconcile.status.degradation import REPORTED_BY_CONTROL_LOOP
from fleetkeeper.reconcile.types import Kind, WriteFailure

NORMAL, WARNING = "Normal", "Warning"
CALM = frozenset(
    {
        Reason.STOPPED,
        Reason.SUSPENDED,
        Reason.ASLEEP,
        Reason.PAUSED,
        Reason.STARTING,
        Reason.NO_READY_REPLICA,
        Reason.NO_READY_ROUTER,
        Reason.NOT_ROLLED_OUT,
        Reason.MINIMUM_REPLICAS_UNAVAILABLE,
        Reason.GPU_BUDGET,
    }
)
"""Reasons for not being ready that a user chose or that pass by themselves: no Warning event."""
RESTS = frozenset({Reason.ASLEEP, Reason.NEVER_STARTED, Reason.WAKING, Reason.SWAPPING})
"""Reasons for being ready without a replica: no event that the service is ready."""


def decide_events(
    assessment: Assessment,
    actions: Sequence[Action],
    status: Manifest | None,
    failures: Sequence[WriteFailure] = (),
) -> tuple[Event, ...]:
    """Return the events for this reconcile's writes and for the conditions that changed.

    A write that was refused before gets no event: the condition reports the refusal.
    """
    refused = {(item.kind, item.name) for item in failures}
    events = [
        *_of_replicas(assessment, actions),
        *_of_children(assessment, [item for item in actions if (_key(item)) not in refused]),
        *(_of_conditions(assessment.previous, status) if status is not None else ()),
        *(_of_engine(assessment.previous, status) if status is not None else ()),
    ]
    return tuple(dict.fromkeys(events))


def sleep_events(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of a status that changes the state of a service's sleep.

    A failed start has none here: the condition Ready reports it.
    """
    old, new = parse_sleep(before), parse_sleep(after)
    if new.state is old.state:
        return
    if old.is_swapping:
        yield Event(NORMAL, "SwapEnded", "The gateway no longer holds requests")
    if new.is_asleep and new.never_started and not new.failures:
        yield Event(NORMAL, str(Reason.NEVER_STARTED), new.message)
    elif new.is_asleep and not new.failures:
        why = new.message or "No request came, so the service releases its replicas"
        yield Event(NORMAL, "Asleep", why)
    elif new.is_waking:
        rank = f" with the rank of tier {new.tier.label}" if new.tier is not None else ""
        yield Event(NORMAL, "Waking", f"The service starts its replicas{rank}")
    elif new.is_swapping:
        yield Event(NORMAL, "Swapping", Reason.SWAPPING.text)


def _key(action: Action) -> tuple[str, str]:
    return (str(getattr(action, "kind", "Pod")), action.name)


def _of_replicas(assessment: Assessment, actions: Sequence[Action]) -> Iterator[Event]:
    live, decision = assessment.facts.live_replicas, assessment.replicas
    if live is None or decision is None or live == decision.value:
        return
    engine = assessment.facts.engine
    if any(
        isinstance(item, Apply)
        and engine
        and item.name == engine.name
        and item.kind is Kind.DEPLOYMENT
        for item in actions
    ):
        why = _in_sentence(decision.message)
        yield Event(NORMAL, "Scaled", f"Replicas {live} -> {decision.value}: {why}")


def _in_sentence(message: str) -> str:
    """Return the message for use after a colon: `Queue wait` becomes `queue wait`, `HPA` stays."""
    return message[:1].lower() + message[1:] if message[1:2].islower() else message


def _of_children(assessment: Assessment, actions: Sequence[Action]) -> Iterator[Event]:
    created = [item for item in actions if isinstance(item, Apply) and item.why == Why.CREATE]
    if created:
        yield Event(NORMAL, "Created", f"Created {_listed(created)}")
    repaired = [item for item in actions if isinstance(item, Apply) and item.why == Why.REPAIR]
    if repaired and (assessment.is_new_generation or assessment.is_swapping):
        yield Event(NORMAL, "Updated", f"Updated {_listed(repaired)} to match the spec")
    elif repaired:
        yield Event(NORMAL, "Repaired", f"Restored {_listed(repaired)} to the desired state")
    adopted = [item for item in actions if isinstance(item, Apply) and item.why == Why.ADOPT]
    if adopted:
        yield Event(NORMAL, "Adopted", f"Adopted {_listed(adopted)}, which had no owner")
    removed = [item for item in actions if isinstance(item, Delete)]
    if removed:
        yield Event(NORMAL, "Removed", f"Removed {_listed(removed)}, no longer needed")


def _listed(actions: Sequence[Apply | Delete]) -> str:
    """Return the names of up to three objects and the number of the others."""
    named = [f"{item.kind} {item.name}" for item in actions[:3]]
    rest = len(actions) - len(named)
    return ", ".join(named) + (f" and {rest} more" if rest else "")


def _of_conditions(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Event]:
    stalled = _changed(before, after, ConditionType.STALLED)
    if stalled is not None:
        yield Event(WARNING, stalled["reason"], stalled["message"])
    degraded = _changed(before, after, ConditionType.DEGRADED)
    is_ours = degraded is not None and degraded["reason"] not in REPORTED_BY_CONTROL_LOOP
    if degraded is not None and degraded["status"] == Status.TRUE and is_ours:
        yield Event(WARNING, degraded["reason"], degraded["message"])
    ready = _changed(before, after, ConditionType.READY)
    if ready is None:
        return
    old = (previous_condition(before, ConditionType.READY) or {}).get("status", Status.TRUE)
    # A service that never reported Ready=False started within seconds: the event Created is enough.
    is_news = ready["status"] == Status.TRUE and old != Status.TRUE
    if is_news and ready["reason"] not in RESTS:
        yield Event(NORMAL, "Ready", "The service is ready")
    elif ready["status"] == Status.FALSE and ready["reason"] not in CALM:
        yield Event(WARNING, ready["reason"], ready["message"])


def _changed(
    before: Mapping[str, Any], after: Mapping[str, Any], kind: ConditionType
) -> Mapping[str, Any] | None:
    """Return the new condition if its status or reason changed, else None."""
    old, new = previous_condition(before, kind) or {}, previous_condition(after, kind)
    if new is None:
        return None
    is_same = all(old.get(key) == new.get(key) for key in ("status", "reason"))
    return None if is_same else new


def _of_engine(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Event]:
    old = (before.get("engine") or {}).get("profile")
    new = (after.get("engine") or {}).get("profile")
    if old and new and old != new:
        yield Event(NORMAL, "EngineChanged", f"Engine profile {old} -> {new}")
