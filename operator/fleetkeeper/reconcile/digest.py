"""Digests of desired objects: equal if and only if an apply would change nothing.

There are two. `digest_of` covers a whole child: the planner computes it from the desired manifest,
the Kubernetes adapter from the fields that our field manager owns in the live object.
`template_hash_of` covers a pod template. A change of it restarts every pod.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from fleetkeeper.api.names import ANNOTATION_TEMPLATE_HASH
from fleetkeeper.common.values import Manifest

DIGEST_LENGTH = 16
"""Hexadecimal digits kept of the SHA-256 (64 bits). They detect changes, not forgery."""

_PLAIN = frozenset({str, int, bool, float})


def digest_of(manifest: Manifest) -> str:
    """Return the digest of the fields that a server-side apply of `manifest` would own.

    These are left out: apiVersion, kind, metadata.name and metadata.namespace, which identify the
    object and never appear in managedFields; and `spec.replicas` of a Deployment, which planner and
    adapter compare separately. Map entries that are None, {} or [] are ignored, because the API
    server drops most of them when it stores an object. Builders therefore never give such a value a
    meaning. A user's affinity may contain some, but the pod template carries its own hash.
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
    """Return the hash of a pod template without its own hash annotation."""
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
    """Return True if the object is a Deployment, whose `replicas` others may write.

    A live object's owned fields may lack the kind: then a template shows that it is a Deployment.
    """
    spec = manifest.get("spec")
    if "kind" in manifest:
        return bool(manifest["kind"] == "Deployment")
    return isinstance(spec, Mapping) and "template" in spec


def _sha(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def _without_empty(value: object) -> object:
    """Return the value without empty map entries. Items of lists are kept."""
    kind = type(value)  # exact classes first: most of a reconcile's time is spent here
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
