"""The fields of our schema that the API server knows, from its published OpenAPI document.

With an older CRD, the API server silently prunes the fields that are new in the operator's schema.
The published OpenAPI of our own group shows this without any permission on CRDs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fleetkeeper.api.names import GROUP, KIND, VERSION
from fleetkeeper_kube.client import LIST_TIMEOUT_S, KubernetesClient
from fleetkeeper_kube.errors import ApiError


async def observe_schema(client: KubernetesClient) -> Mapping[str, Any] | None:
    """Return the published schema of InferenceService; None if the group is not served.

    Raises:
        ApiError: the document could not be read.
    """
    try:
        document = await client.request(
            "GET", f"/openapi/v3/apis/{GROUP}/{VERSION}", timeout_s=LIST_TIMEOUT_S
        )
    except ApiError as problem:
        if problem.is_absent:
            return None
        raise
    schemas = (document.get("components") or {}).get("schemas") or {}
    for schema in schemas.values():
        kinds = schema.get("x-kubernetes-group-version-kind") or []
        if {"group": GROUP, "version": VERSION, "kind": KIND} in kinds:
            return schema if isinstance(schema, Mapping) else None
    return None


def missing_fields(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sorted property paths of `wanted` that `live` lacks: `spec.batching.minTokens`."""
    there = set(_paths(live))
    return tuple(sorted(path for path in _paths(wanted) if path not in there))


def _paths(schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, below in (schema.get("properties") or {}).items():
        if not prefix and name not in {"spec", "status"}:
            continue
        path = f"{prefix}{name}"
        yield path
        if isinstance(below, Mapping):
            yield from _paths(below, f"{path}.")
            items = below.get("items")
            if isinstance(items, Mapping):
                yield from _paths(items, f"{path}[].")
