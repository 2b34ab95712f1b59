"""The bytes of held requests, and when a client that gets no answer is to come back."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.hold import Hold, HoldSettings
from fleetkeeper_gateway.hold.budget import OVERHEAD_BYTES, HoldBudget
from fleetkeeper_gateway.hold.states import SeenStates, retry_after_s
from fleetkeeper_gateway.interfaces import HoldRefused
from tests.gateway.http.world import MemoryMarks, MemoryServices, asleep, service

TOTAL = 1000
SLEEPER = service(sleep=asleep())


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["tenant-1", "tenant-2"]),
            st.sampled_from(["chat", "code", "embed"]),
            st.integers(1, TOTAL),
        ),
        max_size=40,
    )
)
def test_an_owner_holds_at_most_as_much_as_remains_free(
    requests: list[tuple[str, str, int]],
) -> None:
    budget, taken = HoldBudget(TOTAL), list[tuple[str, str, int]]()
    for tenant, path, size in requests:
        own = [
            sum(other[2] for other in taken if other[0] == tenant),
            sum(other[2] for other in taken if other[1] == path),
        ]
        fits = max(own) + size <= TOTAL - sum(other[2] for other in taken) - size
        assert budget.take((tenant, path), size) is fits
        taken += [(tenant, path, size)] * fits
        assert budget.held_bytes == sum(other[2] for other in taken) <= TOTAL
    for tenant, path, size in taken:
        budget.give_back((tenant, path), size)
    assert (budget.held_bytes, budget._of_owners) == (0, {})


async def test_ten_thousand_requests_are_within_the_budget_and_leave_nothing() -> None:
    services, marks, total = MemoryServices(), MemoryMarks(), 8 * 1024**2
    services.set(SLEEPER)
    hold = Hold(services, marks, hold_s=55, total_bytes=total)
    task = asyncio.create_task(hold.run())
    await asyncio.sleep(0)
    refused = 0
    with ExitStack() as places:
        for number in range(10_000):
            try:
                place = hold.place(SLEEPER, Tier.STANDARD, number % 7, "m", 100)
            except HoldRefused as error:
                refused += error.code == "hold_full"
            else:
                places.enter_context(place)
        held = 10_000 - refused
        assert held == total // 2 // (OVERHEAD_BYTES + 100)
        assert hold._budget.held_bytes == held * (OVERHEAD_BYTES + 100)
        assert marks.wanted == [(SLEEPER.uid, 1, Tier.STANDARD)]
    assert (hold._budget.held_bytes, hold._lines["team/chat"].waiters) == (0, {})
    while hold._lines:
        assert not task.done()
        await asyncio.sleep(0)
    task.cancel()


@pytest.mark.parametrize(
    ("state", "starts", "age_s", "expected"),
    [
        ("Asleep", (), 0, 30),
        ("Waking", (), 50, 30),
        ("Asleep", (20, 30, 40), 15, 40),
        ("GoingToSleep", (20, 30, 40), 15, 40),
        ("Waking", (20, 30, 40), 15, 25),
        ("Waking", (20, 30, 40), 14.5, 26),
        ("Waking", (20, 30, 40), 300, 1),
        ("Swapping", (20, 30, 40), 15, 25),
        ("Asleep", (400,), 0, 60),
    ],
)
def test_a_client_comes_back_when_most_starts_have_ended(
    state: str, starts: tuple[int, ...], age_s: float, expected: int
) -> None:
    assert retry_after_s(asleep(state=state, starts=starts), age_s) == expected


def test_a_client_of_an_awake_service_comes_back_soon() -> None:
    assert retry_after_s(None, 5) == 1


def test_a_state_has_the_age_since_it_was_first_seen() -> None:
    seen = SeenStates()
    assert seen.age_s(SLEEPER, 10) == 0
    assert seen.age_s(SLEEPER, 13) == 3
    waking = service(sleep=asleep(state="Waking"))
    assert seen.age_s(waking, 14) == 0
    assert seen.age_s(service(sleep=asleep(2, "Waking")), 15) == 0
    assert seen.age_s(service(sleep=asleep(2, "Waking")), 18) == 3
    assert seen.age_s(service(), 19) == 0
    assert seen.age_s(service(sleep=asleep(2, "Waking")), 20) == 0


def test_states_of_many_services_take_bounded_memory() -> None:
    seen = SeenStates()
    for number in range(10_000):
        seen.age_s(service(f"s{number}", sleep=asleep()), number)
    assert len(seen._first) == 4096
    assert seen.age_s(service("s9999", sleep=asleep()), 10_000) == 1


@pytest.mark.parametrize("value", ["", "fleetkeeper/fleetkeeper-wake-marks", "a/b.c"])
def test_the_object_of_the_marks_is_named_by_namespace_and_name(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("FLEETKEEPER_GATEWAY_WAKE_MARKS", value)
    settings = HoldSettings()
    assert settings.wake_marks == value
    assert (settings.hold_seconds, settings.hold_bytes) == (55, 64 * 1024**2)


@pytest.mark.parametrize("value", ["name", "a/b/c", "A/b", "/b", "a/", " "])
def test_another_name_of_the_marks_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("FLEETKEEPER_GATEWAY_WAKE_MARKS", value)
    with pytest.raises(ValueError, match="wake_marks"):
        HoldSettings()
