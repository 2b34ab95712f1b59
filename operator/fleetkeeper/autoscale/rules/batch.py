"""Decide the batch limits: an ordered chain of small rules, of which the first that applies decides.

Protection comes first (KV cache, batch time), then the step-time model, then room for more. Limits
stay within [floor, start-up value]. Without a model the chain follows measurements in the manner of
AIMD: up by 10%, down by 20%.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from fleetkeeper.api.types import BatchingMode
from fleetkeeper.autoscale.capacity.targets import Targets, moved_notch, notch_down
from fleetkeeper.autoscale.constants import (
    CUT_FACTOR,
    DIRECTION_S,
    DOWN_EVERY_S,
    DOWN_FACTOR,
    FEED_FORWARD_RATIO,
    KV_BACK_FACTOR,
    KV_CUT_FACTOR,
    KV_HIGH_RATIO,
    KV_LOW_RATIO,
    MODEL_CUT_FACTOR,
    OVER_CAP_FACTOR,
    PREEMPTIONS_PER_S,
    QUEUE_UP_FACTOR,
    QUEUE_UP_TICKS,
    SHORT_STEP_RATIO,
    UP_EVERY_S,
    UP_FACTOR,
    USED_RATIO,
)
from fleetkeeper.autoscale.rules.objectives import (
    has_room,
    is_full,
    is_slow,
    judged_since,
    running_per_pod,
    wait_is_broken,
)
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import (
    ControlSettings,
    Decision,
    Limits,
    decide,
    no_change,
)


@dataclass(frozen=True, slots=True)
class BatchView:
    """Inputs of the rules.

    `pending`: replicas that are starting. `may_raise`: the control breaker is closed and no canary runs.
    `gated`: the load breaker is not closed. `model_frozen`: limits must not follow the model now.

    While replicas are pending, limits are not lowered below the running sequences. They may rise as
    usual: a cold start takes minutes, and a larger batch helps now.
    """

    signals: Signals
    settings: ControlSettings
    targets: Targets | None = None
    pending: int = 0
    may_raise: bool = True
    gated: bool = False
    model_frozen: bool = False


@dataclass(frozen=True, slots=True)
class BeforeRaise:
    """The state before the last raise: the limits, and batch time attainment and queue wait under them."""

    limits: Limits
    attained: float
    queue_wait_s: float


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """The memory of the rules.

    `limits`: in force for all pods (None: never set). `changed`, `raised`: times of the last change and
    raise. `followed`: the model's targets that were followed last. `before_cut`: sequences to return to
    after a cut for KV cache pressure. `replicas_wait_ticks`: ticks in which no scale-up is recommended,
    because a raise may be enough. `before_raise`: the state with which a raise is compared.
    `rest_until`: no raise before this time, after a canary failed. `turns`: (time, +1 or -1) of
    changes of direction over 15 minutes, for each limit separately. `last_directions`: of sequences and
    of tokens.
    """

    limits: Limits | None = None
    changed: float = 0.0
    raised: float = 0.0
    followed: Limits | None = None
    before_cut: int | None = None
    replicas_wait_ticks: int = 0
    before_raise: BeforeRaise | None = None
    rest_until: float = 0.0
    turns: tuple[tuple[float, int], ...] = ()
    last_directions: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Move:
    """The change that a rule decides."""

    limits: Limits
    reason: str
    detail: str
    memory: BatchMemory
    urgent: bool = False


Rule = Callable[[BatchView, BatchMemory, Limits, float], Move | None]


def start_up(settings: ControlSettings) -> Limits:
    """Return the limits with which the engine starts; live limits never exceed them."""
    return Limits(settings.max_sequences, settings.max_tokens)


def first_limits(settings: ControlSettings) -> Limits:
    """Return the first limits, without a model: the geometric mean of floor and ceiling.

    Example: 4..256 sequences start at 32, 256..8192 tokens at 1024 (1448 rounded down to a notch).
    """
    sequences = round(math.sqrt(settings.min_sequences * settings.max_sequences))
    tokens = notch_down(math.sqrt(settings.min_tokens * settings.max_tokens), settings)
    return clamped(Limits(sequences, tokens), settings)


def clamped(limits: Limits, settings: ControlSettings) -> Limits:
    """Return the limits clamped to [floor, start-up value]; applied after every change."""
    return Limits(
        min(settings.max_sequences, max(settings.min_sequences, limits.sequences)),
        min(settings.max_tokens, max(settings.min_tokens, limits.tokens)),
    )


def _relieve_kv(view: BatchView, memory: BatchMemory, held: Limits, now: float) -> Move | None:
    """Cut sequences to 0.8 of those that run if requests are preempted or the KV cache is nearly full.

    While replicas are pending, sequences are cut to those that run.
    """
    signals = view.signals
    preempting = signals.preemptions_per_pod_s > PREEMPTIONS_PER_S
    if (
        not (preempting or signals.kv_ratio_max > KV_HIGH_RATIO)
        or now - memory.changed < DOWN_EVERY_S
    ):
        return None
    running = running_per_pod(signals)
    sequences = math.floor((1.0 if view.pending else KV_CUT_FACTOR) * running)
    if sequences < 1 or sequences >= held.sequences:
        return None
    return Move(
        replace(held, sequences=sequences),
        "KVCachePressure",
        f"KV cache is {signals.kv_ratio_max:.0%} full, with {signals.preemptions_per_pod_s:.2f} preemptions/s per pod",
        replace(memory, before_cut=max(held.sequences, memory.before_cut or 0)),
        urgent=True,
    )


def _relieve_cap(view: BatchView, memory: BatchMemory, held: Limits, now: float) -> Move | None:
    """Lower sequences if memory use is above the cap, at most every 30 s."""
    cap = view.settings.cap_percent / 100
    if view.signals.memory_used_ratio <= cap or now - memory.changed < UP_EVERY_S:
        return None
    running = running_per_pod(view.signals)
    sequences = math.floor(OVER_CAP_FACTOR * min(held.sequences, max(running, 1.0)))
    if sequences >= held.sequences or held.sequences <= view.settings.min_sequences:
        return None
    return Move(
        replace(held, sequences=sequences),
        "MemoryAboveCap",
        f"memory use is {view.signals.memory_used_ratio:.0%}, above the cap of {cap:.0%}",
        memory,
        urgent=True,
    )


def _shorten(view: BatchView, memory: BatchMemory, held: Limits, now: float) -> Move | None:
    """Go one notch down, tokens first, if batch time attainment is low in 2 of 3 windows."""
    windows = judged_since(view.signals.windows, memory.changed)
    if not is_slow(windows, view.settings) or now - memory.changed < DOWN_EVERY_S:
        return None
    attained = windows[-1].batch_attainment or 0.0
    objective_ms = view.settings.batch_time_objective_s * 1e3
    detail = f"{attained:.1%} of steps are within {objective_ms:.0f} ms"
    fewer = moved_notch(held.tokens, -1, view.settings)
    if fewer < held.tokens and view.signals.rates.prompt_tokens > 0:
        return Move(replace(held, tokens=fewer), "BatchTimeAboveTarget", detail, memory)
    factor = DOWN_FACTOR if view.targets else CUT_FACTOR
    least = math.ceil(running_per_pod(view.signals)) if view.pending else 1
    base = min(held.sequences, max(math.ceil(running_per_pod(view.signals)), 1))
    sequences = max(least, math.floor(factor * base))
    if sequences >= held.sequences:
        return None
    return Move(replace(held, sequences=sequences), "BatchTimeAboveTarget", detail, memory)


def _follow_down(view: BatchView, memory: BatchMemory, held: Limits, now: float) -> Move | None:
    """Follow the model's targets down, also the first time that they are known."""
    return _follow(view, memory, held, now, down=True)


