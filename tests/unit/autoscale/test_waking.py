"""The replicas of a service that wakes: a minimum with the tier of the requests that wait for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.autoscale.arbitrate import Lack, Want, arbitrate
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.common.budget import Budget
from fleetkeeper_contract.tiers import Tier
from tests.support.autoscale.control_cases import Loop

BUSY = Want("a", "busy", 4, 3, tier=Tier.REALTIME, breach=9.0)
"""A neighbor with three replicas, far above its objective."""


def waking(tier: Tier | None, name: str = "waking", replicas: int = 1, since: float = 50.0) -> Want:
    """Return what the control loop recommends for a service without replicas that wakes for this tier."""
    wakes_since = None if tier is None else since
    settings = ControlSettings(min_replicas=replicas, waking_tier=tier, waking_since=wakes_since)
    loop = Loop(settings, replicas=0)
    decision = loop.tick(gpus_per_replica=1)
    assert decision.replicas.reason == "MinReplicas"
    return replace(decision.want, name=name)


def new(name: str, sleep_after_s: float | None = 900.0) -> Want:
    """Return what the control loop recommends for a service that never had a replica."""
    loop = Loop(ControlSettings(sleep_after_s=sleep_after_s), replicas=0)
    return replace(loop.tick(gpus_per_replica=1).want, name=name)


def granted(*wants: Want, gpus: int) -> dict[str, int]:
    return {name: row.replicas for (_, name), row in arbitrate(wants, Budget(gpus)).items()}


@pytest.mark.parametrize("tier", Tier)
def test_a_waking_service_gets_its_minimum_before_a_neighbor_grows(tier: Tier) -> None:
    """Also if only batch waits for it, and the requests of the neighbor wait for long."""
    assert granted(BUSY, waking(tier), gpus=4) == {"busy": 3, "waking": 1}
    assert granted(BUSY, waking(tier), gpus=5) == {"busy": 4, "waking": 1}


def test_of_two_waking_services_the_more_urgent_is_first() -> None:
    rows = [waking(Tier.BATCH, "a"), waking(Tier.REALTIME, "b"), waking(Tier.STANDARD, "c")]
    assert granted(*rows, gpus=1) == {"a": 0, "b": 1, "c": 0}
    assert granted(*rows, gpus=2) == {"a": 0, "b": 1, "c": 1}


def test_of_two_equal_wakes_the_one_that_waits_longer_is_first() -> None:
    """Otherwise a service late in the alphabet would wait as long as others wake."""
    rows = [waking(Tier.STANDARD, "a", since=60.0), waking(Tier.STANDARD, "b", since=20.0)]
    rows.append(waking(Tier.REALTIME, "c", since=90.0))
    assert granted(*rows, gpus=1) == {"a": 0, "b": 0, "c": 1}
    assert granted(*rows, gpus=2) == {"a": 0, "b": 1, "c": 1}


def test_the_tier_counts_among_minimums_that_are_not_met() -> None:
    """A service without traffic counts as standard."""
    new = waking(None, "new")
    assert granted(new, waking(Tier.REALTIME), gpus=1) == {"new": 0, "waking": 1}
    assert granted(new, waking(Tier.BATCH), gpus=1) == {"new": 1, "waking": 0}


def test_a_waking_service_takes_no_replica_that_runs() -> None:
    assert granted(BUSY, waking(Tier.REALTIME), gpus=3) == {"busy": 3, "waking": 0}


@pytest.mark.parametrize("tier", Tier)
def test_the_first_start_of_a_service_that_may_sleep_comes_after_every_wake(tier: Tier) -> None:
    """Requests wait for the other one. A service that never sleeps ranks as before."""
    assert granted(new("a"), waking(tier), gpus=1) == {"a": 0, "waking": 1}
    assert granted(new("a"), waking(tier), gpus=2) == {"a": 1, "waking": 1}
    assert granted(new("a"), new("b", sleep_after_s=None), gpus=1) == {"a": 0, "b": 1}
    assert granted(BUSY, new("a"), gpus=4) == {"busy": 3, "a": 1}, "a minimum, before growth"


@pytest.mark.parametrize(("sleep_after_s", "lacks"), [(900.0, Lack.NOTHING), (None, Lack.LONG)])
def test_no_service_gives_up_a_replica_for_a_first_start(
    sleep_after_s: float | None, lacks: Lack
) -> None:
    """However long it waits. A service that never sleeps gets one that a neighbor keeps for a surge."""
    loop = Loop(ControlSettings(sleep_after_s=sleep_after_s), replicas=0)
    loop.memory = replace(loop.memory, lacks_since=loop.now - 7200.0)
    assert loop.tick(gpus_per_replica=1).want.lacks is lacks
