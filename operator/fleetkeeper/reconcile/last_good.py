"""The last good template of a service, to which a failed rollout returns.

*Last good* is the template of the current revision once no other revision is wanted and one of its
pods was ready for a minute. The first one is written with the next status that is written anyway,
at the latest before the Deployment gets another template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetkeeper.api.conditions import ConditionType, Status, previous_condition
from fleetkeeper.common.sleep import parse_sleep
from fleetkeeper.reconcile.inputs import ReconcileInputs
from fleetkeeper.reconcile.types import Revision
from fleetkeeper_contract import rfc3339

GOOD_AFTER_S = 60.0
"""A template is good after one of its pods was ready for this time."""


@dataclass(frozen=True, slots=True)
class LastGood:
    """The last good template and the generation that requested it."""

    generation: int
    template_hash: str

    def to_status(self) -> dict[str, Any]:
        """Return the content of `status.lastGood`."""
        return {"generation": self.generation, "templateHash": self.template_hash}


def parse_last_good(status: Mapping[str, Any]) -> LastGood | None:
    """Parse `status.lastGood`, None if it is absent or unreadable."""
    part = status.get("lastGood")
    if not isinstance(part, Mapping) or not part.get("templateHash"):
        return None
    return LastGood(int(part.get("generation") or 0), str(part["templateHash"]))


def must_remember(last_good: LastGood | None, status: Mapping[str, Any], wanted_hash: str) -> bool:
    """Return True if the last good template is about to be replaced and is not yet in the status.

    Otherwise a crash after the write of the Deployment would make a rollback impossible.
    """
    return (
        last_good is not None
        and last_good.template_hash != wanted_hash
        and last_good != parse_last_good(status)
    )


def decide_last_good(
    inputs: ReconcileInputs, wanted_hash: str = ""
) -> tuple[LastGood | None, float | None]:
    """Return the last good template, and the seconds until the current one could become it.

    The first template of a service needs no requeue a minute after its start: any later reconcile
    recognizes it as good by its pods or by a status that has had Ready=True for a minute.
    """
    facts, status = inputs.facts, inputs.status
    known, current = parse_last_good(status), facts.current
    if current is None or not current.template_hash:
        return known, None
    if known and known.template_hash == current.template_hash:
        return known, None
    if any(item.desired_replicas > 0 for item in facts.revisions if item.uid != current.uid):
        return known, None
    lasted = _ready_for_s(inputs, current)
    if lasted is None:
        return known, None
    if lasted < GOOD_AFTER_S:
        return known, GOOD_AFTER_S - lasted if known else None
    is_wanted = current.template_hash == wanted_hash
    observed = int(status.get("observedGeneration") or inputs.generation)
    before = known.generation if known else observed
    return LastGood(inputs.generation if is_wanted else before, current.template_hash), None


def _ready_for_s(inputs: ReconcileInputs, current: Revision) -> float | None:
    """Return for how many seconds the current revision has had, or had until now, a ready pod.

    None means that there is no evidence. The condition Ready is evidence only for a single revision
    that was created before the condition became True. Otherwise it could refer to another revision.
    It is True without a pod while the service sleeps or wakes, so only the time since then counts.
    """
    since = [
        pod.ready_since
        for pod in inputs.facts.pods_of(current)
        if pod.ready and pod.ready_since is not None
    ]
    ready = previous_condition(inputs.status, ConditionType.READY) or {}
    ready_at, sleep = rfc3339.parse(ready.get("lastTransitionTime")), parse_sleep(inputs.status)
    is_evidence = ready.get("status") == Status.TRUE and len(inputs.facts.revisions) == 1
    is_evidence = is_evidence and not (sleep.is_asleep or sleep.is_waking)
    if is_evidence and ready_at is not None and current.created <= ready_at:
        since.append(max(ready_at, sleep.since))
    return inputs.now - min(since) if since else None
