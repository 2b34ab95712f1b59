"""Batch limits in force: during a lease, after it, and without one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_engine.limits import (
    NOTCHES,
    RETURN_S,
    LimitRange,
    lease_holds,
    limits_change_at,
    limits_in_force,
)
from fleetkeeper_engine.shm.layout import SupervisorBlock

SEQUENCES, TOKENS = LimitRange(4, 64), LimitRange(256, 2048)


@given(
    st.integers(0, 2**31),
    st.integers(0, 2**31),
    st.floats(0, 1000),
    st.floats(0, 2000),
)
def test_limits_stay_between_floor_and_ceiling(
    wanted_sequences: int, wanted_tokens: int, deadline: float, now: float
) -> None:
    """Whatever is requested and whenever: buffers are sized by the ceiling, never beyond."""
    lease = SupervisorBlock(
        sequences=wanted_sequences, tokens=wanted_tokens, lease_deadline=deadline
    )
    limits = limits_in_force(lease, SEQUENCES, TOKENS, now)
    assert SEQUENCES.floor <= limits.sequences <= SEQUENCES.ceiling
    assert TOKENS.floor <= limits.tokens <= TOKENS.ceiling


def test_without_a_lease_start_up_values_hold() -> None:
    """A missing or torn region, or a supervisor without a limits lease."""
    for lease in (None, SupervisorBlock(), SupervisorBlock(sequences=8, tokens=512)):
        limits = limits_in_force(lease, SEQUENCES, TOKENS, 5.0)
        assert (limits.sequences, limits.tokens) == (64, 2048)
        assert not lease_holds(lease, 5.0)


@given(st.integers(4, 64), st.lists(st.floats(0, 40), min_size=2))
def test_after_the_lease_limits_only_rise_by_notches_to_the_ceiling(
    wanted: int, times: list[float]
) -> None:
    """Ten steps of equal ratio over 30 s; a dead operator causes no cliff."""
    lease = SupervisorBlock(sequences=wanted, lease_deadline=100.0)
    seen = [
        limits_in_force(lease, SEQUENCES, TOKENS, 100.0 + since).sequences
        for since in sorted(times)
    ]
    assert seen == sorted(seen)
    end = limits_in_force(lease, SEQUENCES, TOKENS, 100.0 + RETURN_S)
    assert end.sequences == SEQUENCES.ceiling
    every = [
        limits_in_force(lease, SEQUENCES, TOKENS, 100.01 + RETURN_S * n / NOTCHES).sequences
        for n in range(NOTCHES + 1)
    ]
    ratio = (64 / wanted) ** (1 / NOTCHES)
    for low, high in pairwise(every):
        assert high <= low * ratio + 1


@given(st.floats(-50.0, 50.0), st.floats(0.0, 1.0), st.booleans())
def test_limits_stand_until_they_are_said_to_change(
    since_end: float, part: float, leased: bool
) -> None:
    """What a step may take over from the step before it without working it out."""
    lease = SupervisorBlock(sequences=7, tokens=300, lease_deadline=100.0 if leased else 0.0)
    now = 100.0 + since_end
    until = min(limits_change_at(lease, now), now + 1e4)
    later = now + part * (until - now)
    assert until >= now
    if later < until:
        found = [limits_in_force(lease, SEQUENCES, TOKENS, time) for time in (now, later)]
        assert found[0] == found[1]
    assert leased or until > now
