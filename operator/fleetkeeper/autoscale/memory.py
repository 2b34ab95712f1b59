"""The memory of a service as one frozen value, and its recovery from the status after a restart.

What must survive a restart is in the status: limits, breakers, remedy, decisions. Windows, rates and the
step-time model are measured again within minutes, and generations follow the clock. After a restart no
replica is removed for one full stabilization window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fleetkeeper.api.conditions import ConditionType, Reason, previous_condition
from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.capacity.estimate import Estimate
from fleetkeeper.autoscale.constants import CONTROL_OPEN_S, DECISIONS_KEPT
from fleetkeeper.autoscale.limits_requests import LimitsRequestsMemory
from fleetkeeper.autoscale.rules.batch.values import BatchMemory
from fleetkeeper.autoscale.rules.canary import Canary
from fleetkeeper.autoscale.rules.control_breaker import ControlBreaker
from fleetkeeper.autoscale.rules.fragmentation import FragmentationMemory
from fleetkeeper.autoscale.rules.load_breaker import LoadBreaker, TierBreaker
from fleetkeeper.autoscale.rules.scale_down import ReplicasMemory
from fleetkeeper.autoscale.rules.source_breaker import SourceBreaker
from fleetkeeper.autoscale.signals.backlog import Backlog
from fleetkeeper.autoscale.signals.reported_runs import Run
from fleetkeeper.autoscale.signals.service_signals import SignalsMemory
from fleetkeeper.autoscale.state import Breakers
from fleetkeeper.autoscale.types import Limits
from fleetkeeper.common.values import CAUSE_UNKNOWN, BreakerReport, Change, Remedy
from fleetkeeper_contract import rfc3339

OVERLOAD, PROMETHEUS_LOST = "Overload", "PrometheusLost"
"""Reasons of `status.breaker` for an open load breaker and an open source breaker."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The value in the status of replicas or limits at its last change, the reason, and the time."""

    value: str = ""
    reason: str = ""
    message: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class ControlMemory:
    """The state of a service that the next tick needs.

    The fields `shown_*`, `peak_percent`, `over_cap_pod`, `memory_own` and `changes` are those that
    the status shows.
    """

    signals: SignalsMemory = field(default_factory=SignalsMemory)
    estimate: Estimate = field(default_factory=Estimate)
    breakers: Breakers = field(default_factory=Breakers)
    batch: BatchMemory = field(default_factory=BatchMemory)
    canary: Canary | None = None
    replicas: ReplicasMemory = field(default_factory=ReplicasMemory)
    limits_requests: LimitsRequestsMemory = field(default_factory=LimitsRequestsMemory)
    remedy: Remedy | None = None
    replaced_at: float = 0.0
    """Time of the last replacement of a hung engine."""
    replaced_pod: str = ""
    """Pod of the last replacement."""
    fragmentation: FragmentationMemory = field(default_factory=FragmentationMemory)
    allocation: Allocation | None = None
    """The last allocation."""
    lacks_since: float | None = None
    """Time since which a budget allows fewer replicas than are recommended."""
    allocation_late_since: float | None = None
    """Time since which the Deployment does not have the allocated replicas."""
    open_engines: Mapping[str, Run] = field(default_factory=lambda: MappingProxyType({}))
    """Pods that demand no grant although the service does."""
    were_open: bool = False
    """True if the status of the previous leader names such pods."""
    asked_at: float | None = None
    """Time at which pods last had to be read directly."""
    backlog: Backlog | None = None
    """The last known backlog."""
    shown_scaling: Shown = field(default_factory=Shown)
    shown_batching: Shown = field(default_factory=Shown)
    peak_percent: int = 0
    over_cap_pod: str | None = None
    memory_own: bool = True
    shown_breaker: BreakerReport | None = None
    changes: tuple[Change, ...] = ()


