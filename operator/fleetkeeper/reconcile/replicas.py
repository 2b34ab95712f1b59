"""The number of replicas of the engine Deployment.

`spec.replicas` takes precedence over the control loop's allocation, which takes precedence over the
live value. The GPU budget limits every increase. The value is always applied, because a field that
server-side apply omits returns to its default of 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from fleetkeeper.api.conditions import ConditionType, Reason
from fleetkeeper.api.names import FIELD_MANAGER
from fleetkeeper.api.types import InferenceServiceSpec, ScalingMode
from fleetkeeper.common.budget import UNBOUNDED, Allowance, bounded_replicas
from fleetkeeper.common.values import ReplicaAllocation
from fleetkeeper.reconcile.observe.facts import Facts

CONTEST_WINDOW_S = 600.0
CONTEST_CHANGES = 3
"""With more changes by another manager within the window, Fleetkeeper stops reverting them."""


class Source(StrEnum):
    """The source of the number of replicas."""

    SPEC = "Spec"
    ALLOCATION = "Order"
    HOLD = "Hold"
    CONTESTED = "Contested"


@dataclass(frozen=True, slots=True)
class ReplicaDecision:
    """The number of replicas with its reason.

    `wanted` is the number before a blocked scale-up, a contest or the GPU budget changed it.
    `contested_by` is the field manager that keeps changing the number, `limited_by` the budget that
    allows no more.
    """

    value: int
    wanted: int
    source: Source
    reason: Reason
    message: str
    contested_by: str = ""
    is_scale_up_blocked: bool = False
    limited_by: str = ""

    @property
    def rests_on_live_value(self) -> bool:
        """Return True if the number is valid only for the live object that was read."""
        is_held = self.is_scale_up_blocked or bool(self.limited_by)
        return self.source in {Source.HOLD, Source.CONTESTED} or is_held

    @property
    def limit_in_words(self) -> str:
        """Return which budget allows how many of the wanted replicas."""
        return f"{self.limited_by} allows {self.value} of {self.wanted} replicas"


def decide_replicas(
    spec: InferenceServiceSpec,
    facts: Facts,
    allocation: ReplicaAllocation | None,
    *,
    contested_by: str = "",
    is_blocked: bool = False,
    gpus_per_replica: int = 0,
    allowance: Allowance = UNBOUNDED,
) -> ReplicaDecision:
    """Decide the number of replicas of the engine Deployment.

    `contested_by` is the result of `contesting_manager`. `is_blocked` means that the newest
    revision cannot start, so more replicas would only occupy more accelerators. `allowance` is the
    rest of the GPU budget, `gpus_per_replica` the request of the template that is written.
    """
    live = facts.live_replicas
    value, source, reason, message = _asked(spec, live, allocation)
    if contested_by and live is not None and live != value:
        return ReplicaDecision(
            live, value, Source.CONTESTED, Reason.REPLICAS_CONTESTED, message, contested_by
        )
    if is_blocked and live is not None and value > live:
        return ReplicaDecision(
            live, value, source, Reason.SCALE_UP_BLOCKED, message, is_scale_up_blocked=True
        )
    fits, limited_by = bounded_replicas(value, live or 0, gpus_per_replica, allowance)
    if limited_by:
        decision = ReplicaDecision(
            fits, value, source, Reason.GPU_BUDGET, message, limited_by=limited_by
        )
        return replace(decision, message=f"{message}; {decision.limit_in_words}")
    return ReplicaDecision(value, value, source, reason, message)


def _asked(
    spec: InferenceServiceSpec, live: int | None, allocation: ReplicaAllocation | None
) -> tuple[int, Source, Reason, str]:
    """Return the requested number of replicas, its source, its reason and the message."""
    scaling = spec.scaling
    if spec.replicas is not None:
        return _pinned(spec.replicas, scaling.mode)
    if scaling.mode is ScalingMode.AUTO and allocation is not None:
        value = min(max(allocation.replicas, scaling.min_replicas), scaling.max_replicas)
        return value, Source.ALLOCATION, Reason.WITHIN_BOUNDS, allocation.message
    if live is None or live == 0:
        return scaling.min_replicas, Source.HOLD, Reason.AT_MINIMUM, "start at scaling.minReplicas"
    if scaling.mode is not ScalingMode.AUTO:
        return live, Source.HOLD, Reason.ADVISORY, "unchanged, because scaling.mode is not Auto"
    value = min(max(live, scaling.min_replicas), scaling.max_replicas)
    if value != live:
        bound = "scaling.minReplicas" if value > live else "scaling.maxReplicas"
        return value, Source.SPEC, Reason.WITHIN_BOUNDS, f"{bound} is {value}"
    return value, Source.HOLD, Reason.WITHIN_BOUNDS, "unchanged"


def _pinned(replicas: int, mode: ScalingMode) -> tuple[int, Source, Reason, str]:
    message = f"spec.replicas is {replicas}"
    if replicas == 0:
        return 0, Source.SPEC, Reason.STOPPED, message
    reason = Reason.EXTERNAL if mode is ScalingMode.EXTERNAL else Reason.REPLICAS_PINNED
    return replicas, Source.SPEC, reason, message


def contesting_manager(
    facts: Facts,
    foreign_writes: tuple[tuple[float, str], ...],
    status: Mapping[str, Any],
    *,
    is_new_generation: bool,
    now: float,
) -> str:
    """Return the field manager that contests the number of replicas, "" if there is none.

    More than 3 changes by others in 10 minutes start a contest. It lasts while the other manager
    owns the field, until the spec changes. Otherwise it would start again after 10 minutes.
    """
    recent = [who for when, who in foreign_writes if now - when <= CONTEST_WINDOW_S]
    if len(recent) > CONTEST_CHANGES:
        return Counter(recent).most_common(1)[0][0]
    if is_new_generation or facts.engine is None:
        return ""
    owner = facts.engine.replicas_manager
    if owner and owner != FIELD_MANAGER and _is_reported(status):
        return owner
    return ""


def _is_reported(status: Mapping[str, Any]) -> bool:
    """Return True if the status reports a contest."""
    return any(
        condition.get("type") == ConditionType.DEGRADED
        and condition.get("reason") == Reason.REPLICAS_CONTESTED
        for condition in status.get("conditions") or ()
        if isinstance(condition, Mapping)
    )
