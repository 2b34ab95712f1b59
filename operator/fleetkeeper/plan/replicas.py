"""How many replicas the engine Deployment shall have.

`spec.replicas` wins, then the arbitrated order, then the live value (hold). Whoever asks for more
than runs, the GPU budget bounds it. The value is always
applied, never left out: a field that server-side apply no longer names goes back to 1.
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
from fleetkeeper.plan.budget import UNBOUNDED, Allowance, bounded_replicas
from fleetkeeper.plan.facts import Facts
from fleetkeeper.plan.model import ReplicaOrder

CONTEST_WINDOW_S = 600.0
CONTEST_CHANGES = 3
"""More changes by another manager than this within the window, and we stop changing them back."""


class Source(StrEnum):
    """Where the number comes from."""

    SPEC = "Spec"
    ORDER = "Order"
    HOLD = "Hold"
    CONTESTED = "Contested"


@dataclass(frozen=True, slots=True)
class ReplicaDecision:
    """The number of replicas, and why.

    `wanted` is what was asked for before a blocked scale-up, a contest or the GPU budget changed it.
    `contested_by` names the field manager that keeps changing the number, `limited_by` the budget
    that allows no more.
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
        """Whether the number is only right for the live object as it was seen."""
        is_held = self.is_scale_up_blocked or bool(self.limited_by)
        return self.source in {Source.HOLD, Source.CONTESTED} or is_held

    @property
    def limit_in_words(self) -> str:
        """Which budget allows how many replicas."""
        return f"{self.limited_by} allows {self.value} of {self.wanted} replicas"


def decide_replicas(
    spec: InferenceServiceSpec,
    facts: Facts,
    order: ReplicaOrder | None,
    *,
    contested_by: str = "",
    is_blocked: bool = False,
    gpus_per_replica: int = 0,
    allowance: Allowance = UNBOUNDED,
) -> ReplicaDecision:
    """The number of replicas of the engine Deployment.

    `contested_by` is the answer of `contesting_manager`; `is_blocked` says that the newest revision
    cannot start, so that more replicas would only take more accelerators. `allowance` is what the GPU
    budget leaves, `gpus_per_replica` what the template that is written asks for.
    """
    live = facts.live_replicas
    value, source, reason, message = _asked(spec, live, order)
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
    spec: InferenceServiceSpec, live: int | None, order: ReplicaOrder | None
) -> tuple[int, Source, Reason, str]:
    """The number that is asked for, by whom, and why."""
    scaling = spec.scaling
    if spec.replicas is not None:
        return _pinned(spec.replicas, scaling.mode)
    if scaling.mode is ScalingMode.AUTO and order is not None:
        value = min(max(order.replicas, scaling.min_replicas), scaling.max_replicas)
        return value, Source.ORDER, Reason.WITHIN_BOUNDS, order.message
    if live is None or live == 0:
        return scaling.min_replicas, Source.HOLD, Reason.AT_MINIMUM, "start with the fewest allowed"
    if scaling.mode is not ScalingMode.AUTO:
        return live, Source.HOLD, Reason.ADVISORY, "the number is left as it is"
    value = min(max(live, scaling.min_replicas), scaling.max_replicas)
    if value != live:
        bound = "scaling.minReplicas" if value > live else "scaling.maxReplicas"
        return value, Source.SPEC, Reason.WITHIN_BOUNDS, f"{bound} is {value}"
    return value, Source.HOLD, Reason.WITHIN_BOUNDS, "held"


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
    """The field manager that fights over the number of replicas, "" when nobody does.

    More than 3 foreign changes in 10 minutes begin a contest. It goes on while the other manager
    still owns the number, until the spec changes: else we would be back in the fight 10 min later.
    """
    recent = [who for when, who in foreign_writes if now - when <= CONTEST_WINDOW_S]
    if len(recent) > CONTEST_CHANGES:
        return Counter(recent).most_common(1)[0][0]
    if is_new_generation or facts.engine is None:
        return ""
    owner = facts.engine.replicas_manager
    if owner and owner != FIELD_MANAGER and _is_told(status):
        return owner
    return ""


def _is_told(status: Mapping[str, Any]) -> bool:
    """Whether the status tells of a contest."""
    return any(
        condition.get("type") == ConditionType.DEGRADED
        and condition.get("reason") == Reason.REPLICAS_CONTESTED
        for condition in status.get("conditions") or ()
        if isinstance(condition, Mapping)
    )
