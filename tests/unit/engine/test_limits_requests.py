"""Requests for limits: which are refused, and which of two wins."""

from __future__ import annotations

import json

import pytest

from fleetkeeper_engine.spec import Batching
from fleetkeeper_engine.supervisor.limits_requests import (
    LimitsLease,
    RefusedLimitsRequestError,
    allowed_ranges,
    decide_lease,
    parse_limits_request,
)

RANGES = allowed_ranges(Batching(max_sequences=64, min_sequences=2, max_tokens=2048))


def body(**changes: object) -> bytes:
    request = {"sequences": 16, "tokens": 512, "leaseSeconds": 60, "generation": 1, **changes}
    return json.dumps({k: v for k, v in request.items() if v is not None}).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"sequences": 1},
        {"sequences": 65},
        {"sequences": 16.5},
        {"sequences": "16"},
        {"sequences": True},
        {"sequences": None},
        {"tokens": 255},
        {"tokens": 4096},
        {"leaseSeconds": 0},
        {"leaseSeconds": 601},
        {"generation": 0},
        {"admit": {"realtime": 1.5}},
        {"admit": {"vip": 1.0}},
        {"shares": {"batch": -0.1}},
        {"surprise": 1},
    ],
)
def test_a_limits_request_outside_the_ranges_is_422_with_the_ranges(
    changes: dict[str, object],
) -> None:
    with pytest.raises(RefusedLimitsRequestError) as refused:
        parse_limits_request(body(**changes), RANGES)
    assert refused.value.status == 422
    assert refused.value.detail["allowed"]["sequences"] == {"min": 2, "max": 64}


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b'{"sequences": NaN}', b"null"])
def test_what_is_no_limits_request_is_422(text: bytes) -> None:
    with pytest.raises(RefusedLimitsRequestError) as refused:
        parse_limits_request(text, RANGES)
    assert refused.value.status == 422


def test_tiers_that_a_request_leaves_out_keep_what_holds_without_a_lease() -> None:
    request = parse_limits_request(body(admit={"batch": 0}, shares={"batch": 0.2}), RANGES)
    assert request.admit.filled((1.0, 1.0, 1.0)) == (1.0, 1.0, 0.0)
    assert request.shares.filled((1.0, 1.0, 0.0)) == (1.0, 1.0, 0.2)


def test_generations_rise_and_the_same_one_renews_its_lease() -> None:
    first = decide_lease(
        LimitsLease(), parse_limits_request(body(generation=7), RANGES), epoch=1, now=100.0
    )
    assert first.seconds_left(100.0) == 60.0
    renewed = decide_lease(
        first, parse_limits_request(body(generation=7, leaseSeconds=90), RANGES), epoch=1, now=110.0
    )
    assert renewed.deadline == 200.0
    for stale in (body(generation=6), body(generation=7, sequences=17)):
        with pytest.raises(RefusedLimitsRequestError) as refused:
            decide_lease(renewed, parse_limits_request(stale, RANGES), epoch=1, now=111.0)
        assert (refused.value.status, refused.value.detail["generation"]) == (409, 7)


def test_a_new_leader_may_count_from_one_again() -> None:
    held = decide_lease(
        LimitsLease(), parse_limits_request(body(generation=900), RANGES), epoch=3, now=0.0
    )
    taken = decide_lease(held, parse_limits_request(body(generation=1), RANGES), epoch=4, now=1.0)
    assert (taken.epoch, taken.request and taken.request.generation) == (4, 1)
