"""Whether the engine is started, live and ready, from what the page says. Pure.

vLLM's own /health says 200 while its core hangs. Here an engine is stalled when there is work and
either no schedule call (hang) or no worked step although a request could run (wedge). A step that is
in flight may last as long as its tokens need, so a long prefill is no stall.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleetkeeper_engine.shm.layout import MiddlewareBlock, PulseBlock, SchedulerBlock
from fleetkeeper_engine.shm.step_sums import TERMS, StepClass

NOT_READY_AFTER_S = 10.0
FLIGHT_MARGIN = 4.0
"""A step in flight may take so many times what its tokens took so far."""
PRIOR_TOKEN_S = 0.02
"""Seconds a prefill token may take before any was measured: 8192 tokens may take 160 s."""
SERVER_PERIOD_S = 10.0
"""vLLM's API server is asked so often whether it answers at all."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters of the engine and when each last moved; times are monotonic seconds."""

    schedule_calls: int = 0
    worked_steps: int = 0
    scheduled_at: float = 0.0
    worked_at: float = 0.0
    work: int = 0
    work_since: float | None = None
    allowance_s: float = 0.0
    """What the step in flight may last."""


def decide_progress(
    before: Progress,
    scheduler: SchedulerBlock | None,
    pulse: PulseBlock,
    middleware: MiddlewareBlock | None,
    now: float,
    *,
    held: bool = False,
) -> Progress:
    """Progress after one more look at the page. What cannot be read changes nothing.

    Args:
        before: what was known.
        scheduler: the engine's block; None when it cannot be read, or our code never came up in it: then
            requests that are answered must not be taken for a hang either.
        pulse: what the engine says before each step.
        middleware: the middleware's block; None when it cannot be read.
        now: monotonic seconds.
        held: no new sequence may start (memory is above its cap). Then requests that wait while
            none runs make no step by order, not by a wedge; schedule calls are still due.
    """
    if scheduler is None:
        return before
    if scheduler.blind:
        # vLLM schedules on without our code in it. Whether it hangs cannot be told from here.
        return replace(before, work=0, work_since=None, allowance_s=0.0)
    work = work_of(scheduler, middleware) or 0
    after = replace(
        before,
        work=work,
        work_since=(before.work_since if before.work_since is not None else now) if work else None,
    )
    if pulse.schedule_calls != before.schedule_calls:
        after = replace(after, schedule_calls=pulse.schedule_calls, scheduled_at=now)
    if scheduler.worked_steps != before.worked_steps or not _can_step(scheduler, pulse, held=held):
        after = replace(after, worked_steps=scheduler.worked_steps, worked_at=now)
    return replace(after, allowance_s=flight_allowance_s(pulse, scheduler))


def _can_step(scheduler: SchedulerBlock, pulse: PulseBlock, *, held: bool) -> bool:
    """Return whether a step is under way or some request could be in the next one.

    Requests cannot while they are blocked (their grammar compiles, KV or input is still to come), and
    none may start while `held`. A sound core goes on calling schedule all the same.
    """
    may_start = 0 if held else sum(scheduler.waiting) - scheduler.blocked
    return bool(pulse.steps) or sum(scheduler.running) + may_start > 0


def work_of(scheduler: SchedulerBlock | None, middleware: MiddlewareBlock | None) -> int | None:
    """Requests that the engine should be working on; None when the page tells nothing.

    The larger of both sides: a request that was released and did not reach a hung core is only
    known to the middleware.
    """
    if scheduler is None and middleware is None:
        return None
    inside = sum(scheduler.running) + sum(scheduler.waiting) if scheduler else 0
    released = sum(middleware.released) if middleware else 0
    return max(inside, released)


def flight_allowance_s(pulse: PulseBlock, scheduler: SchedulerBlock) -> float:
    """How long the step in flight may last: its tokens at the slowest pace seen, times a margin."""
    if not pulse.steps or not pulse.tokens:
        return 0.0
    return FLIGHT_MARGIN * pulse.tokens * _token_s(scheduler)


def _token_s(scheduler: SchedulerBlock) -> float:
    """Mean seconds of a prefill token, from the sums of prefill-bearing steps; a prior before any."""
    offset = len(TERMS) * StepClass.PREFILL
    tokens = scheduler.step_model[offset + TERMS.index("prefill")]
    seconds = scheduler.step_model[offset + TERMS.index("seconds")]
    return seconds / tokens if tokens > 0 and seconds > 0 else PRIOR_TOKEN_S


def stalled_s(progress: Progress, now: float) -> float:
    """For how long there was work and no progress (the longer of hang and wedge); 0 without work."""
    if progress.work_since is None:
        return 0.0
    hang = now - max(progress.scheduled_at, progress.work_since)
    wedge = now - max(progress.worked_at, progress.work_since)
    return max(0.0, hang, wedge)


def is_live(progress: Progress, now: float, stall_s: float) -> bool:
    """False once the engine is stalled for `stall_s`, or longer while the step in flight may last."""
    return stalled_s(progress, now) < max(stall_s, progress.allowance_s)


def is_moving(progress: Progress, now: float, stall_s: float) -> bool:
    """False once the engine is stalled for 10 s: too early to kill it, late enough to send nobody there."""
    patience = min(NOT_READY_AFTER_S, stall_s)
    return stalled_s(progress, now) < max(patience, progress.allowance_s)


@dataclass(frozen=True, slots=True)
class Readiness:
    """Everything that must hold before a pod gets requests."""

    started: bool
    cap_armed: bool
    draining: bool
    moving: bool
    child_alive: bool

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why it is not ready; empty when it is."""
        said = (
            (self.child_alive, "vLLM is not running"),
            (self.started, "no token was generated yet"),
            (self.cap_armed, "the memory cap is not armed on every rank"),
            (not self.draining, "draining"),
            (self.moving, "no step although there is work"),
        )
        return tuple(reason for holds, reason in said if not holds)
