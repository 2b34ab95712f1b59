"""The lines of `fleetkeeper check` about the profile's `podTemplate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from fleetkeeper.api.names import ENGINE_CONTAINER
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.profiles.pod_template import containers_of
from fleetkeeper.api.profiles.profile import EngineProfile
from fleetkeeper.api.profiles.strategic_merge import MERGE_KEYS
from fleetkeeper.api.values.quantity import parse_quantity

GIB = 1024**3
_REPLACED = {
    "tolerations": "placement.tolerations",
    "priorityClassName": "placement.priorityClassName",
    "runtimeClassName": "placement.runtimeClassName",
    "schedulerName": "placement.schedulerName",
}
"""Fields of a pod that a podTemplate replaces, with the field of the spec that it overrides."""
_LISTED = ("initContainers", "containers", "volumes")


def pod_template_lines(profile: EngineProfile) -> list[str]:
    """Return what the podTemplate adds to each engine pod, nothing if the profile has none."""
    template = profile.pod_template
    if template is None:
        return []
    lines = [*_added(template), *_engine(template)]
    lines += _metadata(template)
    lines += _sums(template)
    return [
        f"  {'pod template' if not number else '':<12} {text}" for number, text in enumerate(lines)
    ]


def overridden(service: InferenceService, profile: EngineProfile) -> list[str]:
    """Return a note for each field of the spec that the podTemplate replaces."""
    spec = (profile.pod_template or {}).get("spec", {})
    placement = service.spec.placement.to_manifest()
    return [
        f"{field} is replaced by the podTemplate of the engine profile {profile.name}"
        for key, field in _REPLACED.items()
        if key in spec and placement.get(key)
    ]


def _added(template: Mapping[str, Any]) -> Iterator[str]:
    spec = template.get("spec", {})
    for kind in _LISTED:
        names = [item["name"] for item in spec.get(kind, ()) if item["name"] != ENGINE_CONTAINER]
        if names:
            yield f"adds {kind} {', '.join(names)}"
    others = [key for key in spec if key not in _LISTED]
    if others:
        yield f"sets {', '.join(_value(key, spec[key]) for key in others)}"


def _engine(template: Mapping[str, Any]) -> Iterator[str]:
    for engine in containers_of(template):
        if engine["name"] == ENGINE_CONTAINER:
            parts = [_value(key, item) for key, item in engine.items() if key != "name"]
            yield f"sets in the engine container {'; '.join(parts)}"


def _value(key: str, value: object) -> str:
    """Return a field as short text: the names of items, or the leaves of maps."""
    if isinstance(value, list):
        name = MERGE_KEYS.get(key)
        return f"{key} {', '.join(str(item[name]) for item in value)}" if name else key
    if isinstance(value, Mapping):
        return f"{key} {', '.join(_leaves(value))}"
    return f"{key} {str(value).lower() if isinstance(value, bool) else value}"


def _leaves(value: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, item in value.items():
        here = f"{path}.{key}" if path else key
        if isinstance(item, Mapping):
            yield from _leaves(item, here)
        elif isinstance(item, list):
            yield f"{here} {'+'.join(str(part) for part in item if isinstance(part, str))}".strip()
        else:
            yield f"{here} {str(item).lower() if isinstance(item, bool) else item}"


def _metadata(template: Mapping[str, Any]) -> Iterator[str]:
    for kind, entries in template.get("metadata", {}).items():
        if entries:
            yield f"sets {kind} {', '.join(entries)}"


def _sums(template: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the added containers request together, which no memory cap includes."""
    added = [item for item in containers_of(template) if item["name"] != ENGINE_CONTAINER]
    added += [
        item
        for item in containers_of(template, "initContainers")
        if item.get("restartPolicy") == "Always"
    ]
    if added:
        cores, memory = _sum(added, "cpu"), _sum(added, "memory") / GIB
        yield f"added containers request {cores.normalize():f} CPU cores and {memory:.1f} GiB in each replica, outside the memory cap"


def _sum(containers: list[Mapping[str, Any]], name: str) -> Decimal:
    found = Decimal(0)
    for container in containers:
        resources = container.get("resources", {})
        limit = resources.get("limits", {}).get(name, "0")
        found += parse_quantity(resources.get("requests", {}).get(name, limit))
    return found
