"""An InferenceService as the cache keeps it: what decisions need, packed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fleetkeeper.adapters.kubernetes.reading import UNREAD, as_map, text, version_of
from fleetkeeper.plan.model import Manifest

LARGEST_SPEC_BYTES: Final = 32 * 1024
"""Of a spec as JSON. A usual one takes 1 to 4 KiB; a parsed one takes up to 17 times its JSON, and is
kept by the control loop."""
LARGEST_STATUS_BYTES: Final = 64 * 1024
"""Of a status; the schema allows some 36 KiB."""
METADATA: Final = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
)
"""What decisions need of the metadata. Labels, annotations, finalizers, owners and managedFields may
be a megabyte, and decide nothing."""


@dataclass(slots=True)
class ServiceEntry:
    """One InferenceService, packed: as dicts it would take five times the room."""

    uid: str
    version: int
    packed: bytes
    is_observed: bool = True
    """Whether the status tells of the current spec."""
    unread: str = ""
    """Why the spec was not read; empty where it was."""

    def unpack(self) -> Manifest:
        """Return the object as the API server holds it, reduced to what decisions need."""
        found: Manifest = json.loads(zlib.decompress(self.packed))
        return found


def pack_service(live: Mapping[str, Any]) -> ServiceEntry:
    """Return the entry of a live service, whoever wrote it.

    A spec that cannot be read, or is too large to be, is left out, and the entry says why: what runs
    of the service goes on.
    """
    meta = as_map(live.get("metadata"))
    spec, status = live.get("spec"), as_map(live.get("status"))
    why = text(live.get(UNREAD)) or _why_not(spec)
    kept: Manifest = {
        **{name: live[name] for name in ("apiVersion", "kind") if name in live},
        "metadata": {name: meta[name] for name in METADATA if name in meta},
    }
    if spec is not None:
        kept["spec"] = {} if why else spec
    if status and _size(status) <= LARGEST_STATUS_BYTES:
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
    return f"spec takes {size} bytes as JSON, more than the {LARGEST_SPEC_BYTES} that are read"


def _size(value: object) -> int:
    return len(json.dumps(value, separators=(",", ":")))