def _follow_up(view: BatchView, memory: BatchMemory, held: Limits, now: float) -> Move | None:
    """Follow the model's targets up where a raise is allowed."""
    return _follow(view, memory, held, now, down=False)


def _follow(
    view: BatchView, memory: BatchMemory, held: Limits, now: float, *, down: bool
) -> Move | None:
    targets = view.targets
    if targets is None or view.model_frozen or memory.before_cut is not None:
        return None
    aim = _shifted(targets, memory, held, view.settings)
    least = _least_followed(view, memory, held, now)
    wanted = replace(aim, sequences=max(aim.sequences, least))
    lower = wanted.sequences < held.sequences or wanted.tokens < held.tokens
    if wanted == held or lower is not down:
        return None
    if down and now - memory.changed < DOWN_EVERY_S:
        return None
    if not down and not _may_follow_up(view, memory, now):
        return None
    followed = Limits(targets.sequences, targets.tokens or held.tokens)
    if wanted.sequences > aim.sequences:
        # The part that was not applied remains to be followed by the next move.
        share = wanted.sequences / aim.sequences
        followed = replace(followed, sequences=math.ceil(targets.sequences * share))
    detail = f"the step-time model predicts a capacity of {targets.capacity:.0f} sequences at {0.9 * view.settings.batch_time_objective_s * 1e3:.0f} ms"
    return Move(wanted, "FollowsStepTimeModel", detail, replace(memory, followed=followed))


