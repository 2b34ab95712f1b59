"""Evidence for the control breaker: how the control loop's own actions performed in one tick."""

from __future__ import annotations

from fleetkeeper.autoscale.capacity.step_time_model import StepModel
from fleetkeeper.autoscale.constants import RATE_S
from fleetkeeper.autoscale.limits_requests import late_s
from fleetkeeper.autoscale.memory import ControlMemory
from fleetkeeper.autoscale.rules.batch.values import BatchMemory, far_moves
from fleetkeeper.autoscale.rules.control_breaker import Evidence, Worse
from fleetkeeper.autoscale.rules.objectives import judged_since, wait_is_broken
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import ControlInputs, ControlSettings


def evidence_of(
    inputs: ControlInputs,
    signals: Signals,
    model: StepModel,
    memory: ControlMemory,
    now: float,
) -> Evidence:
    """Return the evidence of one tick. The memory holds the results of the last tick's actions."""
    settings, late_since = inputs.settings, memory.allocation_late_since
    busy = [pod for pod, running in signals.running_by_pod if running > 0]
    window = signals.windows[-1] if signals.windows else None
    attained = (
        signals.known
        and window is not None
        and (window.batch_attainment or 0.0) >= settings.attainment_ratio
        and not wait_is_broken(signals, settings)
    )
    limits_late_s = 0.0
    if busy and settings.tunes_limits and signals.live_limits:
        limits_late_s = late_s(memory.limits_requests, signals.generation_by_pod, busy, now)
    # A new leader needs some samples for its first rates, and pods need to be warmed up.
    is_expected = now - inputs.started >= RATE_S and signals.warmed_up_pods > 0
    return Evidence(
        blind=is_expected and not signals.known,
        failed_acts=memory.limits_requests.has_failed + inputs.failed_writes,
        limits_late_s=limits_late_s,
        replicas_late_s=0.0 if late_since is None else now - late_since,
        reversals=memory.batch.reversals,
        worse=_worse(memory.batch, signals, settings),
        model_off_windows=model.off_windows,
        attained=attained,
        limits=memory.batch.limits,
    )


def _worse(batch: BatchMemory, signals: Signals, settings: ControlSettings) -> Worse | None:
    """Return by how much attainment fell in the two windows after a raise; None if it is not judged.

    A raise of one or two notches is not judged: if it was too much, `shorten` takes it back.
    """
    before = batch.before_raise
    if before is None or batch.limits is None or signals.window is None:
        return None
    if batch.raised != batch.changed or not any(far_moves(before.limits, batch.limits, settings)):
        return None
    judged = judged_since(signals.windows, batch.raised)[:2]
    if len(judged) < 2:
        return None
    steps = sum(window.steps for window in judged)
    attained = sum(window.steps_within for window in judged) / steps
    return Worse(before.attained - attained, before.limits)
