"""What clients are told: durations, waits, and which limit refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.interfaces import TierLimits
from fleetkeeper_gateway.limits import estimate_tokens
from fleetkeeper_gateway.limits.rules import Reading, Window, duration, refusal
from tests.support.gateway.limits_world import demand_of, key_with


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0s"),
        (-5, "0s"),
        (16.2, "17ms"),
        (999, "999ms"),
        (1000, "1s"),
        (8640, "8.64s"),
        (60_000, "1m0s"),
        (86_401, "1m26.401s"),
        (360_000, "6m0s"),
        (3_600_000, "1h0m0s"),
        (9_051_500, "2h30m51.5s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(milliseconds: float, text: str) -> None:
    assert duration(milliseconds) == text


@given(st.integers(0, 10**10))
def test_a_duration_can_be_read_back(milliseconds: int) -> None:
    units = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
    found = re.findall(r"([0-9.]+)(ms|h|m|s)", duration(milliseconds))
    assert round(sum(float(number) * units[unit] for number, unit in found)) == milliseconds


@pytest.mark.parametrize(
    ("given_", "tokens"),
    [
        ((400, 100, 1), 200),
        ((401, 100, 1), 201),
        ((400, None, 1), 100 + 4096),
        ((0, 10**9, 3), 3 * 4096),
        ((4, -1, 0), 1),
    ],
)
def test_an_estimate_counts_the_body_and_the_answers(
    given_: tuple[int, int | None, int], tokens: int
) -> None:
    assert estimate_tokens(*given_, cap=4096) == tokens


def test_the_limit_with_the_longest_wait_refuses() -> None:
    """A client that retries after it is not refused by another limit."""
    limits = TierLimits(requests_per_minute=2, tokens_per_minute=60, concurrency=1)
    reading = Reading(False, running=1, level=-20.0, window=Window(0, 0, 2, 115_000))
    found = refusal(demand_of(key_with(), tokens=10), limits, reading, 60_000)
    assert (found.limit, found.retry_after_s) == ("requests", 56)
    found = refusal(demand_of(key_with(), tokens=50), limits, reading, 60_000)
    assert (found.limit, found.retry_after_s) == ("tokens", 60)
    assert "60 tokens a minute in tier standard" in str(found)


def test_a_limit_of_zero_refuses_everything() -> None:
    for limits in (TierLimits(0), TierLimits(None, 0), TierLimits(None, None, 0)):
        reading = Reading(False, running=0, level=0.0, window=Window())
        found = refusal(demand_of(key_with(), tokens=0), limits, reading, 60_000)
        assert 1 <= found.retry_after_s <= 60
