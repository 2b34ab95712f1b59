"""Checks that several rules share: whether an objective is missed, and whether there is room."""

from __future__ import annotations

from collections.abc import Sequence

from fleetkeeper.autoscale.constants import (
    FULL_RATIO,
    HIGH_LIMIT,
    HIGH_POINTS,
    HIGH_WINDOWS,
    LASTING_RATIO,
    LONG_QUEUE,
    LOW_POINTS,
    LOW_WINDOWS,
    MIN_REQUESTS,
    NEAR_WAIT_RATIO,
    RATE_S,
    SHORT_STEP_RATIO,
    WINDOWS_KEPT,
)
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.signals.windows import Window
from fleetkeeper.autoscale.types import ControlSettings


def low_mark(settings: ControlSettings) -> float:
    """Return the attainment below which batches become smaller: 0.97 for an objective of 95%."""
    return min(settings.attainment_ratio + LOW_POINTS, HIGH_LIMIT)


def high_mark(settings: ControlSettings) -> float:
    """Return the attainment from which there is room: 0.995 for an objective of 95%, at most 0.999."""
    return min(settings.attainment_ratio + HIGH_POINTS, HIGH_LIMIT)


def judged_since(windows: Sequence[Window], since: float) -> list[Window]:
    """Return the judged windows that start after the last change; one that straddles it is left out."""
    return [
        window
        for window in windows
        if window.start >= since and window.batch_attainment is not None
    ]


def is_slow(
    windows: Sequence[Window], settings: ControlSettings, mark: float | None = None
) -> bool:
    """Return whether batch time attainment was below the mark in 2 of the last 3 judged windows.

    `mark`: None means the low mark. Example at 95%: 0.99, 0.96, 0.96 is slow; 0.96, 0.99 is not yet.
    """
    need, of = LOW_WINDOWS
    mark = low_mark(settings) if mark is None else mark
    low = [w for w in windows[-of:] if (w.batch_attainment or 0.0) < mark]
    return len(low) >= need


def has_room(windows: Sequence[Window], settings: ControlSettings) -> bool:
    """Return whether batch time attainment was high in each of the last 4 judged windows."""
    last = windows[-HIGH_WINDOWS:]
    mark = high_mark(settings)
    return len(last) >= HIGH_WINDOWS and all((w.batch_attainment or 0.0) >= mark for w in last)


def wait_is_broken(signals: Signals, settings: ControlSettings) -> bool:
    """Return whether the queue wait objective is missed: on average over 30 s, or by those that wait."""
    return signals.queue_wait_s > settings.queue_wait_objective_s


def wait_lasts(signals: Signals, settings: ControlSettings) -> bool:
    """Return whether the objective is missed, and requests waited in every window of the last minute.

    A quarter of them counts. A long queue needs no such minute. A long wait does, because it is the mean of
    30 s: when a few long prompts met, it stays long after the queue is gone.
    """
    if not wait_is_broken(signals, settings):
        return False
    if _is_long(signals.waiting, signals, settings):
        return True
    last = signals.windows[-WINDOWS_KEPT:]
    return len(last) == WINDOWS_KEPT and all(
        window.requests > 0 and window.waited_within < LASTING_RATIO * window.requests
        for window in last
    )


def refuses(signals: Signals, settings: ControlSettings) -> bool:
    """Return whether the requests that were refused in 30 s would have been a long queue.

    With a short queue that is full, no request waits for long. Only realtime and standard count. Some must wait,
    because a request that is refused for what it asks says nothing about the load.
    """
    rates = signals.rates
    arrivals_per_s = rates.arrivals_realtime + rates.arrivals_standard
    served_per_s = rates.wait_count_realtime + rates.wait_count_standard
    refused = RATE_S * (arrivals_per_s - served_per_s) - signals.waiting
    enough = signals.waiting > 0 and refused >= MIN_REQUESTS
    return enough and _is_long(refused, signals, settings)


def _is_long(requests: float, signals: Signals, settings: ControlSettings) -> bool:
    return requests > LONG_QUEUE * settings.queue_wait_objective_s * signals.served_per_s


def wait_is_near(signals: Signals, settings: ControlSettings) -> bool:
    """Return whether queue wait is near its objective: above a quarter of it."""
    return signals.queue_wait_s > NEAR_WAIT_RATIO * settings.queue_wait_objective_s


def batch_time_is_near(signals: Signals, settings: ControlSettings) -> bool:
    """Return whether mean batch time is near its objective: above 0.7 of it.

    Below that, fewer sequences shorten nothing that matters, and a burst would find a small batch.
    """
    return signals.batch_time_s >= SHORT_STEP_RATIO * settings.batch_time_objective_s


def is_full(signals: Signals, sequences: int) -> bool:
    """Return whether running sequences are near the limit, so that the limit makes requests wait."""
    if not signals.reporting_pods:
        return False
    return signals.gauges.running >= FULL_RATIO * sequences * signals.reporting_pods


def running_per_pod(signals: Signals) -> float:
    """Return the mean number of sequences that run in a reporting pod."""
    return signals.gauges.running / signals.reporting_pods if signals.reporting_pods else 0.0
