"""Fields of the status that the CRD in the cluster lacks.

The API server prunes them. A status that contains them would differ from the live one after every
write, so it would be written again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Status = dict[str, Any]


def without_fields(status: Status, missing: Iterable[str]) -> Status:
    """Return the status without the missing fields, by path: `status.replicaStates[].stage`.

    Paths of the spec are ignored. The argument is not changed.
    """
    for path in missing:
        root, *parts = path.replace("[]", "").split(".")
        if root == "status":
            status = _without(status, parts)
    return status


def _without(value: Any, parts: Sequence[str]) -> Any:  # noqa: ANN401 - any part of a status
    """Return the value without the field. A list stands for each of its items."""
    if isinstance(value, list):
        return [_without(item, parts) for item in value]
    name, *below = parts
    if not isinstance(value, dict) or name not in value:
        return value
    if not below:
        return {key: item for key, item in value.items() if key != name}
    return {**value, name: _without(value[name], below)}
