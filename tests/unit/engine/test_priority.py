"""The number by which vLLM orders requests: tier, release reason and arrival in one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.priority import (
    PriorityRule,
    ReleaseReason,
    goes_first,
    is_realtime,
    request_of,
)

RULE = PriorityRule(standard_offset_us=0, batch_ageing_us=30_000_000)
SECOND = 1_000_000
TIERS = st.sampled_from(Tier)


@given(TIERS, st.integers(1, 2**50), st.sampled_from(ReleaseReason))
def test_a_number_says_what_it_was_made_from(
    tier: Tier, arrival_us: int, reason: ReleaseReason
) -> None:
    """Tier, release reason and arrival come back, within vLLM's signed 64 bits, also for later turns of a tool call."""
    rule = PriorityRule(1_000_000, 30_000_000)
    number = rule.number(tier, arrival_us, reason)
    assert -(2**63) <= number < 2**63
    for spent in (0, 5, 15):
        origin = rule.origin(number - spent)
        assert origin is not None
        assert (origin.tier, origin.reason, origin.arrival_us) == (tier, reason, arrival_us)
        assert request_of(number - spent) == request_of(number)
        assert is_realtime(number - spent) == (tier is Tier.REALTIME)


@given(st.integers(1, 2**50), st.integers(1, 2**50))
def test_bands_hold_whatever_the_arrivals(early: int, late: int) -> None:
    """Realtime and overdue before floor before ordinary; goes_first tells the first band."""
    number = RULE.number
    first = {number(Tier.REALTIME, late), number(Tier.BATCH, late, ReleaseReason.OVERDUE)}
    floor = number(Tier.BATCH, late, ReleaseReason.FLOOR)
    ordinary = number(Tier.STANDARD, early)
    assert max(first) < floor < ordinary
    assert all(map(goes_first, first))
    assert not goes_first(floor)
    assert not goes_first(ordinary)


@pytest.mark.parametrize("number", [0, 1, 255, -1, 7, 2**62])
def test_foreign_numbers_have_no_origin(number: int) -> None:
    """The supervisor's own request (0) and numbers that we did not make are not taken for ours."""
    assert RULE.origin(number) is None


def test_ageing_lets_batch_pass_standard_that_came_30_s_later() -> None:
    """Priority is fixed at admission: ageing needs no later change."""
    batch = RULE.number(Tier.BATCH, 10 * SECOND)
    assert RULE.number(Tier.STANDARD, 39 * SECOND) < batch < RULE.number(Tier.STANDARD, 41 * SECOND)
