"""What a sound spec asks for and this installation does not give: by its profile and its settings."""

from __future__ import annotations

from fleetkeeper.api.plain_words import FieldError
from fleetkeeper.api.profile import EngineProfile, profile_errors
from fleetkeeper.api.rule_check import system_priority
from fleetkeeper.api.types import InferenceServiceSpec
from fleetkeeper.plan.context import PlanContext


def refusals(
    spec: InferenceServiceSpec, profile: EngineProfile, context: PlanContext
) -> list[FieldError]:
    """Every mistake that only the profile or the settings can show."""
    errors = profile_errors(spec, profile)
    return errors if context.system_priority_classes else errors + system_priority(spec)
