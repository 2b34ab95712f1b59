"""A replica that is kept for the next surge yields to a service that a budget limits; one that is needed does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.autoscale.arbitrate import Lack, Want, arbitrate
from fleetkeeper.autoscale.rules.scale_down import RELEASED
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.common.budget import Budget, Holding
from fleetkeeper.simulate.autoscalers import ControlLoop, always
from fleetkeeper.simulate.closed_loop import EPOCH_S, Scenario, run_together
from fleetkeeper.simulate.cluster import ColdStart
from fleetkeeper.simulate.loads.arrivals import Mix, poisson
from fleetkeeper.simulate.outcome import Outcome
from fleetkeeper_contract.tiers import Tier

FULL = Budget(8)
LACKS = Want("a", "lacks", 4, 2, lacks=Lack.CONFIRMED)
KEEPS = Want("b", "keeps", 6, 6, kept=3)


def asked(*wants: Want, budget: Budget = FULL, leaving: int = 0) -> tuple[list[str], list[str]]:
    """Return which services should release a replica, and which should be read directly for that."""
    held = {want.key: Holding(want.supplied * want.gpus_per_replica) for want in wants}
    if leaving:
        held["c", "ends"] = Holding(0, leaving)
    granted = arbitrate(wants, budget, held)
    return (
        [name for (_, name), one in granted.items() if one.releases],
        [name for (_, name), one in granted.items() if one.confirms],
    )


def test_the_service_with_the_most_kept_accelerators_is_asked() -> None:
    more = Want("b", "more", 1, 1, kept=1, gpus_per_replica=4)
    assert asked(LACKS, replace(KEEPS, replicas=2, supplied=2), more) == (["more"], ["lacks"])
    assert asked(LACKS, KEEPS) == (["keeps"], ["lacks"])


@pytest.mark.parametrize(
    ("lacks", "expected"),
    [
        (Lack.CONFIRMED, (["keeps"], ["lacks"])),
        (Lack.LONG, ([], ["lacks"])),
        (Lack.NOTHING, ([], [])),
    ],
)
def test_the_lack_is_long_and_confirmed_first(
    lacks: Lack, expected: tuple[list[str], list[str]]
) -> None:
    assert asked(replace(LACKS, lacks=lacks), KEEPS) == expected


def test_nothing_is_asked_where_no_replica_is_only_kept_or_no_budget_limits() -> None:
    assert asked(LACKS, replace(KEEPS, kept=0)) == ([], [])
    assert asked(LACKS, KEEPS, budget=Budget(10)) == ([], [])
    assert asked(LACKS, KEEPS, budget=Budget()) == ([], [])


def test_what_becomes_free_soon_is_not_asked_for_again() -> None:
    expected = (["keeps"], ["lacks"])
    assert asked(LACKS, KEEPS, budget=Budget(9), leaving=1) == expected, "two are lacking"
    assert asked(LACKS, KEEPS, budget=Budget(10), leaving=2) == ([], [])
    assert asked(LACKS, KEEPS, leaving=2) == expected, "what leaves is beyond the budget"
    releasing = replace(KEEPS, replicas=5)
    other = Want("b", "other", 1, 1, kept=1)
    assert asked(replace(LACKS, replicas=3), releasing, other, budget=Budget(9)) == ([], [])


def test_nothing_is_asked_that_makes_no_room_for_a_replica() -> None:
    """Of four accelerators, three could become free: the reserve would be gone, and no replica would start."""
    large = Want("a", "large", 2, 1, gpus_per_replica=4, lacks=Lack.CONFIRMED)
    assert asked(large, KEEPS, budget=Budget(10)) == ([], [])
    expected = (["keeps"], ["large"])
    assert asked(large, replace(KEEPS, kept=4), budget=Budget(10)) == expected
    assert asked(large, KEEPS, budget=Budget(11)) == expected, "one is free"
    assert asked(large, KEEPS, budget=Budget(11), leaving=1) == expected, "one is becoming free"
    smaller = replace(LACKS, replicas=3, breach=0.0)
    assert asked(replace(large, breach=9.0), smaller, KEEPS, budget=Budget(12)) == (
        ["keeps"],
        ["lacks"],
    )


def test_the_budget_of_a_namespace_is_relieved_within_it() -> None:
    budget = Budget(None, {"a": 2})
    assert asked(LACKS, KEEPS, budget=budget) == ([], [])
    within = replace(KEEPS, namespace="a", replicas=1, supplied=1, kept=1)
    budget = Budget(None, {"a": 3})
    assert asked(LACKS, KEEPS, within, budget=budget) == (["keeps"], ["lacks"])
    assert asked(LACKS, within, budget=budget) == (["keeps"], ["lacks"])


def test_who_released_a_replica_does_not_take_it_back_at_once() -> None:
    """However urgent it is: else two services could take turns without end."""
    again = Want("a", "again", 4, 3, tier=Tier.REALTIME, breach=9.0, has_released=True)
    granted = arbitrate([again, replace(LACKS, replicas=3)], Budget(6))
    assert granted["a", "lacks"].replicas == 3
    assert granted["a", "again"].replicas == 3


wants = st.builds(
    Want,
    st.sampled_from(["a", "b"]),
    st.uuids().map(str),
    st.integers(0, 6),
    st.integers(0, 6),
    gpus_per_replica=st.integers(0, 4),
    lacks=st.sampled_from(Lack),
    kept=st.integers(0, 3),
    has_released=st.booleans(),
)


@given(st.lists(wants, max_size=8), st.integers(0, 40), st.randoms())
def test_at_most_one_is_asked_and_it_keeps_one(
    fleet: list[Want], gpus: int, random: object
) -> None:
    granted = arbitrate(fleet, Budget(gpus))
    asking = [want for want in fleet if granted[want.key].releases]
    assert len(asking) <= 1
    assert all(want.kept > 0 for want in asking)
    if asking:
        assert any(want.lacks is Lack.CONFIRMED and granted[want.key].limited_by for want in fleet)
    shuffled = list(fleet)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert arbitrate(shuffled, Budget(gpus)) == granted


# -- two services in a closed loop ----------------------------------------------------------------

HIGH, LOW = 60.0, 4.0
SETTINGS = ControlSettings(max_replicas=8, scale_down_delay_s=300.0)


def in_turns(metrics: Callable[[float], bool] = always) -> list[tuple[Outcome, ControlLoop]]:
    """Play two services, the first busy for 10 minutes and the second from then on, under a budget of 4."""

    def scenario(number: int) -> Scenario:
        def rate(now: float) -> float:
            return HIGH if (now < 600.0) == (number == 0) else LOW

        def loop() -> ControlLoop:
            return ControlLoop(
                SETTINGS,
                key=("default", f"service-{number}"),
                metrics=lambda now: metrics(now - EPOCH_S),
            )

        return Scenario(
            1500.0,
            poisson(rate, HIGH, Mix(1000.0, 200.0)),
            loop,
            cold_start=ColdStart(60.0),
            seed=number + 1,
        )

    found = []
    for outcome, loop in run_together([scenario(0), scenario(1)], Budget(4)):
        assert isinstance(loop, ControlLoop)
        found.append((outcome, loop))
    return found


def replicas_at(outcome: Outcome, seconds: float) -> int:
    return next(tick.replicas for tick in outcome.ticks if tick.time >= seconds)


@pytest.mark.slow
def test_the_reserve_of_one_becomes_the_capacity_of_the_other() -> None:
    """The reserve would be kept for four delays after the order, 20 minutes."""
    (first, keeps), (second, _) = in_turns()
    assert replicas_at(first, 600.0) == 3
    assert replicas_at(second, 600.0) == 1
    released = [now - EPOCH_S for now, each in keeps.decided if each.reason == RELEASED]
    assert len(released) == 2, keeps.decided
    assert 600.0 + SETTINGS.scale_down_delay_s < released[0] < released[-1] < 1200.0
    assert all(later - earlier >= 60.0 for earlier, later in pairwise(released))
    assert replicas_at(second, 1200.0) == 3
    assert replicas_at(first, 1200.0) == 1


@pytest.mark.slow
def test_without_prometheus_no_reserve_yields() -> None:
    (first, keeps), _ = in_turns(metrics=lambda now: now < 600.0)
    assert RELEASED not in {each.reason for _, each in keeps.decided}
    assert replicas_at(first, 1495.0) == 3
