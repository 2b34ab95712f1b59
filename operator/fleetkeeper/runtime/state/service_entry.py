"""The cached form of an InferenceService: the fields that decisions need, compressed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fleetkeeper.api.names import ANNOTATION_WAKE, UNWRITTEN_STATUS
from fleetkeeper.common.values import Manifest
from fleetkeeper_kube.reading import UNREAD, as_map, text, version_of

LARGEST_SPEC_BYTES: Final = 32 * 1024
"""Limit of a spec as JSON. A usual one takes 1 to 4 KiB. The control loop keeps it parsed, which takes
up to 17 times as much."""
LARGEST_STATUS_BYTES: Final = 64 * 1024
"""Limit of a status as JSON; the schema allows about 36 KiB."""
METADATA: Final = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
)
"""The metadata fields that decisions need, beside one annotation. Labels, other annotations, finalizers,
owners and managedFields may take a megabyte, and no decision needs them."""


@dataclass(slots=True)
class ServiceEntry:
    """One InferenceService, compressed: as dicts it would take five times the memory."""

    uid: str
    version: int
    packed: bytes
    is_observed: bool = True
    """True if the status is up to date with the spec."""
    unread: str = ""
    """Why the spec was not read; empty if it was."""

    def unpack(self) -> Manifest:
        """Return the object as the API server holds it, reduced to what decisions need."""
        found: Manifest = json.loads(zlib.decompress(self.packed))
        return found


def pack_service(live: Mapping[str, Any]) -> ServiceEntry:
    """Return the entry of a live service from any writer.

    A spec that is unreadable or too large is left out, and the entry says why. The service's pods
    keep running. The schema's default status is left out too: such a service is new.
    """
    meta = as_map(live.get("metadata"))
    spec, status = live.get("spec"), as_map(live.get("status"))
    why = text(live.get(UNREAD)) or _why_not(spec)
    kept: Manifest = {
        **{name: live[name] for name in ("apiVersion", "kind") if name in live},
        "metadata": {name: meta[name] for name in METADATA if name in meta},
    }
    if wake := text(as_map(meta.get("annotations")).get(ANNOTATION_WAKE)):
        kept["metadata"]["annotations"] = {ANNOTATION_WAKE: wake}
    if spec is not None:
        kept["spec"] = {} if why else spec
    if status and status != UNWRITTEN_STATUS and _size(status) <= LARGEST_STATUS_BYTES:
        kept["status"] = status
    packed = json.dumps(kept, separators=(",", ":")).encode()
    return ServiceEntry(
        uid=text(meta.get("uid")),
        version=version_of(live),
        packed=zlib.compress(packed, 1),
        is_observed=status.get("observedGeneration") == meta.get("generation"),
        unread=why,
    )


def _why_not(spec: object) -> str:
    if spec is None:
        return ""
    if not isinstance(spec, Mapping):
        return "spec is not an object"
    size = _size(spec)
    if size <= LARGEST_SPEC_BYTES:
        return ""
    return f"spec takes {size} bytes as JSON; the limit is {LARGEST_SPEC_BYTES} bytes"


def _size(value: object) -> int:
    return len(json.dumps(value, separators=(",", ":")))
