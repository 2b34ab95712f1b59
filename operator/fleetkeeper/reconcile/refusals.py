"""Values of a valid spec that this installation's engine profile or settings do not allow."""

from __future__ import annotations

from fleetkeeper.api.profile import EngineProfile, profile_errors
from fleetkeeper.api.schema.error_messages import FieldError
from fleetkeeper.api.schema.rule_check import system_priority
from fleetkeeper.api.types import InferenceServiceSpec
from fleetkeeper.reconcile.context import PlanContext


def refusals(
    spec: InferenceServiceSpec, profile: EngineProfile, context: PlanContext
) -> list[FieldError]:
    """Return the errors of a spec that only the engine profile or the settings reveal."""
    errors = profile_errors(spec, profile)
    return errors if context.system_priority_classes else errors + system_priority(spec)
