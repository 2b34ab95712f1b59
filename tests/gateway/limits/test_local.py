"""What limits in memory cost and forget."""

from __future__ import annotations

from fleetkeeper_gateway.interfaces import TierLimits
from fleetkeeper_gateway.limits.local import LocalLimits, Running


def test_idle_keys_are_forgotten_and_those_in_use_are_not() -> None:
    now, running = 1_000_000, Running()
    local = LocalLimits(running, 60_000, clock=lambda: now)
    limits = TierLimits(requests_per_minute=10, tokens_per_minute=100, concurrency=2)
    for number in range(100):
        local.admit((f"key-{number}", "standard"), "request", limits, 50)
        if number:
            local.release((f"key-{number}", "standard"), "request", sent=True)
    local.prune()
    assert len(local) == 100
    now += 121_000
    local.prune()
    assert len(local) == 1  # its request still runs
    local.release(("key-0", "standard"), "request", sent=True)
    local.prune()
    assert len(local) == 0


def test_a_settled_request_is_charged_what_it_used() -> None:
    local = LocalLimits(Running(), 60_000, clock=lambda: 0)
    place, limits = ("key", "standard"), TierLimits(tokens_per_minute=100)
    local.admit(place, "one", limits, 60)
    local.settle(place, "one", 150)
    assert local.admit(place, "two", limits, 1).level == -50
    local.settle(place, "one", 150)  # unknown by now
    local.release(place, "one", sent=False)
    assert local.admit(place, "two", limits, 1).level == -50


def test_running_requests_are_counted_by_key_and_tier() -> None:
    running = Running()
    running.add(("a", "standard"), "one")
    running.add(("a", "standard"), "one")
    running.add(("a", "batch"), "two")
    running.remove(("b", "standard"), "three")
    assert running.count(("a", "standard")) == 1
    assert dict(running.all()) == {("a", "standard"): ["one"], ("a", "batch"): ["two"]}
    running.remove(("a", "standard"), "one")
    assert dict(running.all()) == {("a", "batch"): ["two"]}
