"""Decide the limits of a fleet: rules, canary, control breaker, and what each pod gets.

While the control breaker is not closed, safe limits are in force; half-open, one pod gets one notch. With
three pods or more a raise goes to one pod first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fleetkeeper.api.types import BatchingMode
from fleetkeeper.autoscale.capacity.targets import moved_notch
from fleetkeeper.autoscale.constants import DOWN_FACTOR, UP_FACTOR
from fleetkeeper.autoscale.rules.batch.decide import decide_limits
from fleetkeeper.autoscale.rules.batch.values import BatchMemory, BatchView, clamped, start_up
from fleetkeeper.autoscale.rules.canary import Canary, concluded, judge_canary, needs_canary
from fleetkeeper.autoscale.rules.control_breaker import ControlBreaker
from fleetkeeper.autoscale.rules.load_breaker import admission_of
from fleetkeeper.autoscale.state import TickState
from fleetkeeper.autoscale.types import (
    Admission,
    ControlSettings,
    Decision,
    Limits,
    PodView,
    decide,
)


def batch_view(state: TickState) -> BatchView:
    """Return the inputs of the batch rules. Overdue pods do not count as pending here."""
    return BatchView(
        signals=state.signals,
        settings=state.settings,
        targets=state.estimate.targets,
        pending=state.estimate.supply.pending,
        may_raise=not state.keeps_safe_limits,
        gated=state.settings.breakers_act and not state.breakers.load.is_closed,
        model_missed=state.estimate.model.missed,
    )


def _ready_names(pods: Sequence[PodView]) -> tuple[str, ...]:
    """Return the names of pods that are ready and not being deleted."""
    return tuple(pod.name for pod in pods if pod.ready and not pod.deleting)


def safe_limits(control: ControlBreaker, settings: ControlSettings) -> Limits:
    """Return the limits while the control breaker is open: the last known good, else start-up values."""
    return clamped(control.last_good, settings) if control.last_good else start_up(settings)


def notch_towards(limits: Limits, wanted: Limits, settings: ControlSettings) -> Limits:
    """Return the limits one notch from `limits` toward `wanted`: tokens first, else sequences by a tenth."""
    if wanted.tokens != limits.tokens:
        by = 1 if wanted.tokens > limits.tokens else -1
        return replace(limits, tokens=moved_notch(limits.tokens, by, settings))
    if wanted.sequences > limits.sequences:
        return clamped(
            replace(
                limits, sequences=min(wanted.sequences, round(limits.sequences * UP_FACTOR) + 1)
            ),
            settings,
        )
    if wanted.sequences < limits.sequences:
        return clamped(
            replace(limits, sequences=max(wanted.sequences, int(limits.sequences * DOWN_FACTOR))),
            settings,
        )
    return limits


def _under_control_breaker(
    state: TickState, memory: BatchMemory, now: float
) -> tuple[Decision[Limits], BatchMemory, Canary | None]:
    """Return safe limits for all pods and, after the ticks that only compute, one notch for one pod."""
    settings = state.settings
    safe = safe_limits(state.breakers.control, settings)
    changed = now if memory.limits != safe else memory.changed
    after = BatchMemory(limits=safe, changed=changed, reversals=memory.reversals)
    why = f"{state.breakers.control.detail}: {'last known good' if state.breakers.control.last_good else 'start-up'} limits"
    decision = decide(safe, "ControlBreakerOpen", why)
    if not state.breakers.control.probes:
        return decision, after, None
    aim = state.estimate.targets
    wanted = clamped(Limits(aim.sequences, aim.tokens or safe.tokens), settings) if aim else safe
    pod = min(_ready_names(state.inputs.pods), default="")
    probe = Canary(pod, notch_towards(safe, wanted, settings), now) if pod else None
    return decision, after, probe


def decide_fleet_limits(
    state: TickState, memory: BatchMemory, canary: Canary | None, now: float
) -> tuple[Decision[Limits], BatchMemory, Canary | None]:
    """Return the limits for all pods, the new memory, and the canary that tries a raise first."""
    if state.keeps_safe_limits:
        return _under_control_breaker(state, memory, now)
    ready = _ready_names(state.inputs.pods)
    if canary is not None and canary.pod not in ready:
        canary = None
    if canary is not None and state.signals.known:
        is_good = judge_canary(canary, state.signals.windows, now)
        if is_good is not None:
            memory, canary = concluded(memory, canary, now, is_good=is_good), None
    view = batch_view(state)
    if canary is not None:
        view = replace(view, may_raise=False)
    before = memory.limits
    decision, after = decide_limits(view, memory, now)
    if before is None or after.limits is None or not decision.valid:
        return decision, after, canary
    if canary is not None:
        return decision, after, canary if after.limits == before else None
    sends = state.settings.tunes_limits
    if not (sends and needs_canary(before, after.limits, state.estimate.supply.ready)):
        return decision, after, None
    pod, tried = min(ready), after.limits
    detail = f"pod {pod} tries {tried.sequences} sequences and {tried.tokens} tokens before the other pods"
    first = decide(before, "CanaryRunning", detail)
    unchanged = replace(after, limits=before, before_raise=None)
    return first, unchanged, Canary(pod, tried, now)


def decide_admission(state: TickState) -> Admission:
    """Return what the pods admit; everything if the load breaker only reports."""
    if not state.settings.gates:
        return Admission(batch_share=state.settings.batch_share_ratio)
    return admission_of(state.breakers.load, state.settings)


def limits_by_pod(
    state: TickState, limits: Limits, canary: Canary | None, admission: Admission
) -> Mapping[str, Limits]:
    """Return the limits of each ready pod; empty if no limits are sent.

    If batching is Fixed, start-up values are sent, so that earlier limits end now and not with their
    lease. Engines without live limits get a request only while admission is reduced. Advisory or paused
    services get none.
    """
    settings = state.settings
    pods = [pod.name for pod in state.inputs.pods if pod.ready and not pod.deleting and pod.ip]
    if settings.paused or settings.batching_mode is BatchingMode.ADVISORY or not pods:
        return {}
    if settings.batching_mode is BatchingMode.FIXED and state.signals.live_limits:
        return dict.fromkeys(pods, start_up(settings))
    if not settings.tunes_limits or not state.signals.live_limits:
        open_admission = Admission(batch_share=settings.batch_share_ratio)
        return {} if admission == open_admission else dict.fromkeys(pods, start_up(settings))
    wanted = dict.fromkeys(pods, limits)
    if canary is not None and canary.pod in wanted:
        wanted[canary.pod] = canary.limits
    return wanted
