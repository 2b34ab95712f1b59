"""Parsing of manifests into values. Reports all errors at once, with their fields and corrections."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from fleetkeeper.api.names import API_VERSION, KIND
from fleetkeeper.api.schema.error_messages import FieldError, in_plain_words, place_of
from fleetkeeper.api.schema.fields import sections
from fleetkeeper.api.schema.rule_check import broken_name_rules, broken_rules, floating_revisions
from fleetkeeper.api.schema.sound_part import SoundPart
from fleetkeeper.api.types import InferenceServiceSpec

__all__ = ["FieldError", "InferenceService", "InvalidService", "parse_service"]

KEPT_SPECS: Final = 1024
"""The size of the cache of parsed specs, 12 KiB each. The control loop shares these frozen values."""

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class InferenceService:
    """An InferenceService as an input of decisions, with the object's own labels and annotations."""

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
    """A manifest that is not a valid InferenceService. `errors` contains all errors.

    `spec` is the spec without its broken fields, for further checks, and `part` says which errors of
    these checks do not depend on a broken field. Both are None if nothing can be checked.
    """

    def __init__(
        self,
        errors: tuple[FieldError, ...],
        spec: InferenceServiceSpec | None = None,
        part: SoundPart | None = None,
    ) -> None:
        super().__init__("; ".join(str(error) for error in errors))
        self.errors = errors
        self.spec = spec
        self.part = part


def parse_service(
    manifest: Mapping[str, Any], *, allow_floating_revisions: bool = False
) -> InferenceService:
    """Return the service that a manifest describes, with the same defaults as the API server.

    Checks the rules of the CRD again, because the CRD in the cluster may be older. With
    `allow_floating_revisions`, an hf:// model may name a branch or a tag. `profile_errors` checks
    what depends on the engine profile: options, variables, and accelerators.

    Raises:
        InvalidService: The manifest is invalid; contains all errors.
    """
    errors: list[FieldError] = []
    for key, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(key) != wanted:
            errors.append(FieldError(key, f"must be {wanted}, but is {manifest.get(key)!r}"))
    metadata = manifest.get("metadata")
    if not isinstance(metadata, Mapping):
        errors.append(FieldError("metadata", "is missing; set at least metadata.name"))
        metadata = {}
    name = str(metadata.get("name") or "")
    errors += broken_name_rules(name)
    spec, part, spec_errors = _parse_spec(manifest.get("spec"))
    errors += spec_errors
    if spec is not None and not allow_floating_revisions:
        floating = floating_revisions(spec)
        errors += part.remaining(floating) if part else floating
    if errors or spec is None:
        raise InvalidService(tuple(errors), spec, part)
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


def _parse_spec(
    spec: object,
) -> tuple[InferenceServiceSpec | None, SoundPart | None, list[FieldError]]:
    """Return the spec and its errors. With broken fields: the spec without them, and its part."""
    if not isinstance(spec, Mapping):
        return None, None, [FieldError("spec", "is missing; set at least spec.model.source")]
    try:
        parsed, broken = _parsed_spec(json.dumps(spec, default=str))
    except ValidationError as problem:
        errors = in_plain_words(problem, "spec", InferenceServiceSpec)
        sound, part = _sound_part(spec, problem)
        if sound is not None:
            errors += part.remaining(broken_rules(sound, "spec"))
        return sound, part, errors
    return parsed, None, list(broken)


@lru_cache(maxsize=KEPT_SPECS)
def _parsed_spec(text: str) -> tuple[InferenceServiceSpec, tuple[FieldError, ...]]:
    """Parse and cache a spec: a service is reconciled about ten times before it is ready."""
    parsed = _validated(InferenceServiceSpec, json.loads(text))
    return parsed, tuple(broken_rules(parsed, "spec"))


def _sound_part(
    spec: Mapping[str, Any], problem: ValidationError
) -> tuple[InferenceServiceSpec | None, SoundPart]:
    """Return the spec without the fields that `problem` names, and its part. None: nothing is left."""
    part = SoundPart(spec)
    while part.drop(place_of(finding) for finding in problem.errors(include_url=False)):
        try:
            return _validated(InferenceServiceSpec, part.tree), part
        except ValidationError as next_problem:
            problem = next_problem
    return None, part


def _validated(section: type[S], raw: object) -> S:
    """Validate strict JSON, to accept only what the API server accepts: not "3" for 3."""
    text = json.dumps(_without_nulls(section, raw), default=str)
    return section.model_validate_json(text, strict=True, by_alias=True, by_name=False)


def _without_nulls(section: type[BaseModel], raw: object) -> object:
    """Drop nulls of known fields, as the API server does before it applies defaults."""
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
