"""Access to the previous status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetkeeper.api.conditions import ConditionType


def previous_condition(status: Mapping[str, Any], kind: ConditionType) -> Mapping[str, Any] | None:
    """Return the condition of this type in a status, None if it is absent."""
    for condition in status.get("conditions") or ():
        if isinstance(condition, Mapping) and condition.get("type") == kind:
            return condition
    return None
