"""Digests of what we ask for: equal exactly when an apply would change nothing.

Two are used. `digest_of` is taken of a whole child: by the planner of the desired manifest, by the
Kubernetes adapter of the fields that our field manager owns in the live object. `template_hash_of`
is taken of a pod template, and a change of it is a restart of every pod.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from fleetkeeper.api.names import ANNOTATION_TEMPLATE_HASH
from fleetkeeper.plan.model import Manifest

DIGEST_LENGTH = 16
"""Hexadecimal digits kept of the SHA-256: 64 bits. They guard against change, not against malice."""

_PLAIN = frozenset({str, int, bool, float})


def digest_of(manifest: Manifest) -> str:
    """The digest of the fields that a server-side apply of `manifest` would own.

    Left out: apiVersion, kind, metadata.name and metadata.namespace, which are the object's address
    and never appear in managedFields; and `spec.replicas` of a Deployment, which planner and adapter
    compare on its own. Map entries that are None, {} or [] do not count, because the API server drops
    most of them when it stores an object; builders therefore give no such value a meaning (the pod
    template, where a user's affinity may hold some, carries its own hash).
    """
    owned = {key: value for key, value in manifest.items() if key not in {"apiVersion", "kind"}}
    metadata = owned.get("metadata")
    if isinstance(metadata, Mapping):
        owned["metadata"] = {
            key: value for key, value in metadata.items() if key not in {"name", "namespace"}
        }
    if _is_deployment(manifest) and isinstance(owned.get("spec"), Mapping):
        owned["spec"] = {key: value for key, value in owned["spec"].items() if key != "replicas"}
    return _sha(_without_empty(owned))


def template_hash_of(template: Manifest) -> str:
    """The hash of a pod template, its own hash annotation left out and everything else kept."""
    metadata = dict(template.get("metadata", {}))
    annotations = {
        key: value
        for key, value in metadata.get("annotations", {}).items()
        if key != ANNOTATION_TEMPLATE_HASH
    }
    metadata.pop("annotations", None)
    if annotations:
        metadata["annotations"] = annotations
    return _sha({**template, "metadata": metadata})


def _is_deployment(manifest: Manifest) -> bool:
    """Whether `replicas` is a count that others may write: a live projection may lack its kind."""
    spec = manifest.get("spec")
    if "kind" in manifest:
        return bool(manifest["kind"] == "Deployment")
    return isinstance(spec, Mapping) and "template" in spec


def _sha(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def _without_empty(value: object) -> object:
    """The value without map entries that are empty; items of lists stay where they are."""
    kind = type(value)  # exact classes first: this is most of the work of a look
    if kind in _PLAIN:
        return value
    if kind is dict or isinstance(value, Mapping):
        return _entries_kept(value)  # type: ignore[arg-type] # a dict, or a Mapping
    if kind is list or (isinstance(value, Sequence) and not isinstance(value, str)):
        return [_without_empty(item) for item in value]  # type: ignore[attr-defined] # a sequence
    return value


def _entries_kept(value: Mapping[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for key, item in value.items():
        if type(item) in _PLAIN:
            kept[key] = item
        elif (lean := _without_empty(item)) is not None and lean not in ({}, []):
            kept[key] = lean
    return kept
