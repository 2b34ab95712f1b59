"""The bytes of bodies that a process holds, and the part that one key may have of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fleetkeeper_gateway.http.connections.bodies import BodyBudget
from fleetkeeper_gateway.http.errors import Refusal
from fleetkeeper_gateway.http.settings import ServeSettings
from tests.support.lanes import examples

TOTAL = 1000
steps = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, TOTAL), st.booleans()))


def takes(budget: BodyBudget, key: str, size: int) -> bool:
    """Return whether a key gets these bytes."""
    try:
        budget.take(key, size)
    except Refusal as refusal:
        return (refusal.status, refusal.code) != (503, "bodies_full")
    return True


def largest(budget: BodyBudget, key: str) -> int:
    """Return the largest part that a key gets now."""
    for size in range(TOTAL, 0, -1):
        if takes(budget, key, size):
            budget.give_back(key, size)
            return size
    return 0


@pytest.mark.promise("body-budget")
def test_a_key_gets_half_and_the_next_one_half_of_the_rest() -> None:
    budget = BodyBudget(TOTAL)
    for key, size in (("a", 500), ("b", 250), ("c", 125)):
        assert largest(budget, key) == size
        assert takes(budget, key, size)
        assert largest(budget, key) == 0


@examples(100, guarded=True)
@given(steps)
def test_no_more_than_all_is_held_and_a_key_without_bodies_finds_room(
    given_steps: list[tuple[str, int, bool]],
) -> None:
    budget, held = BodyBudget(TOTAL), dict.fromkeys("abcd", 0)
    for key, size, back in given_steps:
        if back and held[key]:
            returned = min(size, held[key])
            budget.give_back(key, returned)
            held[key] -= returned
        elif not back:
            free = TOTAL - sum(held.values())
            fits = held[key] + size <= free - size
            assert takes(budget, key, size) == fits
            held[key] += size if fits else 0
        assert budget.held_bytes == sum(held.values()) < TOTAL
        assert all(part <= TOTAL // 2 for part in held.values())
    for key, size in held.items():
        if size:
            budget.give_back(key, size)
    assert largest(budget, "a") == TOTAL // 2


def test_a_budget_in_which_the_largest_request_never_fits_is_refused() -> None:
    assert ServeSettings(request_bytes=500, body_budget_bytes=1000).request_bytes == 500
    with pytest.raises(ValidationError, match="twice REQUEST_BYTES"):
        ServeSettings(request_bytes=500, body_budget_bytes=999)
