"""Turn a snapshot of one service into a plan: the writes, the status, and when to requeue.

The planner is stateless: everything follows from the snapshot, and the status stores what must be
remembered. It decides in this order: problems that block all writes (an invalid spec, an old CRD,
no engine profile, refused options), the rollout, the number of replicas, the children, the status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleetkeeper.api import names
from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.parse import FieldError, InferenceService, InvalidService, parse_service
from fleetkeeper.api.profile import EngineProfile
from fleetkeeper.api.types import RoutingPolicy
from fleetkeeper.common.budget import accelerators_of, exceeds
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.children import ChildrenDecision, Conflict, decide_children
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.reconcile.deletion import decide_marks
from fleetkeeper.reconcile.digest import digest_of
from fleetkeeper.reconcile.engine_choice import EngineDecision, decide_engine, parse_engine
from fleetkeeper.reconcile.manifests.address import desired_address
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper.reconcile.manifests.engine_document import EngineOptionRefused
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from fleetkeeper.reconcile.manifests.tuning import AS_SPECIFIED, EngineTuning
from fleetkeeper.reconcile.observe.diagnosis import Diagnosis, decide_diagnosis
from fleetkeeper.reconcile.observe.facts import Facts, facts_of
from fleetkeeper.reconcile.observe.pod_problems import Problem, say
from fleetkeeper.reconcile.refusals import refusals
from fleetkeeper.reconcile.replicas import ReplicaDecision, contesting_manager, decide_replicas
from fleetkeeper.reconcile.rollout import (
    LastGood,
    RolloutDecision,
    decide_last_good,
    decide_rollout,
    decide_strategy,
    is_scale_up_blocked,
    parse_last_good,
    parse_rollback,
)
from fleetkeeper.reconcile.status.assessment import Assessment
from fleetkeeper.reconcile.status.build import decide_status_write, desired_status
from fleetkeeper.reconcile.status.events import decide_events
from fleetkeeper.reconcile.types import Action, Kind, Plan, Snapshot

CONTEST_REQUEUE_S = 60.0
"""The requeue interval during a contest over replicas, whose end causes no watch event."""
BUDGET_REQUEUE_S = 15.0
"""The requeue interval while the GPU budget limits a service: other services free GPUs."""

UNREADABLE_REQUEUE_S = 30.0
"""The requeue interval while an object of the service is unreadable: an object without our labels
is not watched, so its repair causes no event."""


@dataclass(frozen=True, slots=True)
class ReconcileInputs:
    """The inputs of one reconcile."""

    snapshot: Snapshot
    context: PlanContext
    facts: Facts
    diagnosis: Diagnosis
    status: Mapping[str, Any]
    generation: int
    now: float

    @property
    def is_new_generation(self) -> bool:
        """Return True if the spec has changed since the status was written."""
        return bool(self.status.get("observedGeneration") != self.generation)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The desired service with its engine profile and the tuning by a remedy."""

    service: InferenceService
    engine: EngineDecision
    profile: EngineProfile
    tuning: EngineTuning


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """The result of one reconcile.

    `remembers_first`: this reconcile only adds the last good template to the present status.
    """

    assessment: Assessment
    engine: EngineDecision | None = None
    last_good: LastGood | None = None
    actions: tuple[Action, ...] = ()
    wants_templates: tuple[str, ...] = ()
    again_after_s: tuple[float | None, ...] = ()
    remembers_first: bool = False


def decide_plan(snapshot: Snapshot, context: PlanContext, now: float) -> Plan:
    """Return the plan for one service at the time `now` (seconds since the epoch).

    A service that is being deleted gets no writes, a paused one no writes to children. If the
    desired state is unknown, running children are not changed.
    """
    metadata = snapshot.resource.get("metadata") or {}
    if metadata.get("deletionTimestamp"):
        return Plan()
    facts = facts_of(snapshot, str(metadata.get("name") or ""))
    inputs = ReconcileInputs(
        snapshot,
        context,
        facts,
        decide_diagnosis(snapshot, facts, now),
        snapshot.resource.get("status") or {},
        int(metadata.get("generation") or 0),
        now,
    )
    if (
        snapshot.unreadable and "generation" not in metadata
    ):  # only the name of the service is known
        return Plan()
    result = _unreadable(inputs) if snapshot.unreadable else _decide_result(inputs)
    return _plan_of(inputs, result)


