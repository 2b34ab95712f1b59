"""The engines that the spec asks for: the profile, the pod template, or the reason why neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.names import ANNOTATION_TEMPLATE_HASH
from fleetkeeper.api.parse import FieldError, InferenceService
from fleetkeeper.api.profiles.errors import profile_errors
from fleetkeeper.api.profiles.profile import EngineProfile
from fleetkeeper.api.schema.rule_check import (
    exposed_type,
    forbidden_account,
    forbidden_metadata,
    system_priority,
)
from fleetkeeper.api.types import InferenceServiceSpec
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.choice.engine import EngineDecision, decide_engine, parse_engine
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.reconcile.inputs import ReconcileInputs
from fleetkeeper.reconcile.manifests.engine_document import EngineOptionRefused
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from fleetkeeper.reconcile.manifests.tuning import AS_SPECIFIED, EngineTuning
from fleetkeeper.reconcile.observe.problem import Problem, say
from fleetkeeper.reconcile.rollout import parse_rollback


@dataclass(frozen=True, slots=True)
class Wanted:
    """The desired service with its engine profile and the pod template of its engines."""

    service: InferenceService
    engine: EngineDecision
    profile: EngineProfile
    template: Manifest

    @property
    def template_hash(self) -> str:
        """Return the hash in the annotation of the pod template."""
        return _hash_of(self.template)


def decide_wanted(inputs: ReconcileInputs, service: InferenceService) -> Wanted | Problem:
    """Return the desired engines, or why the spec, the profile and the settings allow none.

    A new generation takes a newer profile, unless the pods would not change on the present one.
    """
    context, tuning = inputs.context, _tuning(inputs)
    engine = decide_engine(
        service.spec,
        parse_engine(inputs.status),
        context.catalog,
        may_update=inputs.snapshot.may_update_engine,
    )
    template = None
    if engine.newer is not None and inputs.is_new_generation:
        template = _unchanged_template(inputs, service, engine.profile, tuning)
        if template is None:
            engine = replace(engine, profile=engine.newer, newer=None)
    if engine.profile is None:
        return Problem(Reason.UNKNOWN_PROFILE, engine.message)
    errors = refusals(service.spec, engine.profile, context)
    if errors:
        return Problem(_reason_of(errors), in_one_line(errors))
    try:
        template = template or desired_engine_template(service, engine.profile, context, tuning)
    except EngineOptionRefused as refusal:
        text = say(str(refusal), "", "Change spec.engine or the engine profile.")
        return Problem(Reason.BAD_ENGINE_OPTION, text)
    return Wanted(service, engine, engine.profile, template)


def _unchanged_template(
    inputs: ReconcileInputs,
    service: InferenceService,
    profile: EngineProfile | None,
    tuning: EngineTuning,
) -> Manifest | None:
    """Return the template on this profile if it already runs or was rolled back, else None."""
    if profile is None:
        return None
    try:
        template = desired_engine_template(service, profile, inputs.context, tuning)
    except EngineOptionRefused:
        return None
    rollback, live = parse_rollback(inputs.status), inputs.facts.engine
    known = {item.template_hash for item in (rollback, live) if item is not None}
    return template if _hash_of(template) in known else None


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
    return str(template["metadata"]["annotations"][ANNOTATION_TEMPLATE_HASH])


def refusals(
    spec: InferenceServiceSpec, profile: EngineProfile, context: PlanContext
) -> list[FieldError]:
    """Return the errors of a valid spec that only the engine profile or the settings reveal."""
    return profile_errors(spec, profile) + settings_refusals(spec, context)


def settings_refusals(spec: InferenceServiceSpec, context: PlanContext) -> list[FieldError]:
    """Return the errors of a valid spec that only the operator's settings reveal."""
    errors = forbidden_account(spec, context.engine_service_accounts)
    errors += forbidden_metadata(spec, context.pod_metadata_names)
    errors += exposed_type(spec, context.exposed_service_types)
    return errors if context.system_priority_classes else errors + system_priority(spec)


def _reason_of(errors: Sequence[FieldError]) -> Reason:
    """Return BadEngineOption if only engine options or variables are refused, else InvalidSpec."""
    of_engine = all(
        error.path.startswith(("spec.engine.options.", "spec.engine.env[")) for error in errors
    )
    return Reason.BAD_ENGINE_OPTION if of_engine else Reason.INVALID_SPEC


def in_one_line(errors: Sequence[FieldError]) -> str:
    """Return a message with the first error of the spec and the number of the others."""
    rest = len(errors) - 1
    more = f"The spec has {rest} more error{'s' if rest > 1 else ''}." if rest else ""
    return say(errors[0].path, errors[0].message, more)
