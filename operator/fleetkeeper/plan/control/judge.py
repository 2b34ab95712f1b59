"""Small judgements that several rules share: is an objective broken, is there room."""

from __future__ import annotations

from collections.abc import Sequence

from fleetkeeper.plan.control.constants import (
    FULL_RATIO,
    HIGH_LIMIT,
    HIGH_POINTS,
    HIGH_WINDOWS,
    LOW_POINTS,
    LOW_WINDOWS,
)
from fleetkeeper.plan.control.signals import Signals
from fleetkeeper.plan.control.values import ControlSettings
from fleetkeeper.plan.control.windows import Window


def low_mark(settings: ControlSettings) -> float:
    """Attainment below this asks for smaller batches: 0.97 for an objective of 95%."""
    return min(settings.attainment_ratio + LOW_POINTS, HIGH_LIMIT)


def high_mark(settings: ControlSettings) -> float:
    """Attainment from this on leaves room: 0.995 for 95%, at most 0.999."""
    return min(settings.attainment_ratio + HIGH_POINTS, HIGH_LIMIT)


def judged_since(windows: Sequence[Window], since: float) -> list[Window]:
    """Windows that lie wholly after the last change: one that straddles it is not judged."""
    return [
        window
        for window in windows
        if window.start >= since and window.batch_attainment is not None
    ]


def is_slow(windows: Sequence[Window], settings: ControlSettings) -> bool:
    """Whether batch time attainment was low in 2 of the last 3 judged windows.

    Example at 95%: 0.99, 0.96, 0.96 is slow; 0.96, 0.99 is not yet.
    """
    need, of = LOW_WINDOWS
    low = [w for w in windows[-of:] if (w.batch_attainment or 0.0) < low_mark(settings)]
    return len(low) >= need


def has_room(windows: Sequence[Window], settings: ControlSettings) -> bool:
    """Whether batch time attainment was high in each of the last 4 judged windows."""
    last = windows[-HIGH_WINDOWS:]
    mark = high_mark(settings)
    return len(last) >= HIGH_WINDOWS and all((w.batch_attainment or 0.0) >= mark for w in last)


def wait_is_broken(signals: Signals, settings: ControlSettings) -> bool:
    """Whether queue wait is above its objective: the present wait, or the last window's attainment."""
    if signals.queue_wait_s > settings.queue_wait_objective_s:
        return True
    if not signals.windows:
        return False
    attained = signals.windows[-1].wait_attainment
    return attained is not None and attained < settings.attainment_ratio


def is_full(signals: Signals, sequences: int) -> bool:
    """Whether the sequences that run come near the limit: the limit is what holds requests back."""
    if not signals.reporting_pods:
        return False
    return signals.gauges.running >= FULL_RATIO * sequences * signals.reporting_pods


def running_per_pod(signals: Signals) -> float:
    """Mean of sequences running in a reporting pod."""
    return signals.gauges.running / signals.reporting_pods if signals.reporting_pods else 0.0
