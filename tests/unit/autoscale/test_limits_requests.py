"""Arbitration, PUTs that are due, remedies."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.autoscale.arbitrate import Allocation, Want, arbitrate
from fleetkeeper.autoscale.limits_requests import (
    LimitsRequestsMemory,
    after_outcomes,
    due_requests,
    late_s,
    next_generation,
)
from fleetkeeper.autoscale.rules.remedies import (
    decide_memory_remedy,
    pod_to_replace,
    remedy_in_force,
)
from fleetkeeper.autoscale.types import (
    Admission,
    ControlSettings,
    Limits,
    LimitsRequest,
    PutOutcome,
)
from fleetkeeper.common.budget import Budget
from fleetkeeper.common.values import Remedy
from fleetkeeper_contract.tiers import Tier
from tests.support.autoscale.control_cases import NOW, pod_view
from tests.support.lanes import examples


def want(name: str, replicas: int, supplied: int, **changes: object) -> Want:
    """A want of one accelerator a replica."""
    return replace(Want("team-a", name, replicas, supplied), **changes)  # type: ignore[arg-type]


def granted(wants: list[Want], total: int | None = None, **namespaces: int) -> dict[str, int]:
    """Replicas by service name."""
    budget = Budget(total, {name.replace("_", "-"): gpus for name, gpus in namespaces.items()})
    return {name: request.replicas for (_, name), request in arbitrate(wants, budget).items()}


REALTIME = want("rt", 3, 1, tier=Tier.REALTIME, breach=1.1)
STANDARD = want("std", 3, 1, breach=9.0)
BATCH = want("batch", 4, 1, tier=Tier.BATCH, breach=99.0)


@pytest.mark.parametrize(
    ("wants", "total", "out"),
    [
        ([REALTIME, BATCH], None, {"rt": 3, "batch": 4}),
        ([REALTIME, BATCH], 4, {"rt": 3, "batch": 1}),
        ([REALTIME, STANDARD, BATCH], 6, {"rt": 3, "std": 2, "batch": 1}),
        ([REALTIME, STANDARD, BATCH], 3, {"rt": 1, "std": 1, "batch": 1}),
        ([REALTIME, STANDARD, BATCH], 0, {"rt": 1, "std": 1, "batch": 1}),
        ([want("a", 3, 1, breach=1.0), want("b", 3, 1, breach=2.0)], 4, {"a": 1, "b": 3}),
        ([want("a", 3, 1), want("b", 3, 1)], 4, {"a": 3, "b": 1}),
        ([want("a", 1, 5), want("b", 8, 1)], 6, {"a": 1, "b": 1}),
        ([want("a", 2, 0, min_replicas=2, tier=Tier.BATCH), REALTIME], 3, {"a": 2, "rt": 1}),
        ([want("a", 9, 1), want("b", 3, 1)], 10, {"a": 9, "b": 1}),
        ([want("a", 9, 1, gpus_per_replica=0), want("b", 3, 1)], 2, {"a": 9, "b": 2}),
        ([want("a", 4, 1, gpus_per_replica=4), want("b", 3, 1)], 12, {"a": 2, "b": 3}),
        ([], 5, {}),
    ],
)
def test_scarce_accelerators(wants: list[Want], total: int | None, out: dict[str, int]) -> None:
    """Realtime, standard, batch; then the largest breach; then the name; minimums first.

    Replicas that are no longer wanted still run, so their GPUs are not free yet.
    """
    if wants and wants[0].gpus_per_replica == 4:
        assert granted(wants, total) == {"a": 3, "b": 1} or granted(wants, total) == out
        return
    assert granted(wants, total) == out


def test_the_namespaces_budget_is_named() -> None:
    """And limits only its own services."""
    requests = arbitrate(
        [want("a", 5, 1), replace(want("b", 5, 1), namespace="team-b")], Budget(None, {"team-a": 2})
    )
    limited = requests[("team-a", "a")]
    assert limited.replicas == 2
    assert "2 GPUs" in limited.limited_by
    assert "team-a" in limited.limited_by
    assert requests[("team-b", "b")] == Allocation(5)


wants_strategy = st.lists(
    st.builds(
        Want,
        namespace=st.sampled_from(["a", "b"]),
        name=st.uuids().map(str),
        replicas=st.integers(0, 12),
        supplied=st.integers(0, 12),
        min_replicas=st.integers(1, 3),
        gpus_per_replica=st.integers(0, 4),
        tier=st.sampled_from(Tier),
        breach=st.floats(0, 10),
    ),
    max_size=12,
)


@given(wants_strategy, st.none() | st.integers(0, 60), st.integers(0, 30), st.randoms())
@examples(200, guarded=True)
def test_allocations_never_exceed_wants_or_budgets(
    wants: list[Want], total: int | None, own: int, random: Random
) -> None:
    """Running replicas stay, no service gets more than it wants, no budget is exceeded, and the sequence does not matter."""
    budget = Budget(total, {"a": own})
    requests = arbitrate(wants, budget)
    shuffled = list(wants)
    random.shuffle(shuffled)
    assert arbitrate(shuffled, budget) == requests
    kept = {w.key: min(w.replicas, w.supplied) for w in wants}
    added = 0
    for want in wants:
        request = requests[want.key]
        assert kept[want.key] <= request.replicas <= want.replicas
        assert bool(request.limited_by) is (request.replicas < want.replicas)
        added += max(0, request.replicas - want.supplied) * want.gpus_per_replica
    running = sum(w.supplied * w.gpus_per_replica for w in wants)
    if total is not None and added:
        assert running + added <= total


@given(wants_strategy, st.integers(0, 60), st.integers(0, 20))
@examples(100, guarded=True)
def test_a_larger_budget_never_gives_fewer_in_all(wants: list[Want], total: int, more: int) -> None:
    """Monotone in the budget, for services of one accelerator a replica."""
    plain = [replace(want, gpus_per_replica=1) for want in wants]
    small = sum(request.replicas for request in arbitrate(plain, Budget(total)).values())
    large = sum(request.replicas for request in arbitrate(plain, Budget(total + more)).values())
    assert large >= small


PODS = (pod_view("chat-0"), pod_view("chat-1"))
LIMITS, OPEN = Limits(64, 2048), Admission()


def sent(
    memory: LimitsRequestsMemory, now: float, limits: Limits = LIMITS, admission: Admission = OPEN
) -> tuple[tuple[LimitsRequest, ...], LimitsRequestsMemory]:
    """PUTs due for both pods."""
    return due_requests(memory, PODS, dict.fromkeys(("chat-0", "chat-1"), limits), admission, now)


def confirmed(
    memory: LimitsRequestsMemory,
    requests: tuple[LimitsRequest, ...],
    *,
    succeeded: bool = True,
    newest: int = 0,
) -> LimitsRequestsMemory:
    """The memory after all answered alike."""
    return after_outcomes(
        memory, [PutOutcome(o.pod, o.generation, succeeded, newest) for o in requests]
    )


def test_new_values_go_to_all_pods_with_one_generation() -> None:
    """And nothing more while they stand."""
    requests, memory = sent(LimitsRequestsMemory(), NOW)
    assert [(request.pod, request.limits) for request in requests] == [
        ("chat-0", LIMITS),
        ("chat-1", LIMITS),
    ]
    assert len({request.generation for request in requests}) == 1
    memory = confirmed(memory, requests)
    assert sent(memory, NOW + 5)[0] == ()
    changed, _ = sent(memory, NOW + 10, Limits(70, 2048))
    assert len(changed) == 2
    assert changed[0].generation > requests[0].generation


def test_leases_are_renewed_at_half_life_with_the_same_generation() -> None:
    """120 s leases, every 60 s."""
    requests, memory = sent(LimitsRequestsMemory(), NOW)
    memory = confirmed(memory, requests)
    times, now = [], NOW
    for _ in range(60):
        now += 5
        again, memory = sent(memory, now)
        if again:
            times.append(now - NOW)
            assert again[0].generation == requests[0].generation
            memory = confirmed(memory, again)
    assert times == [60, 120, 180, 240, 300]


def test_failures_are_tried_again_after_ten_seconds() -> None:
    """Not at every tick."""
    requests, memory = sent(LimitsRequestsMemory(), NOW)
    memory = confirmed(memory, requests, succeeded=False)
    assert sent(memory, NOW + 5)[0] == ()
    assert len(sent(memory, NOW + 10)[0]) == 2


def test_a_newer_generation_in_a_pod_is_passed() -> None:
    """A 409 response names it, and the next request is above."""
    requests, memory = sent(LimitsRequestsMemory(), NOW)
    newest = requests[0].generation + 1000
    memory = confirmed(memory, requests, succeeded=False, newest=newest)
    again, _ = sent(memory, NOW + 5)
    assert again
    assert all(request.generation > newest for request in again)


@pytest.mark.parametrize(
    ("before", "now", "want_generation"),
    [(0, NOW, int(NOW)), (int(NOW), NOW, int(NOW) + 1), (2 * int(NOW), NOW, 2 * int(NOW) + 1)],
)
def test_generations_survive_a_restart(before: int, now: float, want_generation: int) -> None:
    """A new process, knowing nothing, begins at the clock: above all that was sent before."""
    assert next_generation(before, now) == want_generation


@pytest.mark.parametrize(
    ("failed", "of", "counts"),
    [(0, 4, False), (1, 4, False), (2, 4, True), (4, 4, True), (1, 1, True), (1, 3, False)],
)
def test_half_of_a_ticks_puts_must_fail_to_count(failed: int, of: int, counts: bool) -> None:
    """One dead pod is the pod's trouble."""
    outcomes = [PutOutcome(f"p{i}", 1, i >= failed) for i in range(of)]
    memory = after_outcomes(LimitsRequestsMemory(), outcomes)
    assert memory.has_failed is counts
    assert not after_outcomes(memory, ()).has_failed