def _least_followed(view: BatchView, memory: BatchMemory, held: Limits, now: float) -> int:
    """Return the fewest sequences that one move with the model may leave.

    Half of them; all of them within 30 s of the last cut, unless the model is followed for the first
    time; and those that run while replicas are pending. A model that was fitted while steps were slow
    for a short time (a neighbor's start) predicts the floor: halving costs less until it has learned
    more. If measured steps are too long, `_shorten` has already cut.
    """
    least = math.ceil(MODEL_CUT_FACTOR * held.sequences)
    was_cut = memory.followed is not None and memory.changed > memory.raised
    if was_cut and now - memory.changed < UP_EVERY_S:
        least = held.sequences
    if view.pending:
        least = max(least, min(math.ceil(running_per_pod(view.signals)), held.sequences))
    return least


def _may_follow_up(view: BatchView, memory: BatchMemory, now: float) -> bool:
    """Return whether limits may follow the model up; the first time at once, to replace the first guess."""
    if memory.followed is None:
        return view.may_raise and now >= memory.rest_until
    return _raise_allowed(view, memory, now, despite_gate=_queue_wants_more(view))


def _queue_wants_more(view: BatchView) -> bool:
    """Return whether requests wait although steps are short (below 0.7 of the objective) and KV is free."""
    signals, settings = view.signals, view.settings
    short = 0.0 < signals.batch_time_s < SHORT_STEP_RATIO * settings.batch_time_objective_s
    return short and signals.kv_ratio_max < KV_LOW_RATIO and wait_is_broken(signals, settings)


def _shifted(
    targets: Targets, memory: BatchMemory, held: Limits, settings: ControlSettings
) -> Limits:
    """Return the limits, moved by as much as the targets moved since they were last followed.

    The difference between limits and targets that the other rules made is kept.
    """
    before = memory.followed
    if before is None:
        return clamped(Limits(targets.sequences, targets.tokens or held.tokens), settings)
    ratio = targets.sequences / before.sequences
    sequences = held.sequences
    if abs(ratio - 1.0) > FEED_FORWARD_RATIO:
        sequences = round(held.sequences * ratio)
    tokens = held.tokens
    if targets.tokens is not None and targets.tokens != before.tokens:
        tokens = round(held.tokens * targets.tokens / before.tokens)
        tokens = notch_down(tokens, settings)
    return clamped(Limits(sequences, tokens), settings)


