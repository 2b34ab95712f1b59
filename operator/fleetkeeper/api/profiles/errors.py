"""Errors for features that a service requests and its engine profile does not support."""

from __future__ import annotations

from fleetkeeper.api.options import newer_value_errors, option_errors
from fleetkeeper.api.profiles.environment import is_administrators
from fleetkeeper.api.profiles.extra_arguments import (
    conflict_errors,
    option_values_of,
    options_of,
)
from fleetkeeper.api.profiles.pod_template import extended_resources
from fleetkeeper.api.profiles.profile import AcceleratorKind, EngineProfile, effective_resources
from fleetkeeper.api.schema.error_messages import FieldError
from fleetkeeper.api.schema.object_storage_rules import is_object_source
from fleetkeeper.api.schema.option_rules import combination_errors
from fleetkeeper.api.types import InferenceServiceSpec
from fleetkeeper.api.values.quantity import parse_quantity


def profile_option_errors(spec: InferenceServiceSpec, profile: EngineProfile) -> list[FieldError]:
    """Return the errors of the spec's engine options with this profile."""
    options, arguments = spec.engine.options, profile.extra_arguments
    errors = conflict_errors(options, arguments, profile.name)
    errors += option_errors(options, profile.options, options_of(arguments))
    errors += newer_value_errors(options, profile.vllm_version)
    return errors + combination_errors(spec, {**option_values_of(arguments), **options})


def profile_errors(spec: InferenceServiceSpec, profile: EngineProfile) -> list[FieldError]:
    """Return all settings of the spec that this profile does not support."""
    errors = profile_option_errors(spec, profile)
    errors += [
        FieldError(f"spec.engine.env[{index}].name", _refusal(variable.name, profile))
        for index, variable in enumerate(spec.engine.env)
        if not profile.allows_variable(variable)
    ]
    reads_model = not profile.simulated
    if reads_model and is_object_source(spec.model.source) and profile.object_storage is None:
        errors.append(
            FieldError(
                "spec.model.source",
                f"is s3://, but the engine profile {profile.name} has no objectStorage; choose a profile that has it, or use hf:// or pvc://",
            )
        )
    if spec.memory.cap_percent > profile.max_cap_percent:
        errors.append(
            FieldError(
                "spec.memory.capPercent",
                f"is {spec.memory.cap_percent}, but the engine profile {profile.name} allows at most {profile.max_cap_percent}; lower it, or choose a profile with a higher maxCapPercent",
            )
        )
    resources = effective_resources(spec, profile)
    if parse_quantity(resources.shared_memory) >= parse_quantity(resources.memory):
        errors.append(
            FieldError(
                "spec.resources.sharedMemory",
                f"is {resources.shared_memory}, but must be less than the memory of {resources.memory}; lower it or raise spec.resources.memory",
                ("spec.resources.memory", "spec.resources.sharedMemory"),
            )
        )
    asked = spec.resources.accelerator
    if asked is not None and asked.resource in extended_resources(profile.pod_template or {}):
        errors.append(
            FieldError(
                "spec.resources.accelerator.resource",
                f"is {asked.resource}, which the podTemplate of the engine profile {profile.name} sets; choose another resource or profile",
            )
        )
    if profile.accelerator is AcceleratorKind.CPU and not profile.simulated:
        errors += _accelerator_errors(spec, profile)
    return errors


def _refusal(name: str, profile: EngineProfile) -> str:
    if profile.sets_variable(name):
        return f"{name} is set by the engine profile {profile.name}; remove it"
    if is_administrators(name):
        return f"{name} can only be set by the administrator, in the engine profile's variables"
    if profile.allows_env(name):
        return (
            f"{name} cannot come from a Secret, because the engine profile {profile.name} does not list "
            "its exact name, and tuning variables appear in logs; set value instead of valueFrom"
        )
    return (
        f"{name} is not allowed by the engine profile {profile.name}, "
        f"which allows {', '.join(profile.env) or 'no variables'} (see the reference of engine profiles)"
    )


def _accelerator_errors(spec: InferenceServiceSpec, profile: EngineProfile) -> list[FieldError]:
    errors = []
    if spec.resources.accelerator is not None:
        errors.append(
            FieldError(
                "spec.resources.accelerator",
                f"is not supported by the engine profile {profile.name}, which runs on CPUs; remove it or choose a cuda profile",
            )
        )
    if spec.engine.tensor_parallel_size > 1:
        errors.append(
            FieldError(
                "spec.engine.tensorParallelSize",
                f"must be 1 with the engine profile {profile.name}, which runs on CPUs",
            )
        )
    return errors
