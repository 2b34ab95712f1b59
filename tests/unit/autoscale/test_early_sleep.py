"""Idle services sleep early for one that wakes and finds no accelerator: which, for whom, and who gets them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.autoscale.arbitrate import Allocation, Lack, Want, arbitrate
from fleetkeeper.autoscale.rules.idle import EarlySleep
from fleetkeeper.common.budget import Budget, Holding
from fleetkeeper.common.nodes import NodeNeeds
from fleetkeeper_contract.tiers import Tier

WAKES = Want("a", "wakes", 1, 0, lacks=Lack.CONFIRMED, waits_since=50.0)
BUSY = Want("a", "busy", 1, 1)
FOR = "a/wakes"
SERVICES = 1000


def idle(name: str, cost: float = 1.0, replicas: int = 1, **early: Any) -> Want:
    """Return a service that is awake and has had no request for a while. Its replicas run on one node."""
    known = EarlySleep(cost, **{"nodes": ("node-1",) * replicas} | early)
    return Want("a", name, replicas, replicas, early_sleep=known)


def granted(
    *wants: Want, gpus: int = 2, budget: Budget | None = None, leaving: int = 0
) -> dict[str, Allocation]:
    held = {want.key: Holding(want.gpus) for want in wants}
    if leaving:
        held["a", "ends"] = Holding(0, leaving)
    rows = arbitrate(wants, budget or Budget(gpus), held)
    return {name: row for (_, name), row in rows.items()}


def asked(*wants: Want, **setting: Any) -> dict[str, str]:
    """Return which services are asked to sleep, and for whom."""
    rows = granted(*wants, **setting)
    return {name: row.sleeps_for for name, row in rows.items() if row.sleeps_for}


# -- who is asked -----------------------------------------------------------------------------------


def test_the_idle_service_whose_sleep_costs_least_is_asked() -> None:
    assert asked(WAKES, idle("dear", 2.5), idle("cheap", 0.25)) == {"cheap": FOR}
    assert asked(WAKES, idle("one"), BUSY) == {"one": FOR}
    assert asked(WAKES, BUSY, gpus=1) == {}
    assert asked(WAKES, idle("one"), gpus=3) == {}, "there is room"
    assert asked(WAKES, idle("one"), budget=Budget()) == {}


def test_a_replica_that_is_kept_for_a_surge_goes_first() -> None:
    keeps = Want("a", "keeps", 1, 1, kept=1)
    rows = granted(WAKES, idle("one"), keeps)
    assert rows["keeps"].releases
    assert not rows["one"].sleeps_for


def test_a_service_that_was_asked_is_asked_again_although_another_became_cheaper() -> None:
    """Else both could go before the status of the first shows it."""
    assert asked(WAKES, idle("first", 2.5, is_asked=True), idle("cheap", 0.25)) == {"first": FOR}


def test_only_pods_that_were_read_directly_prove_that_a_service_is_idle() -> None:
    """All that might sleep are read: one that cannot be read must not stop the others."""
    rows = granted(WAKES, idle("unread", 0.25, is_read=False), idle("read", 2.5))
    assert rows["unread"].confirms
    assert rows["read"].sleeps_for == FOR
    assert asked(WAKES, idle("unread", is_read=False), gpus=1) == {}


def test_a_short_wait_only_lets_pods_be_read() -> None:
    rows = granted(replace(WAKES, lacks=Lack.LONG), idle("one"), gpus=1)
    assert rows["one"] == Allocation(1, confirms=True)
    rows = granted(replace(WAKES, lacks=Lack.NOTHING), idle("one"), gpus=1)
    assert rows["one"] == Allocation(1)


def test_no_service_sleeps_for_growth_or_for_the_first_start_of_another() -> None:
    grows = Want("a", "grows", 4, 1, lacks=Lack.CONFIRMED, breach=9.0)
    assert asked(grows, idle("one")) == {}
    new = Want("a", "new", 1, 0, lacks=Lack.CONFIRMED)
    assert asked(new, idle("one"), gpus=1) == {}
    second = replace(WAKES, replicas=2, supplied=1, min_replicas=2)
    assert asked(second, idle("one")) == {}, "one replica runs or starts"


@pytest.mark.parametrize("of", Tier)
@pytest.mark.parametrize("wakes", Tier)
@pytest.mark.parametrize("was_awake", [True, False])
def test_a_more_urgent_tier_is_enough_and_an_equal_one_waits_for_min_awake_seconds(
    of: Tier, wakes: Tier, was_awake: bool
) -> None:
    found = asked(replace(WAKES, tier=wakes), idle("one", tier=of, was_awake=was_awake), gpus=1)
    assert bool(found) == (wakes < of or (wakes == of and was_awake))


# -- how many ---------------------------------------------------------------------------------------


def test_the_fewest_services_that_make_room_are_asked() -> None:
    large = replace(WAKES, gpus_per_replica=4)
    four = [idle(f"s{number}", 0.1 * number) for number in range(4)]
    big = replace(idle("big", 9.0), gpus_per_replica=4)
    assert asked(large, *four, big, gpus=8) == {"big": FOR}
    assert asked(large, *four, gpus=4) == {f"s{number}": FOR for number in range(4)}
    assert asked(large, *four, gpus=6) == {"s0": FOR, "s1": FOR}, "two are free"
    assert asked(large, *four, gpus=5, leaving=1) == {f"s{n}": FOR for n in range(3)}
    assert asked(large, *four[:3], BUSY, gpus=4) == {}, "all together are too few"
    assert asked(WAKES, idle("two", replicas=2), gpus=2) == {"two": FOR}


def test_no_service_sleeps_in_vain_after_the_budget_was_lowered() -> None:
    """What is in use beyond the budget must leave before there is room."""
    assert asked(WAKES, idle("one"), BUSY, gpus=1) == {}
    assert asked(WAKES, idle("one"), idle("two"), gpus=1) == {"one": FOR, "two": FOR}
    assert asked(WAKES, idle("one"), gpus=1, leaving=1) == {"one": FOR}
    assert asked(WAKES, idle("one"), BUSY, gpus=1, leaving=1) == {}
    keeps = Want("a", "keeps", 1, 1, kept=1)
    assert not granted(WAKES, BUSY, keeps, gpus=1)["keeps"].releases


def test_all_accelerators_of_a_replica_become_free_on_one_node() -> None:
    large = replace(WAKES, gpus_per_replica=2)
    spread = [idle(f"s{number}", number, nodes=(f"node-{number}",)) for number in range(1, 4)]
    pair = idle("pair", 9.0, nodes=("node-3",))
    assert asked(large, *spread, gpus=3) == {}, "each would leave one on a node of its own"
    assert asked(large, *spread, pair, gpus=4) == {"s3": FOR, "pair": FOR}
    both = idle("both", 9.0, replicas=2, nodes=("node-4", "node-5"))
    assert asked(large, both, gpus=2) == {}
    assert asked(large, replace(both, gpus_per_replica=2), gpus=4) == {"both": FOR}
    assert asked(WAKES, *spread, gpus=3) == {"s1": FOR}


def test_a_service_that_was_asked_stays_the_one_whatever_others_cost() -> None:
    asked_before = idle("asked", 2.5, nodes=("node-1",), is_asked=True)
    assert asked(WAKES, asked_before, idle("cheap", 0.1, nodes=("node-2",))) == {"asked": FOR}


def test_many_nodes_cost_no_more_than_many_services() -> None:
    """A search through all services for each node took 290 times as long on 1,000 nodes as on one."""

    def shortest_s(nodes: int) -> float:
        fleet = [idle(f"s{n}", n, nodes=(f"node-{n % nodes}",)) for n in range(SERVICES)]
        spent = []
        for _ in range(3):
            began = time.process_time()
            assert asked(WAKES, *fleet, gpus=SERVICES) == {"s0": FOR}
            spent.append(time.process_time() - began)
        return min(spent)

    assert shortest_s(SERVICES) < 30 * shortest_s(1)


def needs(
    *labels: str, devices: str = "nvidia.com/gpu", affinity: str = "", taints: str = ""
) -> NodeNeeds:
    """Return what a service needs of a node. Labels have no values, and lists have spaces."""
    return NodeNeeds(
        frozenset(devices.split()),
        frozenset((label, "") for label in labels),
        affinity,
        frozenset(taints.split()),
    )


@pytest.mark.parametrize(
    ("wakes", "sleeps", "is_asked"),
    [
        (needs(), needs("l40s"), True),
        (needs("h100"), needs("l40s"), False),
        (needs("h100"), needs("h100", "zone-a"), True),
        (needs("h100"), needs(), False),
        (needs(taints="spot"), needs(), True),
        (needs(), needs(taints="spot"), False),
        (needs(affinity="zone a"), needs(affinity="zone a"), True),
        (needs(affinity="zone a"), needs(), False),
        (needs(), needs(affinity="zone a"), True),
        (needs(devices="amd.com/gpu"), needs(), False),
        (needs(devices="nvidia.com/gpu rdma/hca"), needs(), False),
        (needs(), needs(devices="nvidia.com/gpu rdma/hca"), True),
    ],
)
def test_only_services_sleep_whose_nodes_suit_the_one_that_wakes(
    wakes: NodeNeeds, sleeps: NodeNeeds, is_asked: bool
) -> None:
    one = replace(idle("one"), node_needs=sleeps)
    assert bool(asked(replace(WAKES, node_needs=wakes), one, gpus=1)) == is_asked


def test_nobody_is_asked_while_enough_accelerators_become_free() -> None:
    assert asked(WAKES, idle("one"), gpus=2, leaving=1) == {}
    going = replace(idle("going"), early_sleep=None, goes_to_sleep=True)
    assert asked(WAKES, idle("one"), going) == {}
    asleep = replace(going, goes_to_sleep=False, replicas=0)
    assert asked(WAKES, idle("one"), asleep) == {}


def test_what_becomes_free_for_one_wake_is_not_counted_for_the_next() -> None:
    """One service is asked a tick: the first that needs it."""
    going = replace(idle("going"), early_sleep=None, goes_to_sleep=True)
    later = replace(WAKES, name="later", waits_since=60.0)
    assert asked(later, WAKES, idle("one"), going) == {"one": "a/later"}
    assert asked(later, WAKES, idle("one"), idle("two", 2.5)) == {"one": FOR}


def test_a_wake_comes_before_growth() -> None:
    grows = Want("a", "grows", 4, 1, lacks=Lack.LONG, breach=9.0, tier=Tier.REALTIME)
    keeps = Want("a", "keeps", 2, 2, kept=1)
    rows = granted(grows, WAKES, keeps, gpus=3)
    assert rows["keeps"].releases, "the wake is sure of its need, the other is not yet"


# -- within which budget ----------------------------------------------------------------------------


def test_the_budget_of_a_namespace_is_relieved_within_it() -> None:
    other = [replace(idle(f"o{number}"), namespace="b") for number in range(3)]
    within = idle("within", 9.0)
    budget = Budget(9, {"a": 1})
    assert asked(WAKES, *other, within, budget=budget) == {"within": FOR}
    assert asked(replace(WAKES, gpus_per_replica=2), *other, within, budget=budget) == {}


def test_another_namespace_gives_only_if_it_holds_more_than_the_one_that_wakes_would() -> None:
    other = [replace(idle(f"o{number}"), namespace="b") for number in range(2)]
    assert asked(WAKES, *other, gpus=2) == {"o0": FOR}
    assert asked(WAKES, other[0], gpus=1) == {}, "they would take turns"
    assert asked(WAKES, *other, BUSY, gpus=3) == {}


# -- who gets them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rival", ["victim", "wakes later", "grows", "grows more urgently", "new"])
def test_the_service_that_waits_gets_what_was_freed(rival: str) -> None:
    """From what the status has, as a new leader decides. A rollout gets no more than its surge."""
    rivals = {
        "victim": replace(WAKES, name="victim", waits_since=80.0),
        "wakes later": replace(WAKES, name="0", waits_since=50.5),
        "grows": Want("a", "grows", 4, 1, breach=9.0),
        "grows more urgently": Want("a", "grows", 4, 1, breach=9.0, tier=Tier.REALTIME),
        "new": Want("a", "0", 1, 0, is_first_start=True, tier=Tier.REALTIME),
    }
    held = rivals[rival].gpus
    rows = granted(replace(WAKES, lacks=Lack.LONG), rivals[rival], gpus=held + 1)
    assert rows["wakes"].replicas == 1
    assert sum(row.replicas for row in rows.values()) == held + 1


def test_two_services_in_turns_do_not_displace_each_other_within_min_awake_seconds() -> None:
    """Each is asked as soon as it is idle for half a minute; between two changes are five minutes."""
    awake, waits, since, changes = "x", "y", 0.0, []
    for now in map(float, range(0, 3600, 5)):
        runs = idle(awake, 1.0, was_awake=now - since >= 300.0)
        if now - since < 30.0:
            runs = replace(runs, early_sleep=None)
        if asked(replace(WAKES, name=waits, waits_since=since), runs, gpus=1):
            changes.append(now)
            awake, waits, since = waits, awake, now
    assert changes == [300.0 * number for number in range(1, 12)]


def _on_its_nodes(want: Want) -> Want:
    """Return the service with a node for each of its replicas."""
    known = want.early_sleep
    if known is None:
        return want
    return replace(want, early_sleep=replace(known, nodes=known.nodes[: want.supplied]))


early = st.builds(
    EarlySleep,
    st.floats(0.0, 9.0),
    st.sampled_from(Tier),
    is_read=st.booleans(),
    was_awake=st.booleans(),
    is_asked=st.booleans(),
    nodes=st.lists(st.sampled_from(["x", "y"]), min_size=3, max_size=3).map(tuple),
)
services = st.builds(
    Want,
    st.sampled_from(["a", "b"]),
    st.uuids().map(str),
    st.integers(0, 3),
    st.integers(0, 3),
    gpus_per_replica=st.integers(0, 4),
    tier=st.sampled_from(Tier),
    lacks=st.sampled_from(Lack),
    kept=st.sampled_from([0, 0, 1]),
    waits_since=st.sampled_from([1.0, 2.0, float("inf")]),
    early_sleep=st.none() | early,
    goes_to_sleep=st.booleans(),
    node_needs=st.sampled_from([needs(), needs("h100")]),
).map(_on_its_nodes)


@given(st.lists(services, max_size=8), st.integers(0, 24), st.randoms())
def test_whatever_they_want_those_asked_make_room_for_one_wake(
    fleet: list[Want], gpus: int, random: Any
) -> None:
    rows = arbitrate(fleet, Budget(gpus))
    by_name = {f"{want.namespace}/{want.name}": want for want in fleet}
    chosen = [want for want in fleet if rows[want.key].sleeps_for]
    assert len({rows[want.key].sleeps_for for want in chosen}) <= 1
    for want in chosen:
        gains = by_name[rows[want.key].sleeps_for]
        assert gains.wakes
        assert gains.lacks is Lack.CONFIRMED
        assert rows[gains.key].replicas == 0
        assert want.early_sleep is not None
        assert want.early_sleep.is_read
        assert want.early_sleep.yields_to(gains.tier)
        assert gains.node_needs.are_met_by_nodes_of(want.node_needs)
        free = gpus - sum(each.gpus for each in fleet if each not in chosen)
        assert free >= gains.gpus_per_replica or any(each.gpus_to_leave for each in fleet)
    random.shuffle(fleet)
    assert arbitrate(fleet, Budget(gpus)) == rows