def _raise_allowed(
    view: BatchView,
    memory: BatchMemory,
    now: float,
    *,
    need_use: bool = True,
    despite_gate: bool = False,
) -> bool:
    """Return whether a raise is allowed: breakers closed, no recent change, at least half of it in use.

    `despite_gate`: allow it while the load breaker is not closed, because this raise relieves the load.
    """
    held = memory.limits
    used = running_per_pod(view.signals)
    return (
        view.may_raise
        and (despite_gate or not view.gated)
        and now - memory.changed >= UP_EVERY_S
        and now >= memory.rest_until
        and (not need_use or held is None or used >= USED_RATIO * held.sequences)
    )


def _give_back(view: BatchView, memory: BatchMemory, held: Limits, now: float) -> Move | None:
    """Restore sequences after a cut for KV cache pressure: 5% every 30 s while the cache has room."""
    if memory.before_cut is None or view.signals.kv_ratio_max >= KV_LOW_RATIO:
        return None
    if held.sequences >= memory.before_cut:
        return None
    if not _raise_allowed(view, memory, now, need_use=False):
        return None
    sequences = min(
        memory.before_cut, max(held.sequences + 1, round(held.sequences * KV_BACK_FACTOR))
    )
    left = None if sequences >= memory.before_cut else memory.before_cut
    return Move(
        replace(held, sequences=sequences),
        "KVCacheHeadroom",
        f"KV cache is only {view.signals.kv_ratio_max:.0%} full",
        replace(memory, before_cut=left),
    )


def _widen_for_queue(view: BatchView, memory: BatchMemory, held: Limits, now: float) -> Move | None:
    """Raise sequences by 25% if requests wait, steps are short, KV cache is free and the limit is reached.

    Steps are short if the mean batch time is below 0.7 of its objective. No scale-up is recommended for
    two ticks. The raise is also allowed while requests are shed: a batch that is too small may be the
    cause.
    """
    signals = view.signals
    if not (_queue_wants_more(view) and is_full(signals, held.sequences)):
        return None
    if held.sequences >= ceiling_sequences(view):
        return None
    if not _raise_allowed(view, memory, now, despite_gate=True):
        return None
    sequences = max(held.sequences + 1, round(held.sequences * QUEUE_UP_FACTOR))
    return Move(
        replace(held, sequences=min(sequences, ceiling_sequences(view))),
        "BatchTimeHeadroom",
        f"queue wait is {signals.queue_wait_s:.2f} s although steps take only {signals.batch_time_s * 1e3:.0f} ms",
        replace(memory, replicas_wait_ticks=QUEUE_UP_TICKS + 1),
    )


def ceiling_sequences(view: BatchView) -> int:
    """Return the upper bound of a raise: twice the model's M* if known, else the start-up value.

    Limits may exceed M*, because the model errs, but not by far.
    """
    if view.targets is None:
        return view.settings.max_sequences
    return min(
        view.settings.max_sequences, max(2 * view.targets.sequences, view.settings.min_sequences)
    )


def _lengthen(view: BatchView, memory: BatchMemory, held: Limits, now: float) -> Move | None:
    """Go one notch up if batch time attainment left room for four windows and requests wait."""
    windows = judged_since(view.signals.windows, memory.changed)
    if not has_room(windows, view.settings) or not wait_is_broken(view.signals, view.settings):
        return None
    if not _raise_allowed(view, memory, now):
        return None
    detail = f"batch time left room for {len(windows)} windows, and requests are waiting"
    top = ceiling_sequences(view)
    if is_full(view.signals, held.sequences) and held.sequences < top:
        sequences = min(top, max(held.sequences + 1, round(held.sequences * UP_FACTOR)))
        return Move(replace(held, sequences=sequences), "BatchTimeHeadroom", detail, memory)
    more = moved_notch(held.tokens, 1, view.settings)
    if more > held.tokens:
        return Move(replace(held, tokens=more), "BatchTimeHeadroom", detail, memory)
    return None


