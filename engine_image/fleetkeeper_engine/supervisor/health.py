"""Health of the engine from shared memory: started, live and ready. Pure.

vLLM's own /health returns 200 while its core hangs. Here an engine is stalled when there is work
and either no schedule call (hang) or no completed step although a request could run (wedge). A step
in flight may last as long as its tokens need, so a long prefill is not a stall.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleetkeeper_contract.step_terms import TERMS, StepClass
from fleetkeeper_engine.shm.layout import HeartbeatBlock, MiddlewareBlock, SchedulerBlock

NOT_READY_AFTER_S = 10.0
FLIGHT_MARGIN = 4.0
"""A step in flight may take this many times the pace of earlier tokens."""
PRIOR_TOKEN_S = 0.02
"""Assumed seconds for a prefill token before any was measured: 8192 tokens may take 160 s."""
SERVER_PERIOD_S = 10.0
"""Period of the check that vLLM's API server answers at all."""
NO_STEP = "the engine has pending requests but completes no step"
NO_ANSWER = "vLLM's API server does not answer GET /health"
NO_START = "no token was generated within startupSeconds"


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
    """Time that the step in flight may last."""
    warm_up: tuple[float, float] = (0.0, 0.0)
    """Prefill tokens before the engine was started, and the seconds of their steps, which compile."""


def decide_progress(
    before: Progress,
    scheduler: SchedulerBlock | None,
    heartbeat: HeartbeatBlock,
    middleware: MiddlewareBlock | None,
    now: float,
    *,
    throttled: bool = False,
    started: bool = True,
) -> Progress:
    """Return the progress after one more read of shared memory. Unreadable blocks change nothing.

    Args:
        before: the previous progress.
        scheduler: the engine's block; None if it cannot be read, or our code never started in the
            engine. In that case requests that are answered must not look like a hang.
        heartbeat: the engine's heartbeat before each step.
        middleware: the middleware's block; None if it cannot be read.
        now: monotonic seconds.
        throttled: no new sequence may start (memory is above its cap). Requests that wait while
            none runs then make no step on purpose, not because of a wedge. Schedule calls are still
            due.
        started: the engine has generated its first tokens. The pace before says nothing about later.
    """
    if scheduler is None:
        return before
    if scheduler.instrumentation_disabled:
        # vLLM continues to schedule without our code. A hang cannot be detected from here.
        return replace(before, work=0, work_since=None, allowance_s=0.0)
    work = work_of(scheduler, middleware) or 0
    after = replace(
        before,
        work=work,
        work_since=(before.work_since if before.work_since is not None else now) if work else None,
    )
    if heartbeat.schedule_calls != before.schedule_calls:
        after = replace(after, schedule_calls=heartbeat.schedule_calls, scheduled_at=now)
    if scheduler.worked_steps != before.worked_steps or not _can_step(
        scheduler, heartbeat, throttled=throttled
    ):
        after = replace(after, worked_steps=scheduler.worked_steps, worked_at=now)
    if not started:
        after = replace(after, warm_up=_prefilled(scheduler))
    return replace(after, allowance_s=flight_allowance_s(heartbeat, scheduler, after.warm_up))


def _can_step(scheduler: SchedulerBlock, heartbeat: HeartbeatBlock, *, throttled: bool) -> bool:
    """Return whether a step is in flight or some request could be in the next one.

    Blocked requests cannot (their grammar compiles, KV or input is still to come), and none may
    start while `throttled`. A healthy core keeps calling schedule all the same.
    """
    may_start = 0 if throttled else sum(scheduler.waiting) - scheduler.blocked
    return bool(heartbeat.steps) or sum(scheduler.running) + may_start > 0


def work_of(scheduler: SchedulerBlock | None, middleware: MiddlewareBlock | None) -> int | None:
    """Return the requests that the engine should be working on; None if no block can be read.

    The larger of both sides counts: only the middleware knows a request that was released and did
    not reach a hung core.
    """
    if scheduler is None and middleware is None:
        return None
    inside = sum(scheduler.running) + sum(scheduler.waiting) if scheduler else 0
    released = sum(middleware.released) if middleware else 0
    return max(inside, released)


def flight_allowance_s(
    heartbeat: HeartbeatBlock, scheduler: SchedulerBlock, warm_up: tuple[float, float]
) -> float:
    """Return how long the step in flight may last: its tokens at the mean prefill pace, times a margin."""
    if not heartbeat.steps or not heartbeat.tokens:
        return 0.0
    tokens, seconds = (
        now - before for now, before in zip(_prefilled(scheduler), warm_up, strict=True)
    )
    token_s = seconds / tokens if tokens > 0 and seconds > 0 else PRIOR_TOKEN_S
    return FLIGHT_MARGIN * heartbeat.tokens * token_s


def _prefilled(scheduler: SchedulerBlock) -> tuple[float, float]:
    """Return the prefill tokens so far, and the seconds of the steps that had any."""
    offset = len(TERMS) * StepClass.PREFILL
    sums = scheduler.step_model
    return sums[offset + TERMS.index("prefill")], sums[offset + TERMS.index("seconds")]


def stalled_s(progress: Progress, now: float) -> float:
    """Return how long there was work and no progress (the longer of hang and wedge); 0 without work."""
    if progress.work_since is None:
        return 0.0
    hang = now - max(progress.scheduled_at, progress.work_since)
    wedge = now - max(progress.worked_at, progress.work_since)
    return max(0.0, hang, wedge)


def is_live(progress: Progress, now: float, stall_s: float) -> bool:
    """Return False once the engine is stalled for `stall_s`, or longer while the step in flight may last."""
    return stalled_s(progress, now) < max(stall_s, progress.allowance_s)


def is_moving(progress: Progress, now: float, stall_s: float) -> bool:
    """Return False once the engine is stalled for 10 s: too early to kill it, late enough to route elsewhere."""
    patience = min(NOT_READY_AFTER_S, stall_s)
    return stalled_s(progress, now) < max(patience, progress.allowance_s)


@dataclass(frozen=True, slots=True)
class Readiness:
    """The conditions that must hold before a pod gets requests."""

    started: bool
    cap: str
    """Why the memory cap is not armed; empty if it is."""
    draining: bool
    hang: str
    """Why requests would wait in vain; empty if they would not."""
    child_alive: bool

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Return why the pod is not ready; empty if it is."""
        conditions = (
            (self.child_alive, "vLLM is not running"),
            (self.started, "no token was generated yet"),
            (not self.cap, self.cap),
            (not self.draining, "draining"),
            (not self.hang, f"hung: {self.hang}"),
        )
        return tuple(reason for holds, reason in conditions if not holds)
