"""The form of an engine profile's `podTemplate`: the API server's own, so that no write repeats.

The operator compares what it wants with what the API server stored. The API server drops values
that are defaults and formats quantities. So defaults are refused here, and quantities are formatted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fleetkeeper.api.profiles.strategic_merge import MERGE_KEYS
from fleetkeeper.api.values.quantity import BadQuantity, canonical_quantity

MAX_LENGTH = 32_768
"""Characters of a podTemplate as JSON: it is a part of every Deployment."""
MAX_DEPTH = 24

_KEEPS_FALSE = frozenset(
    {
        "allowPrivilegeEscalation",
        "hostUsers",
        "optional",
        "privileged",
        "readOnlyRootFilesystem",
        "runAsNonRoot",
    }
)
"""Fields in which false differs from an absent value."""
_KEEPS_ZERO = frozenset({"fsGroup", "runAsGroup", "runAsUser", "tolerationSeconds"})
_FREE_MAPS = frozenset({"annotations", "labels", "matchLabels", "nodeSelector"})
"""Maps of strings, in which an empty value has a meaning."""
_QUANTITY_MAPS = frozenset({"limits", "requests"})
_QUANTITIES = frozenset({"divisor", "sizeLimit"})


def in_stored_form(template: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the podTemplate as the API server stores it.

    Raises:
        ValueError: It cannot be merged or compared. The message has all errors.
    """
    errors = list(_walk("podTemplate", template, 0))
    if not errors and len(json.dumps(template)) > MAX_LENGTH:
        errors.append(f"podTemplate is longer than {MAX_LENGTH} characters")
    if errors:
        raise ValueError("; ".join(errors))
    return dict(_stored(template))


def _walk(path: str, value: object, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        yield f"{path[:64]}... is too deep"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"{path} has the key {key!r}, which is not a string; put it in quotes"
            else:
                yield from _entry(f"{path}.{key}", key, item, depth)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _walk(f"{path}[{number}]", item, depth + 1)


def _entry(path: str, key: str, value: object, depth: int) -> Iterator[str]:
    if key.startswith("$"):
        yield f"{path} is a directive of strategic merge; podTemplate only adds and changes, so remove it"
    elif value is None:
        yield f"{path} is null, which would delete; podTemplate only adds and changes, so remove it"
    elif key in _FREE_MAPS and isinstance(value, Mapping):
        yield from _strings(path, value)
    elif key in _QUANTITY_MAPS and isinstance(value, Mapping):
        for name, amount in value.items():
            yield from _quantity(f"{path}.{name}", amount)
    elif key in _QUANTITIES:
        yield from _quantity(path, value)
    elif key in MERGE_KEYS:
        yield from _list(path, value, MERGE_KEYS[key], depth)
    elif _is_default(key, value):
        yield f"{path} is {json.dumps(value)}, which is the default; remove it"
    else:
        yield from _walk(path, value, depth + 1)


def _is_default(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return not value and key not in _KEEPS_FALSE
    return value == "" or (value == 0 and key not in _KEEPS_ZERO)


def _strings(path: str, value: Mapping[object, object]) -> Iterator[str]:
    for name, item in value.items():
        if not isinstance(name, str) or not isinstance(item, str):
            yield f"{path}.{name} is not a string; put it in quotes"


def _quantity(path: str, value: object) -> Iterator[str]:
    try:
        canonical_quantity(str(value))
    except BadQuantity as problem:
        yield f"{path}: {problem}"


def _list(path: str, value: object, key: str, depth: int) -> Iterator[str]:
    """Check a list that is merged by a key: without it, an item would match any other."""
    if not isinstance(value, list):
        yield f"{path} must be a list"
        return
    seen: set[object] = set()
    for number, item in enumerate(value):
        name = item.get(key) if isinstance(item, Mapping) else None
        kind = int if key == "containerPort" else str
        if not isinstance(name, kind) or isinstance(name, bool) or not name:
            yield f"{path}[{number}] has no {key}, by which it is merged; add it"
        elif name in seen:
            yield f"{path} has {name} twice; write it once"
        else:
            seen.add(name)
            yield from _walk(f"{path}[{name}]", item, depth + 1)


def _stored(value: Any, key: str = "") -> Any:  # noqa: ANN401 - any JSON value
    """Return a part below `key`: with formatted quantities, and with the defaults in `_DEFAULTS`."""
    if isinstance(value, Mapping):
        if key in _QUANTITY_MAPS:
            return {name: canonical_quantity(str(item)) for name, item in value.items()}
        written = {name: _stored(item, name) for name, item in value.items()}
        return {**_DEFAULTS.get(key, {}), **written}
    if isinstance(value, list):
        items = [_stored(item) for item in value]
        return [{"protocol": "TCP", **item} for item in items] if key == "ports" else items
    return canonical_quantity(str(value)) if key in _QUANTITIES else value


_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "fieldRef": {"apiVersion": "v1"},
    "resourceFieldRef": {"divisor": "0"},
    "serviceAccountToken": {"expirationSeconds": 3600},
}
"""Defaults within values that the API server owns as a whole."""
