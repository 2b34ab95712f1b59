"""The fields of a live object that one field manager owns, by server-side apply.

`metadata.managedFields` of a live object shows which of its fields our last apply set and no other
writer has changed since. Reduced to those fields, the object has the digest of the applied manifest if and only if
applying it again would change nothing. A field that another manager changed, or that was removed, is no
longer in our set, so the digest differs. A field of others (an injected sidecar, an annotation by
kubectl) was never in it, so the digest stays.

The notation (fieldsV1): `f:NAME` is a map entry, `k:{...}` a list item by its keys, `v:VALUE` an item
of a set, and `.` the entry itself. An empty map below a name means everything under it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fleetkeeper.api.names import FIELD_MANAGER
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.digest import digest_of
from fleetkeeper_kube.reading import as_map, maps, text

_ADDRESS = ("apiVersion", "kind")


def owned_fields(live: Mapping[str, Any], manager: str = FIELD_MANAGER) -> Manifest:
    """Return the live object reduced to what `manager` applied, with apiVersion and kind if present."""
    fields = _fields_of(live, manager)
    owned = project(live, fields) if fields else {}
    if not isinstance(owned, dict):
        return {}
    return {**{key: live[key] for key in _ADDRESS if key in live}, **owned}


def owned_digest(live: Mapping[str, Any], manager: str = FIELD_MANAGER) -> str:
    """Return the digest to compare with that of a desired manifest; "" if `manager` owns nothing."""
    owned = owned_fields(live, manager)
    return digest_of(owned) if owned.keys() - set(_ADDRESS) else ""


def project(value: object, fields: Mapping[str, Any]) -> object:
    """Return `value` reduced to `fields`; all of it if `fields` is empty.

    Raises:
        TypeError, ValueError, RecursionError: `fields` is not as the API server writes it.
    """
    if not isinstance(fields, Mapping):
        raise TypeError("fieldsV1 contains something other than objects")
    if not fields:
        return value
    if isinstance(value, Mapping):
        return {
            name[2:]: project(value[name[2:]], below)
            for name, below in fields.items()
            if name.startswith("f:") and name[2:] in value
        }
    if isinstance(value, list):
        return _project_list(value, fields)
    return value


def _project_list(items: list[object], fields: Mapping[str, Any]) -> list[object]:
    """Return the owned items in the order of the live list, which keeps the order of the apply."""
    by_keys = [(json.loads(name[2:]), below) for name, below in fields.items() if name[:2] == "k:"]
    values = [json.loads(name[2:]) for name in fields if name[:2] == "v:"]
    if not by_keys and not values:
        return items
    owned: list[object] = []
    for item in items:
        if item in values:
            owned.append(item)
            continue
        below = next((below for keys, below in by_keys if _has(item, keys)), None)
        if below is not None:
            owned.append(project(item, below))
    return owned


def _has(item: object, keys: Mapping[str, Any]) -> bool:
    return isinstance(item, Mapping) and all(item.get(key) == value for key, value in keys.items())


def _fields_of(live: Mapping[str, Any], manager: str) -> Mapping[str, Any]:
    for entry in _entries(live):
        if (
            entry.get("manager") == manager
            and entry.get("operation") == "Apply"
            and not entry.get("subresource")
        ):
            fields = entry.get("fieldsV1")
            return fields if isinstance(fields, Mapping) else {}
    return {}


def manager_of_replicas(live: Mapping[str, Any], ours: str = FIELD_MANAGER) -> str:
    """Return the manager of `spec.replicas`: `ours` if we own it too, "" if it has no manager."""
    owners = [
        text(entry.get("manager"))
        for entry in _entries(live)
        if "f:replicas" in as_map(as_map(entry.get("fieldsV1")).get("f:spec"))
    ]
    return ours if ours in owners else next(iter(owners), "")


def _entries(live: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return maps(as_map(live.get("metadata")).get("managedFields"))