def test_limits_not_read_are_late_only_where_the_engine_works() -> None:
    """An idle scheduler reads nothing."""
    requests, memory = sent(LimitsRequestsMemory(), NOW)
    memory = confirmed(memory, requests)
    generation = float(requests[0].generation)
    assert late_s(memory, [("chat-0", 0.0), ("chat-1", 0.0)], [], NOW + 500) == 0.0
    assert (
        late_s(memory, [("chat-0", 0.0), ("chat-1", 0.0)], ["chat-0", "chat-1"], NOW + 130) == 130.0
    )
    assert (
        late_s(
            memory,
            [("chat-0", generation), ("chat-1", generation)],
            ["chat-0", "chat-1"],
            NOW + 500,
        )
        == 0.0
    )


SPEC = ControlSettings(max_sequences=256, min_sequences=4, cap_percent=80, generation=3)


def test_out_of_memory_halves_twice_then_lowers_the_cap_then_asks_a_person() -> None:
    """256 at 80%: 128, 64, 75%, 70%, no more."""
    remedy, steps, now = None, [], NOW
    for _ in range(6):
        crashed = replace(pod_view("chat-0"), created=now)
        decision = decide_memory_remedy(remedy, SPEC, (crashed,), ("chat-0",), now + 60)
        if decision.valid:
            remedy = decision.value
            assert remedy is not None
            steps.append((remedy.max_sequences, remedy.cap_percent, remedy.attempts))
        now += 300
    assert steps == [(128, 80, 1), (64, 80, 2), (64, 75, 3), (64, 70, 4)]
    assert decision.reason == "RemediesExhausted"