def _section(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = status.get(name)
    return value if isinstance(value, Mapping) else {}


def _whole(section: Mapping[str, Any], name: str) -> int | None:
    value = section.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _state(value: object) -> BreakerState:
    return next((state for state in BreakerState if state == value), BreakerState.CLOSED)


def _tier(load: Mapping[str, Any], name: str, admit: float, now: float) -> TierBreaker:
    """Return a tier's breaker: if it was not closed, it opens now with the shortest waiting time."""
    if _state(load.get(name)) is BreakerState.CLOSED:
        return TierBreaker()
    return TierBreaker(BreakerState.OPEN, now, admit=admit, reason=CAUSE_UNKNOWN)


def _changes(status: Mapping[str, Any]) -> tuple[Change, ...]:
    rows = status.get("decisions")
    if not isinstance(rows, list):
        return ()
    return tuple(
        Change(
            rfc3339.parse(row.get("time")) or 0.0,
            *(str(row.get(key, "")) for key in ("what", "from", "to", "reason")),
        )
        for row in rows[-DECISIONS_KEPT:]
        if isinstance(row, Mapping)
    )


def _remedy(status: Mapping[str, Any], generation: int, cap_percent: int) -> Remedy | None:
    section = _section(status, "remedy")
    sequences, attempts = _whole(section, "maxSequences"), _whole(section, "attempts")
    if sequences is None or attempts is None or status.get("observedGeneration") != generation:
        return None
    cap = _whole(section, "capPercent") or cap_percent
    since = rfc3339.parse(section.get("since")) or 0.0
    return Remedy(str(section.get("reason", "")), sequences, cap, attempts, generation, since)


def _source(breaker: Mapping[str, Any], now: float) -> SourceBreaker:
    """Return the source breaker: open stays open until Prometheus answers, without a second event."""
    if _state(breaker.get("source")) is not BreakerState.OPEN:
        return SourceBreaker()
    return SourceBreaker(BreakerState.OPEN, rfc3339.parse(breaker.get("since")) or now)


def memory_from_status(
    status: Mapping[str, Any], generation: int, cap_percent: int, now: float
) -> ControlMemory:
    """Return the memory with which a new leader starts. Malformed fields count as absent.

    A breaker that was open or half-open opens now with its shortest waiting time. The hour between two
    restarts for fragmentation starts now: the previous leader may have just restarted a replica.
    """
    batching, breaker = _section(status, "batching"), _section(status, "breaker")
    sequences, tokens = _whole(batching, "sequences"), _whole(batching, "tokens")
    limits = Limits(sequences, tokens) if sequences is not None and tokens is not None else None
    load = _section(breaker, "load")
    control = ControlBreaker()
    if _state(breaker.get("control")) is not BreakerState.CLOSED:
        control = ControlBreaker(
            BreakerState.OPEN,
            now,
            str(breaker.get("reason", "")) or "SignalsLost",
            _control_detail(breaker),
            CONTROL_OPEN_S[0],
            last_good=limits,
        )
    scaling = _section(status, "scaling")
    return ControlMemory(
        batch=BatchMemory(limits=limits, changed=now),
        breakers=Breakers(
            LoadBreaker(
                _tier(load, "realtime", 1.0, now),
                _tier(load, "standard", 1.0, now),
                _tier(load, "batch", 0.0, now),
            ),
            control,
            _source(breaker, now),
        ),
        remedy=_remedy(status, generation, cap_percent),
        were_open=_were_open(status),
        fragmentation=FragmentationMemory(restarted=now),
        shown_scaling=_shown(scaling, str(scaling.get("desired", ""))),
        shown_batching=_shown(batching, f"{sequences}/{tokens}" if limits else ""),
        peak_percent=_whole(_section(status, "memory"), "peakPercent") or 0,
        shown_breaker=_shown_breaker(breaker),
        changes=_changes(status),
    )


def _were_open(status: Mapping[str, Any]) -> bool:
    degraded = previous_condition(status, ConditionType.DEGRADED) or {}
    return degraded.get("reason") == Reason.GRANTS_NOT_DEMANDED


def _control_detail(breaker: Mapping[str, Any]) -> str:
    """Return why the control breaker opened, if that is the latest change that the status explains."""
    is_other = breaker.get("reason") in {OVERLOAD, PROMETHEUS_LOST}
    message = "" if is_other else str(breaker.get("message", ""))
    return message or CAUSE_UNKNOWN


def _shown_breaker(breaker: Mapping[str, Any]) -> BreakerReport | None:
    """Return the breakers' report that the status shows, None if a state is missing."""
    load = breaker.get("load")
    if not (breaker.get("control") and breaker.get("source") and isinstance(load, Mapping)):
        return None
    return BreakerReport(
        str(breaker["control"]),
        str(breaker["source"]),
        {str(tier): str(state) for tier, state in load.items()},
        str(breaker.get("reason", "")),
        str(breaker.get("message", "")),
        rfc3339.parse(breaker.get("since")) or 0.0,
    )


def _shown(section: Mapping[str, Any], value: str) -> Shown:
    return Shown(
        value,
        str(section.get("reason", "")),
        str(section.get("message", "")),
        rfc3339.parse(section.get("since")) or 0.0,
    )
