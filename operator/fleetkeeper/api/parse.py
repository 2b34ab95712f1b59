"""From a manifest to values: every mistake at once, each with its field and what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from fleetkeeper.api.fields import sections
from fleetkeeper.api.names import API_VERSION, KIND
from fleetkeeper.api.plain_words import FieldError, in_plain_words
from fleetkeeper.api.rule_check import broken_name_rules, broken_rules, floating_revisions
from fleetkeeper.api.types import InferenceServiceSpec

__all__ = ["FieldError", "InferenceService", "InvalidService", "parse_service"]

KEPT_SPECS: Final = 1024
"""Parsed specs that are kept, 12 KiB each. They are frozen, and the control loop holds the same ones."""

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class InferenceService:
    """An InferenceService as decisions see it. Labels and annotations are the object's own."""

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    deleting: bool
    created: str
    spec: InferenceServiceSpec
    status: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


class InvalidService(ValueError):
    """The manifest is no valid InferenceService; `errors` holds every mistake."""

    def __init__(self, errors: tuple[FieldError, ...]) -> None:
        super().__init__("; ".join(str(error) for error in errors))
        self.errors = errors


def parse_service(
    manifest: Mapping[str, Any], *, allow_floating_revisions: bool = False
) -> InferenceService:
    """The service that a manifest describes; defaults are filled in as the API server fills them.

    The rules are those of the CRD, checked again here: admission may have been older. With
    `allow_floating_revisions` an hf:// model may name a branch or a tag. What only the engine
    profile can judge (options, variables, accelerators), `profile_errors` judges.

    Raises:
        InvalidService: with every mistake that was found.
    """
    errors: list[FieldError] = []
    for key, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(key) != wanted:
            errors.append(FieldError(key, f"must be {wanted}, is {manifest.get(key)!r}"))
    metadata = manifest.get("metadata")
    if not isinstance(metadata, Mapping):
        errors.append(FieldError("metadata", "is missing; give at least metadata.name"))
        metadata = {}
    name = str(metadata.get("name") or "")
    errors += broken_name_rules(name)
    spec, spec_errors = _parse_spec(manifest.get("spec"))
    errors += spec_errors
    if spec is not None and not allow_floating_revisions:
        errors += floating_revisions(spec)
    if errors or spec is None:
        raise InvalidService(tuple(errors))
    return InferenceService(
        namespace=str(metadata.get("namespace") or "default"),
        name=name,
        uid=str(metadata.get("uid") or ""),
        generation=_whole(metadata.get("generation")),
        resource_version=str(metadata.get("resourceVersion") or ""),
        deleting=bool(metadata.get("deletionTimestamp")),
        created=str(metadata.get("creationTimestamp") or ""),
        spec=spec,
        status=_map(manifest.get("status")),
        labels=_map(metadata.get("labels")),
        annotations=_map(metadata.get("annotations")),
    )


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _parse_spec(spec: object) -> tuple[InferenceServiceSpec | None, list[FieldError]]:
    if not isinstance(spec, Mapping):
        return None, [FieldError("spec", "is missing; give at least spec.model.source")]
    try:
        parsed, broken = _parsed_spec(json.dumps(spec, default=str))
    except ValidationError as problem:
        return None, in_plain_words(problem, "spec", InferenceServiceSpec) + _rules_of_sound_parts(
            spec
        )
    return parsed, list(broken)


@lru_cache(maxsize=KEPT_SPECS)
def _parsed_spec(text: str) -> tuple[InferenceServiceSpec, tuple[FieldError, ...]]:
    """A service is looked at some ten times before it is ready, and its spec parsed once."""
    parsed = _validated(InferenceServiceSpec, json.loads(text))
    return parsed, tuple(broken_rules(parsed, "spec"))


def _rules_of_sound_parts(spec: Mapping[str, Any]) -> list[FieldError]:
    """The broken rules within those sections that are sound in themselves, so that all is told at once."""
    errors: list[FieldError] = []
    for key, section in sections(InferenceServiceSpec).items():
        if key not in spec or section is None:
            continue
        try:
            part = _validated(section, spec[key])
        except ValidationError:
            continue  # told already, field by field
        errors += broken_rules(part, "spec", key)
    return errors


def _validated(section: type[S], raw: object) -> S:
    """As JSON and strictly, so that only what the API server takes is taken: no "3" for 3."""
    text = json.dumps(_without_nulls(section, raw), default=str)
    return section.model_validate_json(text, strict=True, by_alias=True, by_name=False)


def _without_nulls(section: type[BaseModel], raw: object) -> object:
    """Drops the nulls of known fields, as the API server does before it fills in defaults."""
    if not isinstance(raw, Mapping):
        return raw
    kept = dict(raw)
    known = sections(section)
    for key, value in raw.items():
        if key not in known:
            continue
        inner = known[key]
        if value is None:
            del kept[key]
        elif inner is not None:
            kept[key] = _without_nulls(inner, value)
    return kept