def _plan_of(inputs: ReconcileInputs, result: ReconcileResult) -> Plan:
    """Return the plan for the result of a reconcile, including the status that reports it."""
    snapshot, diagnosis = inputs.snapshot, inputs.diagnosis
    if result.remembers_first and result.last_good is not None:
        remembered = {**inputs.status, "lastGood": result.last_good.to_status()}
        return Plan(status=remembered, requeue_after_s=0.0)
    desired = desired_status(result.assessment, result.engine, result.last_good, inputs.now)
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
        return _blocked(inputs, assessment, Reason.INVALID_SPEC, _in_one_line(refusal.errors))
    assessment = replace(assessment, service=service)
    if inputs.snapshot.crd_missing:
        return _blocked(
            inputs, assessment, Reason.CRD_TOO_OLD, _crd_in_words(inputs.snapshot.crd_missing)
        )
    tuning = _tuning(inputs)
    engine = _decide_engine(inputs, service, tuning)
    if engine.profile is None:
        return _blocked(inputs, assessment, Reason.UNKNOWN_PROFILE, engine.message)
    errors = refusals(service.spec, engine.profile, inputs.context)
    if errors:
        return _blocked(inputs, assessment, _reason_of(errors), _in_one_line(tuple(errors)))
    try:
        return _decide_writes(inputs, assessment, Wanted(service, engine, engine.profile, tuning))
    except EngineOptionRefused as refusal:
        text = say(str(refusal), "", "Change spec.engine or the engine profile.")
        return _blocked(inputs, assessment, Reason.BAD_ENGINE_OPTION, text)


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
        control=inputs.snapshot.control_report,
        control_pending=inputs.snapshot.control_pending,
        defect=inputs.snapshot.defect,
    )


def _blocked(
    inputs: ReconcileInputs, assessment: Assessment, reason: Reason, message: str
) -> ReconcileResult:
    """Return a result without writes to children. They keep running; the status has the reason."""
    known = parse_last_good(inputs.status)
    first, _ = decide_last_good(inputs.facts, inputs.status, "", inputs.generation, inputs.now)
    return ReconcileResult(
        replace(assessment, blocked=Problem(reason, message)), last_good=known or first
    )


def _unreadable(inputs: ReconcileInputs) -> ReconcileResult:
    """Return a result without writes to children: a child that was not read may still exist."""
    first, *rest = inputs.snapshot.unreadable
    advice = "Repair or delete that object."
    if rest:
        advice = f"Repair or delete that object and {len(rest)} more."
    text = say(f"{first.kind} {first.name} cannot be read", first.why, advice)
    result = _blocked(inputs, _assess(inputs), Reason.UNREADABLE_OBJECT, text)
    return replace(result, again_after_s=(UNREADABLE_REQUEUE_S,))


def _reason_of(errors: Sequence[FieldError]) -> Reason:
    """Return BadEngineOption if only engine options or variables are refused, else InvalidSpec."""
    of_engine = all(
        error.path.startswith(("spec.engine.options.", "spec.engine.env.")) for error in errors
    )
    return Reason.BAD_ENGINE_OPTION if of_engine else Reason.INVALID_SPEC


def _in_one_line(errors: Sequence[FieldError]) -> str:
    """Return a message with the first error of the spec and the number of the others."""
    rest = len(errors) - 1
    more = f"The spec has {rest} more error{'s' if rest > 1 else ''}." if rest else ""
    return say(errors[0].path, errors[0].message, more)


def _crd_in_words(missing: Sequence[str]) -> str:
    what = "The CRD in the cluster is older than the operator and lacks fields"
    return say(what, ", ".join(missing), "Upgrade the CRDs. Until then, no child is written.")


