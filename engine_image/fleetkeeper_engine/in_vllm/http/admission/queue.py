"""The one queue in front of the engine. Pure: no I/O, every call takes `now` (CLOCK_MONOTONIC, s).

Requests arrive, are refused or wait, are released into vLLM as sequences become free, and finish.
The middleware calls `release_ready` after every change and hands each ticket to vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.admission.arrivals import Arrivals
from fleetkeeper_engine.in_vllm.http.admission.rules import (
    Candidate,
    QueueHead,
    Room,
    decide_next,
    fits_alone,
)
from fleetkeeper_engine.in_vllm.http.admission.tickets import Refusal, Ticket, TierState
from fleetkeeper_engine.in_vllm.priority import PriorityRule, ReleaseReason, microseconds
from fleetkeeper_engine.in_vllm.realtime_reserve import RESERVE_KEPT_S, RecentPeak
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from fleetkeeper_engine.limits import LimitRange, lease_holds, limits_change_at, limits_in_force
from fleetkeeper_engine.policy import policy_in
from fleetkeeper_engine.shm.layout import Outcome, SupervisorBlock

_REOPEN_RATIO = 0.5
_OUTCOMES = len(Outcome)


class Admission:
    """The queues with their shares, floors and the pod's own rule."""

    def __init__(self, settings: VllmSettings) -> None:
        self._start_policy = self._policy = settings.policy()
        self._sequences = LimitRange(settings.min_sequences, settings.max_sequences)
        self._tokens = LimitRange(settings.min_tokens, settings.max_tokens)
        self.rule = PriorityRule(
            microseconds(settings.standard_offset_s), microseconds(settings.batch_ageing_s)
        )
        self.tiers = (TierState(), TierState(), TierState())
        self._supervisor_block: SupervisorBlock | None = None
        self._realtime_seen: float | None = None
        self._realtime_peak = RecentPeak()
        self._last_arrival_us = 0
        self._room = Room(0)
        self._room_until = -math.inf
        self.arrivals = Arrivals()
        self.outcomes = [0] * (len(Tier) * len(Outcome))
        self.own_rule_closed = False
        self.waiting = 0
        """Requests in the queue."""
        self.released = 0
        """Requests inside vLLM."""

    def apply_supervisor_block(self, block: SupervisorBlock | None) -> None:
        """Apply the supervisor's block; None means it cannot be read, so start-up values apply."""
        self._supervisor_block = block
        self._policy = policy_in(block) or self._start_policy
        self._room_until = -math.inf

    def refuse(self, tier: Tier, request_id: bytes | None, now: float) -> Refusal | None:
        """Count an arrival, and return a refusal if its body need not be read."""
        self.arrivals.record(tier, request_id, now)
        if tier is Tier.REALTIME:
            self._realtime_seen = now
        if self._supervisor_block is not None and self._supervisor_block.draining:
            return self._refused(tier, Outcome.DRAINING, now)
        if not self._is_open(tier, now):
            return self._refused(tier, Outcome.TIER_CLOSED, now)
        if self._is_full(tier) and not self._fits_now(tier, now):
            return self._refused(tier, Outcome.QUEUE_FULL, now)
        return None

    def try_admit_now(
        self, tier: Tier, sequences: int, arrived: float, now: float
    ) -> Ticket | None:
        """Release a request at once if nothing waits and there is room; else return None.

        The result is that of `enqueue` and `release_ready`. Most requests take this shorter path.
        """
        if self.waiting:
            return None
        ticket = self._ticket(tier, sequences, arrived, now)
        realtime, standard, batch = self.tiers
        held = (realtime.held, standard.held, batch.held)
        # A request whose body took so long that it is overdue goes ahead of others, by the long
        # path.
        overdue = ticket.arrival_us < microseconds(now) - self.rule.batch_ageing_us
        if overdue or not fits_alone(tier, ticket.sequences, held, self.room(now)):
            return None
        self._admit(ticket, ReleaseReason.ORDINARY, self.room(now))
        return ticket

    def enqueue(self, tier: Tier, sequences: int, arrived: float, now: float) -> Ticket | Refusal:
        """Put a request into the queue, or refuse it if the queue is full by now.

        Args:
            tier: the requested tier.
            sequences: the sequences that the engine will run for it.
            arrived: when its first byte arrived; its wait counts from here.
            now: the time.
        """
        if self._is_full(tier) and not self._fits_now(tier, now):
            return self._refused(tier, Outcome.QUEUE_FULL, now)
        ticket = self._ticket(tier, sequences, arrived, now)
        state = self.tiers[tier]
        state.queue[ticket.arrival_us] = ticket
        state.waiting_sequences += ticket.sequences
        self.waiting += 1
        return ticket

    def release_ready(self, now: float) -> list[Ticket]:
        """Return the requests that go to vLLM now, in this order, with their priority."""
        taken: list[Ticket] = []
        heads: list[QueueHead | None] = [state.head for state in self.tiers]
        room, now_us = self.room(now), microseconds(now)
        while any(heads):
            chosen = self._next(heads, room, now_us)
            if chosen is None:
                break
            taken.append(self._release(*chosen, room))
            heads[chosen[0]] = self.tiers[chosen[0]].head
        return taken

    def finish(self, ticket: Ticket, now: float) -> None:
        """End a request that left vLLM, or whose client hung up while it waited. Idempotent."""
        if ticket.done:
            return
        ticket.done = True
        state = self.tiers[ticket.tier]
        if ticket.priority is None:
            del state.queue[ticket.arrival_us]
            state.waiting_sequences -= ticket.sequences
            self.waiting -= 1
            self._count(ticket.tier, Outcome.CANCELLED)
            return
        state.held -= ticket.sequences
        state.priority_held -= ticket.sequences * (ticket.reason is not ReleaseReason.ORDINARY)
        state.released -= 1
        self.released -= 1
        state.rate = state.rate.after(1, now)

    def flush(self, now: float) -> list[Ticket]:
        """Flush the queue at the end of a drain; each request is answered 503."""
        flushed = [ticket for state in self.tiers for ticket in state.queue.values()]
        for ticket in flushed:
            state = self.tiers[ticket.tier]
            state.waiting_sequences -= ticket.sequences
            ticket.done = True
            self._count(ticket.tier, Outcome.DRAINING)
        for state in self.tiers:
            state.queue.clear()
        self.waiting = 0
        self.arrivals.close_bins(now)
        return flushed

    def tick(self, engine_oldest: tuple[float, ...], now: float) -> None:
        """Close arrival bins and apply the pod's own rule.

        Args:
            engine_oldest: arrival of the oldest request inside vLLM that no step has held, by tier;
                0 means none.
            now: the time.
        """
        self.arrivals.close_bins(now)
        if lease_holds(self._supervisor_block, now):
            self.own_rule_closed = False
            return
        waits = [
            now - arrival
            for tier in (Tier.REALTIME, Tier.STANDARD)
            for arrival in (self.tiers[tier].oldest_arrival, engine_oldest[tier])
            if arrival > 0.0
        ]
        objective = self._policy.queue_wait_objective_s
        limit = objective * (_REOPEN_RATIO if self.own_rule_closed else 1.0)
        self.own_rule_closed = max(waits, default=0.0) > limit

    def room(self, now: float) -> Room:
        """Return the capacity for requests inside vLLM now."""
        seen, peak = self._realtime_seen, self._realtime_peak.value
        reserved = seen is not None and now - seen < RESERVE_KEPT_S
        last = self._room
        if now < self._room_until and (reserved, peak) == (last.reserved, last.realtime_peak):
            return last
        block, policy = self._supervisor_block, self._policy
        shares = (1.0, 1.0, policy.batch_share_ratio)
        if block is not None and lease_holds(block, now):
            leased = [share if share > 0.0 else shares[i] for i, share in enumerate(block.shares)]
            shares = (leased[0], leased[1], leased[2])
        self._room = Room(
            sequences=limits_in_force(block, self._sequences, self._tokens, now).sequences,
            share_ratios=shares,
            batch_floor_ratio=policy.batch_floor_ratio,
            reserved=reserved,
            realtime_peak=peak,
            stopped=block is not None and block.cap_exceeded,
        )
        self._room_until = limits_change_at(block, now)
        return self._room

    @property
    def unfinished(self) -> int:
        """Return the number of requests in the queue and inside vLLM."""
        return self.waiting + self.released

    def _next(
        self, heads: Sequence[QueueHead | None], room: Room, now_us: int
    ) -> tuple[Tier, ReleaseReason] | None:
        realtime, standard, batch = self.tiers
        held = (realtime.held, standard.held, batch.held)
        return decide_next(heads, held, room, self.rule, now_us, floor_held=batch.priority_held)

    def _ticket(self, tier: Tier, sequences: int, arrived: float, now: float) -> Ticket:
        # Arrivals are distinct, because the priority made from one identifies the request inside
        # vLLM.
        self._last_arrival_us = max(self._last_arrival_us + 1, microseconds(arrived))
        ticket = Ticket(tier, max(1, sequences), self._last_arrival_us)
        if tier is Tier.REALTIME:
            state = self.tiers[tier]
            wanted = state.waiting_sequences + ticket.sequences + state.held
            self._realtime_peak = self._realtime_peak.after(wanted, now)
        return ticket

    def _release(self, tier: Tier, reason: ReleaseReason, room: Room) -> Ticket:
        state = self.tiers[tier]
        _, ticket = state.queue.popitem(last=False)
        state.waiting_sequences -= ticket.sequences
        self.waiting -= 1
        self._admit(ticket, reason, room)
        return ticket

    def _admit(self, ticket: Ticket, reason: ReleaseReason, room: Room) -> None:
        state = self.tiers[ticket.tier]
        if ticket.sequences > 1:
            ticket.sequences = room.charge(ticket.tier, ticket.sequences)
        ticket.priority = self.rule.number(ticket.tier, ticket.arrival_us, reason)
        ticket.reason = reason
        state.held += ticket.sequences
        state.priority_held += ticket.sequences * (reason is not ReleaseReason.ORDINARY)
        state.released += 1
        self.released += 1
        self._count(ticket.tier, Outcome.ADMITTED)

    def _is_open(self, tier: Tier, now: float) -> bool:
        block = self._supervisor_block
        if block is not None and block.closed[tier]:
            return False
        admitted_ratio = 1.0
        if block is not None and lease_holds(block, now):
            admitted_ratio = block.admit[tier]
        elif tier is Tier.BATCH and self.own_rule_closed:
            admitted_ratio = 0.0
        return (
            admitted_ratio >= 1.0
            or self._credited(tier, admitted_ratio)
            or self._under_floor(tier, now)
        )

    def _credited(self, tier: Tier, admitted_ratio: float) -> bool:
        # Exactly the requested share, evenly spread: 0.6 admits 3 of every 5, without randomness.
        state = self.tiers[tier]
        state.credit += max(0.0, admitted_ratio)
        if state.credit < 1.0 - 1e-9:
            return False
        state.credit -= 1.0
        return True

    def _under_floor(self, tier: Tier, now: float) -> bool:
        if tier is not Tier.BATCH:
            return False
        state = self.tiers[tier]
        return state.held + state.waiting_sequences < self.room(now).batch_floor

    def _is_full(self, tier: Tier) -> bool:
        return len(self.tiers[tier].queue) >= self._policy.queue_limits[tier]

    def _fits_now(self, tier: Tier, now: float) -> bool:
        if self.tiers[tier].queue:
            return False
        now_us = microseconds(now)
        heads: list[QueueHead | None] = [state.head for state in self.tiers]
        heads[tier] = Candidate(1, now_us)
        chosen = self._next(heads, self.room(now), now_us)
        return chosen is not None and chosen[0] is tier

    def _refused(self, tier: Tier, outcome: Outcome, now: float) -> Refusal:
        self._count(tier, outcome)
        state = self.tiers[tier]
        retry_after_s = state.rate.retry_after_s(max(1, len(state.queue)), now)
        return Refusal(outcome, tier, self._policy.queue_limits[tier], retry_after_s)

    def _count(self, tier: Tier, outcome: Outcome) -> None:
        self.outcomes[tier * _OUTCOMES + outcome] += 1