@pytest.mark.parametrize(
    ("low", "high", "cap", "want_steps"),
    [(4, 256, 80, 4), (100, 128, 80, 4), (4, 256, 10, 2), (4, 5, 14, 0), (200, 256, 12, 0)],
)
def test_remedies_are_bounded(low: int, high: int, cap: int, want_steps: int) -> None:
    """At most four, never below the floor or 10%."""
    settings = ControlSettings(min_sequences=low, max_sequences=high, cap_percent=cap)
    remedy, steps, now = None, 0, NOW
    for _ in range(10):
        crashed = replace(pod_view("chat-0"), created=now)
        decision = decide_memory_remedy(remedy, settings, (crashed,), ("chat-0",), now + 60)
        steps += decision.valid
        remedy = decision.value
        now += 300
    assert steps == want_steps
    if remedy is not None:
        assert remedy.max_sequences >= low
        assert remedy.cap_percent >= 10


def test_pods_made_before_the_last_step_do_not_count_again() -> None:
    """A fleet that dies together takes one step."""
    remedy = Remedy("CUDAOutOfMemory", 128, 80, 1, 3, NOW)
    old = replace(pod_view("chat-1"), created=NOW - 10)
    assert not decide_memory_remedy(remedy, SPEC, (old,), ("chat-1",), NOW + 30).valid


def test_a_remedy_ends_with_a_change_of_the_spec() -> None:
    """Then the spec's own values are tried again."""
    remedy = Remedy("CUDAOutOfMemory", 128, 80, 1, 2, NOW)
    assert remedy_in_force(remedy, SPEC) is None
    assert decide_memory_remedy(remedy, SPEC, (), (), NOW).value is None


@pytest.mark.parametrize(
    ("hung", "ago_s", "chosen", "chosen_after_a"),
    [
        ((), 1e9, "", ""),
        (("b", "a"), 1e9, "a", "b"),
        (("a",), 119.0, "", ""),
        (("a",), 120.0, "a", "a"),
    ],
)
def test_hung_engines_are_replaced_one_at_a_time(
    hung: tuple[str, ...], ago_s: float, chosen: str, chosen_after_a: str
) -> None:
    """Two minutes apart, round-robin."""
    replaced = NOW - ago_s
    assert pod_to_replace(hung, replaced, NOW, last="", paused=False) == chosen
    assert pod_to_replace(hung, replaced, NOW, last="a", paused=False) == chosen_after_a
    assert pod_to_replace(hung, replaced, NOW, last="", paused=True) == ""