def _tuning(inputs: ReconcileInputs) -> EngineTuning:
    """Return the start-up values that a remedy lowers: the control loop's, else the status's."""
    report = inputs.snapshot.control_report
    if report is not None:
        known = report.remedy
        return EngineTuning(known.max_sequences, known.cap_percent) if known else AS_SPECIFIED
    remedy = inputs.status.get("remedy")
    if not isinstance(remedy, Mapping):
        return AS_SPECIFIED
    return EngineTuning(
        max_sequences=_whole(remedy.get("maxSequences")),
        cap_percent=_whole(remedy.get("capPercent")),
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _hash_of(template: Manifest) -> str:
    """Return the hash in the annotation of a desired pod template."""
    return str(template["metadata"]["annotations"][names.ANNOTATION_TEMPLATE_HASH])


def _decide_engine(
    inputs: ReconcileInputs, service: InferenceService, tuning: EngineTuning
) -> EngineDecision:
    rollback = parse_rollback(inputs.status)
    engine = inputs.facts.engine
    known_hashes = {
        *([engine.template_hash] if engine else []),
        *([rollback.template_hash] if rollback else []),
    }

    def runs_unchanged_on(profile: EngineProfile) -> bool:
        try:
            template = desired_engine_template(service, profile, inputs.context, tuning)
        except EngineOptionRefused:
            return False
        return _hash_of(template) in known_hashes

    return decide_engine(
        service.spec,
        parse_engine(inputs.status),
        inputs.context.catalog,
        is_new_generation=inputs.is_new_generation,
        runs_unchanged_on=runs_unchanged_on,
        may_update=inputs.snapshot.may_update_engine,
    )


def _decide_writes(
    inputs: ReconcileInputs, assessment: Assessment, wanted: Wanted
) -> ReconcileResult:
    """Decide the rollout, the replicas and the children of a service that is not blocked."""
    facts, now, spec = inputs.facts, inputs.now, wanted.service.spec
    problems = inputs.diagnosis.current_problems
    by_spec = desired_engine_template(wanted.service, wanted.profile, inputs.context, wanted.tuning)
    wanted_hash = _hash_of(by_spec)
    last_good, good_again = decide_last_good(
        facts, inputs.status, wanted_hash, inputs.generation, now
    )
    if _must_remember(last_good, inputs.status, wanted_hash) and not spec.paused:
        return ReconcileResult(assessment, wanted.engine, last_good, remembers_first=True)
    rollout = decide_rollout(
        facts,
        problems,
        wanted_hash=wanted_hash,
        last_good=last_good,
        known=parse_rollback(inputs.status),
        rules=spec.rollout,
        generation=inputs.generation,
        now=now,
    )
    templates = inputs.snapshot.templates
    template = templates.get(rollout.revision) if rollout.revision else by_spec
    gpus = _gpus_per_replica(inputs, template)
    replicas = _decide_replicas(inputs, wanted.service, problems, gpus)
    over_budget = _over_budget(inputs, replicas, gpus)
    is_bypassed = _is_router_bypassed(inputs, wanted.service)
    assessment = replace(
        assessment,
        wanted_hash=wanted_hash,
        rollout=rollout,
        replicas=replicas,
        is_router_bypassed=is_bypassed,
        write_problem=over_budget or assessment.write_problem,
    )
    children, strategy_again = _decide_children(
        inputs,
        wanted,
        replicas,
        template=None if rollout.is_new or over_budget else template,
        is_router_bypassed=is_bypassed,
    )
    assessment = _with_conflicts(assessment, children.conflicts)
    is_contested = CONTEST_REQUEUE_S if replicas.contested_by else None
    is_limited = BUDGET_REQUEUE_S if replicas.limited_by or over_budget else None
    again = (
        good_again,
        rollout.again_after_s,
        strategy_again,
        children.again_after_s,
        is_contested,
        is_limited,
    )
    actions: tuple[Action, ...] = ()
    if not spec.paused:
        marks = decide_marks(facts, replicas.value, inputs.snapshot.pod_load)
        actions = (*(marks if _scales(children, wanted.service.name) else ()), *children.actions)
    return ReconcileResult(
        assessment, wanted.engine, last_good, actions, _missing_templates(inputs, rollout), again
    )


def _must_remember(last_good: LastGood | None, status: Mapping[str, Any], wanted_hash: str) -> bool:
    """Return True if the last good template is about to be replaced and is not yet in the status.

    Otherwise a crash after the write of the Deployment would make a rollback impossible.
    """
    return (
        last_good is not None
        and last_good.template_hash != wanted_hash
        and last_good != parse_last_good(status)
    )


def _gpus_per_replica(inputs: ReconcileInputs, template: Manifest | None) -> int:
    """Return the GPUs that a pod of the template requests, else those of the live template."""
    if template is not None:
        return accelerators_of(template["spec"])
    engine = inputs.facts.engine
    return engine.accelerators if engine else 0


def _over_budget(inputs: ReconcileInputs, replicas: ReplicaDecision, gpus: int) -> Problem | None:
    """Return GPUBudget if the new template needs more GPUs than the budget allows, else None.

    Then the Deployment is not written.
    """
    engine, allowance = inputs.facts.engine, inputs.snapshot.gpu_allowance
    held = engine.desired_replicas * engine.accelerators if engine else 0
    if not exceeds(replicas.value * gpus, held, allowance):
        return None
    what = f"{replicas.value} replicas with {gpus} GPUs each exceed {allowance.by}"
    advice = (
        "The engines keep running unchanged. "
        "Request fewer GPUs or replicas, or raise the GPU budget."
    )
    return Problem(Reason.GPU_BUDGET, say(what, "", advice))


def _decide_replicas(
    inputs: ReconcileInputs, service: InferenceService, problems: Sequence[Problem], gpus: int
) -> ReplicaDecision:
    contested_by = contesting_manager(
        inputs.facts,
        inputs.snapshot.foreign_replica_writes,
        inputs.status,
        is_new_generation=inputs.is_new_generation,
        now=inputs.now,
    )
    return decide_replicas(
        service.spec,
        inputs.facts,
        inputs.snapshot.allocation,
        contested_by=contested_by,
        is_blocked=is_scale_up_blocked(inputs.facts, problems),
        gpus_per_replica=gpus,
        allowance=inputs.snapshot.gpu_allowance,
    )


def _decide_children(
    inputs: ReconcileInputs,
    wanted: Wanted,
    replicas: ReplicaDecision,
    *,
    template: Manifest | None,
    is_router_bypassed: bool,
) -> tuple[ChildrenDecision, float | None]:
    """Decide the writes of children. Without a pod template, omit the engine Deployment."""
    service = wanted.service
    strategy, again = decide_strategy(
        inputs.facts, dict(inputs.diagnosis.by_pod), service.spec.rollout, inputs.now
    )
    desired = desired_children(
        service,
        wanted.profile,
        inputs.context,
        replicas=replicas.value,
        tuning=wanted.tuning,
        strategy=strategy,
        template=template,
    )
    engine_key = (Kind.DEPLOYMENT, names.engine_name(service.name))
    untouched = {(Kind.SERVICE, names.address_name(service.name))} if is_router_bypassed else set()
    if template is None:
        untouched.add(engine_key)
    children = decide_children(
        desired,
        inputs.snapshot,
        service=service.name,
        owner_uid=service.uid,
        now=inputs.now,
        live_bound=frozenset({engine_key}) if replicas.rests_on_live_value else frozenset(),
        untouched=frozenset(untouched),
    )
    return children, again


def _is_router_bypassed(inputs: ReconcileInputs, service: InferenceService) -> bool:
    """Return True while the address must select the engines, until the first router is ready.

    An immediate switch from routing policy None would leave the address without an endpoint. The
    live Kubernetes Service is recognized by the digest that it has without a router.
    """
    routing = service.spec.routing
    address = inputs.snapshot.children.get((Kind.SERVICE, names.address_name(service.name)))
    if routing.policy is RoutingPolicy.NONE or address is None or inputs.facts.ready_routers:
        return False
    plain = routing.model_copy(update={"policy": RoutingPolicy.NONE})
    unrouted = replace(service, spec=service.spec.model_copy(update={"routing": plain}))
    return address.digest == digest_of(desired_address(unrouted))


def _scales(children: ChildrenDecision, service: str) -> bool:
    """Return True if this reconcile writes the engine Deployment."""
    return any(
        item.kind == Kind.DEPLOYMENT and item.name == names.engine_name(service)
        for item in children.actions
    )


def _missing_templates(inputs: ReconcileInputs, rollout: RolloutDecision) -> tuple[str, ...]:
    """Return the ReplicaSet whose template a rollback needs and the snapshot lacks."""
    name = rollout.revision
    return (name,) if name and name not in inputs.snapshot.templates else ()


def _with_conflicts(assessment: Assessment, conflicts: Sequence[Conflict]) -> Assessment:
    """Return the assessment, blocked if a child's name is taken by another object."""
    foreign = [item for item in conflicts if not item.is_leftover]
    if not foreign:
        return assessment
    first = foreign[0]
    text = say(
        f"{first.kind} {first.name} already exists and does not belong to this service",
        "",
        "Fleetkeeper did not change it. Delete it, or give the InferenceService another name.",
    )
    return replace(assessment, blocked=Problem(Reason.NAME_CONFLICT, text))
