"""Turn a snapshot of one service into a plan: the writes, the status, and when to requeue.

The planner is stateless: everything follows from the snapshot, and the status stores what must be
remembered. It decides in this order: problems that block all writes (an invalid spec, an old CRD,
no engine profile, refused options), the rollout, the number of replicas, the children, the status.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.names import Component
from fleetkeeper.api.parse import InvalidService, parse_service
from fleetkeeper.reconcile.children import owns_address
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.reconcile.inputs import ReconcileInputs, inputs_of
from fleetkeeper.reconcile.last_good import decide_last_good, parse_last_good
from fleetkeeper.reconcile.manifests.control_config import grants_problem
from fleetkeeper.reconcile.observe.problem import Problem, say
from fleetkeeper.reconcile.plan import Plan
from fleetkeeper.reconcile.status.assessment import Assessment
from fleetkeeper.reconcile.status.build import decide_status_write, desired_status
from fleetkeeper.reconcile.status.events import decide_events, sleep_events
from fleetkeeper.reconcile.status.pruning import without_fields
from fleetkeeper.reconcile.types import Snapshot
from fleetkeeper.reconcile.wanted import decide_wanted, in_one_line
from fleetkeeper.reconcile.writes import ReconcileResult, decide_writes

UNREADABLE_REQUEUE_S = 30.0
"""The requeue interval while an object of the service is unreadable: an object without our labels
is not watched, so its repair causes no event."""


def decide_plan(snapshot: Snapshot, context: PlanContext, now: float) -> Plan:
    """Return the plan for one service at the time `now` (seconds since the epoch).

    A service that is being deleted gets no writes, a paused one no writes to children. If the
    desired state is unknown, running children are not changed.
    """
    metadata = snapshot.resource.get("metadata") or {}
    is_name_only = bool(snapshot.unreadable) and "generation" not in metadata
    if metadata.get("deletionTimestamp") or is_name_only:
        return Plan()
    inputs = inputs_of(snapshot, context, now)
    return _plan_of(inputs, _unreadable(inputs) if snapshot.unreadable else _decide_result(inputs))


def _plan_of(inputs: ReconcileInputs, result: ReconcileResult) -> Plan:
    """Return the plan for the result of a reconcile, including the status that reports it."""
    snapshot, diagnosis = inputs.snapshot, inputs.diagnosis
    if result.remembers:
        kept = {**inputs.status, **result.remembers}
        events = tuple(sleep_events(inputs.status, kept))
        return Plan(status=kept, events=events, requeue_after_s=0.0)
    desired = desired_status(result.assessment, result.engine, result.last_good, inputs.now)
    desired = without_fields(desired, snapshot.crd_missing)
    status, again = decide_status_write(
        desired,
        inputs.status,
        written=snapshot.status_written,
        children_written=inputs.now if result.actions else snapshot.children_written,
        now=inputs.now,
    )
    waits = [
        max(0.0, wait)
        for wait in (*result.again_after_s, diagnosis.again_after_s, again)
        if wait is not None
    ]
    return Plan(
        actions=result.actions,
        status=status,
        events=decide_events(result.assessment, result.actions, status, snapshot.failures),
        requeue_after_s=min(waits, default=None),
        wants_templates=result.wants_templates,
        wants_events=diagnosis.wants_events,
    )


def _decide_result(inputs: ReconcileInputs) -> ReconcileResult:
    """Return the first problem that blocks all writes, else the writes."""
    assessment = _assess(inputs)
    try:
        service = parse_service(
            inputs.snapshot.resource, allow_floating_revisions=inputs.context.floating_revisions
        )
    except InvalidService as refusal:
        problem = Problem(Reason.INVALID_SPEC, in_one_line(refusal.errors))
        return _blocked(inputs, assessment, problem)
    assessment = replace(
        assessment, service=service, grants_problem=grants_problem(service, inputs.context)
    )
    if inputs.snapshot.crd_missing:
        return _blocked(inputs, assessment, _old_crd(inputs.snapshot.crd_missing))
    wanted = decide_wanted(inputs, service)
    if isinstance(wanted, Problem):
        return _blocked(inputs, assessment, wanted)
    return decide_writes(inputs, assessment, wanted)


def _assess(inputs: ReconcileInputs) -> Assessment:
    found = inputs.diagnosis
    return Assessment(
        inputs.generation,
        inputs.status,
        inputs.facts,
        engine_problems=found.engine_problems,
        router_problem=found.router_problem,
        creation_problem=found.creation_problem,
        write_problem=found.write_problem,
        flapping=found.flapping,
        pods=tuple(pod for pod in inputs.snapshot.pods if pod.component == Component.ENGINE),
        pod_problems=dict(found.by_pod),
        starts=inputs.snapshot.starts,
        control=inputs.snapshot.control_report,
        control_pending=inputs.snapshot.control_pending,
        defect=inputs.snapshot.defect,
        owns_address=owns_address(inputs.snapshot),
    )


def _blocked(inputs: ReconcileInputs, assessment: Assessment, problem: Problem) -> ReconcileResult:
    """Return a result without writes to children. They keep running; the status has the reason."""
    first, _ = decide_last_good(inputs)
    return ReconcileResult(
        replace(assessment, blocked=problem), last_good=parse_last_good(inputs.status) or first
    )


def _unreadable(inputs: ReconcileInputs) -> ReconcileResult:
    """Return a result without writes to children: a child that was not read may still exist."""
    first, *rest = inputs.snapshot.unreadable
    advice = "Repair or delete that object."
    if rest:
        advice = f"Repair or delete that object and {len(rest)} more."
    text = say(f"{first.kind} {first.name} cannot be read", first.why, advice)
    result = _blocked(inputs, _assess(inputs), Problem(Reason.UNREADABLE_OBJECT, text))
    return replace(result, again_after_s=(UNREADABLE_REQUEUE_S,))


def _old_crd(missing: Sequence[str]) -> Problem:
    what = "The CRD in the cluster is older than the operator and lacks fields"
    advice = "Upgrade the CRDs. Until then, no child is written."
    return Problem(Reason.CRD_TOO_OLD, say(what, ", ".join(missing), advice))
