"""The checks of the rules on a parsed spec, section by section."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from pydantic import BaseModel

from fleetkeeper.api.profiles.metadata_names import is_allowed, matches
from fleetkeeper.api.schema.error_messages import FieldError, path_text
from fleetkeeper.api.schema.rules import NAME_RULES, RULES, is_hub_source
from fleetkeeper.api.types import InferenceServiceSpec, ServiceType

COMMIT = re.compile(r"[0-9a-f]{40}")
FLOATING_REVISION = "must be a commit of 40 hexadecimal digits; the operator's settings do not allow branches and tags (floatingRevisions)"

SYSTEM_PRIORITY = "system-"
"""The prefix of the PriorityClasses that Kubernetes reserves for its own pods, which preempt all others."""
SYSTEM_PRIORITY_REFUSED = "is a system PriorityClass, whose pods preempt all others; the operator's settings do not allow these classes (systemPriorityClasses). Choose another class"


EXPOSED_TYPE_REFUSED = "is not allowed by the operator's settings (exposedServiceTypes), because it exposes the service outside the cluster. Use ClusterIP, or let an administrator allow it"


def broken_name_rules(name: str) -> list[FieldError]:
    """Return the errors in the name of the resource."""
    return [
        FieldError("metadata.name", rule.message) for rule in NAME_RULES if not rule.holds(name)
    ]


def broken_rules(section: BaseModel, *at: str | int) -> list[FieldError]:
    """Return the rules that a section and its inner sections break. `at` is the path of the section."""
    errors = [
        FieldError(
            path_text(*at, *([rule.field] if rule.field else [])),
            rule.message,
            tuple(path_text(*at, name) for name in rule.reads),
        )
        for rule in RULES.get(type(section), ())
        if not rule.holds(section)
    ]
    for path, inner in _sections_in(section):
        errors += broken_rules(inner, *at, *path)
    return errors


def _sections_in(section: BaseModel) -> Iterator[tuple[tuple[str | int, ...], BaseModel]]:
    for name, info in type(section).model_fields.items():
        value, key = getattr(section, name), info.alias or name
        if isinstance(value, BaseModel):
            yield (key,), value
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield (key, index), item


def floating_revisions(spec: InferenceServiceSpec) -> list[FieldError]:
    """Return the revisions that are not commits. A branch or tag can move, so new pods could differ."""
    sources: list[tuple[str, str, str | None]] = [
        ("spec.model.revision", spec.model.source, spec.model.revision),
        *(
            (f"spec.model.adapters[{index}].revision", adapter.source, adapter.revision)
            for index, adapter in enumerate(spec.model.adapters)
        ),
    ]
    return [
        FieldError(path, FLOATING_REVISION)
        for path, source, revision in sources
        if is_hub_source(source) and revision is not None and not COMMIT.fullmatch(revision)
    ]


def forbidden_account(spec: InferenceServiceSpec, allowed: tuple[str, ...]) -> list[FieldError]:
    """Return an error if the settings do not allow the ServiceAccount. `*` ends a prefix."""
    name = spec.service_account_name
    if name is None or matches(allowed, name):
        return []
    known = f"allow only {', '.join(allowed)}" if allowed else "allow none"
    return [
        FieldError(
            "spec.serviceAccountName",
            f"{name} is not a ServiceAccount that engines may use; the operator's settings {known} "
            "(engineServiceAccounts). Remove it, or ask the administrator to allow it",
        )
    ]


def forbidden_metadata(spec: InferenceServiceSpec, allowed: tuple[str, ...]) -> list[FieldError]:
    """Return an error for each map of `podMetadata` with names that the settings do not allow."""
    of = spec.pod_metadata
    return [
        FieldError(
            path,
            f"services may not use {', '.join(refused)}, which the operator's settings do not allow "
            "(podMetadataNames). Remove it, or ask the administrator to allow it",
        )
        for path, names in (
            ("spec.podMetadata.labels", of.labels),
            ("spec.podMetadata.annotations", of.annotations),
        )
        if (refused := [name for name in names if not is_allowed(name, allowed)])
    ]


def system_priority(spec: InferenceServiceSpec) -> list[FieldError]:
    """Return the PriorityClasses of engines and routers that are system classes."""
    named = {
        "spec.placement.priorityClassName": spec.placement.priority_class_name,
        "spec.routing.placement.priorityClassName": spec.routing.placement.priority_class_name,
    }
    return [
        FieldError(path, SYSTEM_PRIORITY_REFUSED)
        for path, name in named.items()
        if name is not None and name.startswith(SYSTEM_PRIORITY)
    ]


def exposed_type(spec: InferenceServiceSpec, allowed: Collection[str]) -> list[FieldError]:
    """Return an error if the Service's type exposes it outside the cluster without permission."""
    kind = spec.service.type
    if kind is ServiceType.CLUSTER_IP or kind in allowed:
        return []
    return [FieldError("spec.service.type", f"{kind} {EXPOSED_TYPE_REFUSED}")]
