"""The gauges of one service that follow from its spec, its status and its pods, without measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from fleetkeeper.api.conditions import ConditionType, Reason, Status, previous_condition
from fleetkeeper.common.sleep import parse_sleep

MAIN: Final = (
    ConditionType.AVAILABLE,
    ConditionType.READY,
    ConditionType.DEGRADED,
    ConditionType.METRICS_AVAILABLE,
    ConditionType.SCALING_LIMITED,
)
"""The conditions with gauges. The others explain these, and `kubectl` shows them."""
REASONS: Final = frozenset(map(str, Reason))
"""The reasons that become series. A user who may write a status can invent others."""

Gauge = tuple[str, tuple[tuple[str, str], ...], float]


def gauges_of_service(
    spec: Mapping[str, Any], status: Mapping[str, Any], accelerators: int
) -> tuple[Gauge, ...]:
    """Return the gauges of one service; `accelerators` are those that its pods hold or will hold."""
    return (
        *_bounds(spec),
        ("service_accelerators", (), float(accelerators)),
        *_simulated(status),
        *_failed_wakes(status),
        *(gauge for kind in MAIN for gauge in _condition(status, kind)),
    )


def _bounds(spec: Mapping[str, Any]) -> Iterator[Gauge]:
    scaling = spec.get("scaling")
    if isinstance(scaling, Mapping):
        for field, name in (("minReplicas", "min"), ("maxReplicas", "max")):
            value = scaling.get(field)
            if isinstance(value, int):
                yield f"service_{name}_replicas", (), float(value)


def _simulated(status: Mapping[str, Any]) -> Iterator[Gauge]:
    engine = status.get("engine")
    if isinstance(engine, Mapping) and engine.get("simulated") is True:
        yield "service_simulated", (), 1.0


def _failed_wakes(status: Mapping[str, Any]) -> Iterator[Gauge]:
    if "sleep" in status:
        yield "service_failed_wakes", (), float(parse_sleep(status).failures)


def _condition(status: Mapping[str, Any], kind: ConditionType) -> Iterator[Gauge]:
    """Yield a gauge for each status, of which one is 1, and the reason. Nothing without the condition."""
    condition = previous_condition(status, kind)
    if condition is None:
        return
    for value in Status:
        found = float(condition.get("status") == value)
        yield "service_condition", _labels(kind, "status", value.lower()), found
    reason = condition.get("reason")
    if isinstance(reason, str) and reason in REASONS:
        yield "service_condition_reason", _labels(kind, "reason", reason), 1.0


@cache
def _labels(kind: ConditionType, name: str, value: str) -> tuple[tuple[str, str], ...]:
    """Return the labels of a series; all services have the same ones."""
    return ("type", str(kind)), (name, value)