RULES: tuple[Rule, ...] = (
    _relieve_kv,
    _relieve_cap,
    _shorten,
    _follow_down,
    _give_back,
    _follow_up,
    _widen_for_queue,
    _lengthen,
)
"""In order; the first that changes the limits decides."""


def decide_limits(
    view: BatchView, memory: BatchMemory, now: float
) -> tuple[Decision[Limits], BatchMemory]:
    """Return the limits for all pods and the new memory. Limits are unchanged if signals are stale."""
    settings = view.settings
    if memory.replicas_wait_ticks:
        memory = replace(memory, replicas_wait_ticks=memory.replicas_wait_ticks - 1)
    if settings.batching_mode is BatchingMode.FIXED:
        limits = start_up(settings)
        why = "limits are fixed by spec.batching.mode"
        return decide(limits, "Fixed", why), replace(memory, limits=limits)
    if memory.limits is None:
        limits = first_limits(settings)
        first = replace(memory, limits=limits, changed=now)
        why = "no step-time model yet: limits start at the geometric mean of floor and ceiling"
        return decide(limits, "Starting", why), first
    held = clamped(memory.limits, settings)
    if held != memory.limits:
        memory = replace(memory, limits=held)
    if not view.signals.known:
        return no_change(held, "SignalsStale", "no fresh samples, so limits are unchanged"), memory
    for rule in RULES:
        move = rule(view, memory, held, now)
        if move is not None:
            wanted = clamped(move.limits, settings)
            if wanted != held:
                return _moved(view, replace(move, limits=wanted), held, now)
    return decide(held, "Steady", "no change is needed or possible"), memory


def direction(before: Limits, after: Limits) -> int:
    """Return -1 if either limit was lowered, else +1."""
    return -1 if after.sequences < before.sequences or after.tokens < before.tokens else 1


def _turns(
    memory: BatchMemory, before: Limits, after: Limits, now: float
) -> tuple[tuple[tuple[float, int], ...], tuple[int, int]]:
    """Return the changes of direction including this one, and the last directions of both limits.

    Following the model for the first time corrects a guess and does not count as a change of direction.
    """
    turns = [turn for turn in memory.turns if now - turn[0] <= DIRECTION_S]
    directions = []
    moves = (after.sequences - before.sequences, after.tokens - before.tokens)
    for moved, last in zip(moves, memory.last_directions, strict=True):
        turned = (moved > 0) - (moved < 0)
        if turned and last and turned != last and memory.followed is not None:
            turns.append((now, turned))
        directions.append(turned or last)
    return tuple(turns), (directions[0], directions[1])


def _moved(
    view: BatchView, move: Move, held: Limits, now: float
) -> tuple[Decision[Limits], BatchMemory]:
    turned = direction(held, move.limits)
    memory = move.memory
    windows = view.signals.windows
    attained = windows[-1].batch_attainment if windows else None
    before = None
    if turned > 0 and attained is not None:
        before = BeforeRaise(held, attained, view.signals.queue_wait_s)
    turns, directions = _turns(memory, held, move.limits, now)
    memory = replace(
        memory,
        limits=move.limits,
        changed=now,
        raised=now if turned > 0 else memory.raised,
        before_raise=before,
        turns=turns,
        last_directions=directions,
    )
    decision = decide(move.limits, move.reason, move.detail)
    return decision, memory


def step_up_possible(view: BatchView, memory: BatchMemory) -> bool:
    """Return whether limits can be raised: attainment leaves room and a ceiling is not reached.

    If they cannot and requests wait, more replicas are recommended.
    """
    held = memory.limits
    if held is None:
        return False
    windows = judged_since(view.signals.windows, memory.changed)
    below = held.sequences < ceiling_sequences(view) or held.tokens < view.settings.max_tokens
    return below and has_room(windows, view.settings) and view.may_raise and not view.gated
