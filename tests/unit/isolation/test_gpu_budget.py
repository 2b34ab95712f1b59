"""The GPU budget bounds what is created, whoever asks for it, and takes nothing that runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.autoscale.arbitrate import Want, arbitrate
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.common.activation import Activation, State
from fleetkeeper.common.budget import (
    Allowance,
    Budget,
    Holding,
    Usage,
    accelerators_of,
    bounded_replicas,
)
from fleetkeeper.common.values import ReplicaAllocation
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_contract.tiers import Tier
from tests.support.autoscale.control_cases import Loop
from tests.support.lanes import examples
from tests.support.reconcile.plan_cluster import settle
from tests.support.reconcile.plan_world import World, edited, new_world, plan_of, with_spec


@dataclass
class Running:
    """One service: its Deployment's number, pods beyond it, pods that end, and what it asks for."""

    namespace: str
    name: str
    desired: int
    extra: int
    ending: int
    gpus: int
    asked: int
    tier: Tier
    breach: float

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name

    @property
    def in_use(self) -> int:
        """What runs or may be created by Kubernetes at any time."""
        return (self.desired + self.extra + self.ending) * self.gpus

    @property
    def holding(self) -> Holding:
        return Holding(self.desired * self.gpus, (self.extra + self.ending) * self.gpus)

    @property
    def want(self) -> Want:
        return Want(
            *self.key,
            self.asked,
            self.desired,
            gpus_per_replica=self.gpus,
            tier=self.tier,
            breach=self.breach,
        )


counts = st.integers(0, 6)
services = st.lists(
    st.builds(
        Running,
        namespace=st.sampled_from(["a", "b", "c"]),
        name=st.uuids().map(str),
        desired=counts,
        extra=st.integers(0, 2),
        ending=counts,
        gpus=st.integers(0, 8),
        asked=st.integers(0, 12),
        tier=st.sampled_from(Tier),
        breach=st.floats(0, 10),
    ),
    max_size=10,
)
budgets = st.builds(
    Budget,
    st.none() | st.integers(0, 80),
    st.dictionaries(st.sampled_from(["a", "b", "*"]), st.integers(0, 40)).map(MappingProxyType),
)


def in_use(fleet: list[Running], namespace: str | None = None) -> int:
    """Accelerators in all or in one namespace."""
    return sum(s.in_use for s in fleet if namespace in {None, s.namespace})


def assert_within(fleet: list[Running], budget: Budget, before: list[Running]) -> None:
    """No bound is passed that was not passed before, and nobody's Deployment went down."""
    if budget.total_gpus is not None:
        assert in_use(fleet) <= max(budget.total_gpus, in_use(before))
    for namespace in ("a", "b", "c"):
        bound = budget.of_namespace(namespace)
        if bound is not None:
            assert in_use(fleet, namespace) <= max(bound, in_use(before, namespace))


@given(services, budgets, st.randoms())
@examples(200, guarded=True)
def test_looks_in_any_sequence_never_create_above_the_budget(
    fleet: list[Running], budget: Budget, random: Random
) -> None:
    """Each look sees what the others hold; what runs already is the only reason to be above."""
    before = [replace(service) for service in fleet]
    for _ in range(2 * len(fleet)):
        service = random.choice(fleet)
        allowance = Usage(budget, {s.key: s.holding for s in fleet}).allowance(service.key)
        kept = service.desired
        service.desired, by = bounded_replicas(service.asked, kept, service.gpus, allowance)
        assert service.desired >= min(kept, service.asked)
        assert bool(by) is (service.desired < service.asked)
        service.extra = max(0, service.extra + min(0, kept - service.desired))
        assert_within(fleet, budget, before)


@given(services, budgets, st.integers(0, 10), st.randoms())
@examples(200, guarded=True)
def test_orders_never_exceed_the_budget_whoever_states_a_want(
    fleet: list[Running], budget: Budget, silent: int, random: Random
) -> None:
    """Services without a want (deleting, unreadable, failed) hold their share; sequence is nothing."""
    before = [replace(service) for service in fleet]
    holdings = {service.key: service.holding for service in fleet}
    wants = [service.want for service in fleet[silent:]]
    allocations = arbitrate(wants, budget, holdings)
    random.shuffle(wants)
    assert arbitrate(wants, budget, holdings) == allocations
    for service in fleet[silent:]:
        allocation = allocations[service.key]
        assert min(service.desired, service.asked) <= allocation.replicas <= service.asked
        assert bool(allocation.limited_by) is (allocation.replicas < service.asked)
        service.desired = max(service.desired, allocation.replicas)
    assert_within(fleet, budget, before)


def bounded(gpus: int, **spec: object) -> World:
    """A new service without a router, on GPUs that its spec does not mention."""
    allowance = Allowance(gpus, f"the fleet's budget of {gpus} GPUs")
    world = new_world(**{"routing": {"policy": "None"}, "engine": {"profile": "cuda"}, **spec})
    return replace(world, allowance=allowance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 10},
        {"replicas": 10, "scaling": {"mode": "External"}},
        {"scaling": {"minReplicas": 10, "maxReplicas": 12}},
    ],
)
def test_a_first_creation_fits_in_the_budget_whoever_asks(spec: dict[str, object]) -> None:
    """A pin, an autoscaler and a minimum alike; each replica asks for one GPU by default."""
    world = settle(bounded(4, **spec))
    assert world.engine.desired_replicas == 4
    assert world.condition("ScalingLimited") == ("True", "GPUBudget")
    assert world.condition("Ready") == ("False", "GPUBudget")
    assert world.condition("Available") == ("True", "Answering")
    assert settle(world).writes == world.writes, "a limited service at rest is written"
    assert plan_of(world).requeue_after_s is not None
    assert settle(replace(world, allowance=Allowance(10, "x"))).engine.desired_replicas == 10


def test_without_any_gpu_the_service_says_so_and_starts_when_there_are_some() -> None:
    """Everything but pods is made; nobody calls it stopped or starting."""
    world = settle(bounded(0))
    assert world.engine.desired_replicas == 0
    for kind in ("Available", "Ready", "Progressing"):
        assert world.condition(kind) == ("False", "GPUBudget"), kind
    assert world.condition("ScalingLimited") == ("True", "GPUBudget")
    assert settle(replace(world, allowance=Allowance(2, "x"))).ready == 1


@pytest.mark.slow
def test_an_order_and_a_raised_pin_end_at_the_budget_and_nothing_that_runs_is_lowered() -> None:
    """3 run; then the budget shrinks to 1: they stay, and no other is made."""
    world = settle(bounded(4, replicas=3))
    shrunk = replace(world, allowance=Allowance(1, "the fleet's budget of 1 GPUs"))
    assert settle(shrunk).engine.desired_replicas == 3
    assert settle(with_spec(shrunk, replicas=5)).engine.desired_replicas == 3
    assert settle(with_spec(shrunk, replicas=2)).engine.desired_replicas == 2
    allocation = ReplicaAllocation(8, "QueueWaitAboveTarget", "queue wait")
    tuned = replace(with_spec(world, replicas=None), allocation=allocation)
    assert settle(tuned).engine.desired_replicas == 4


def test_a_template_with_more_gpus_a_replica_cannot_go_around_the_budget() -> None:
    """4 replicas with 1 GPU run; with 4 GPUs each they would be 16. They run on, and it is said why."""
    world = settle(bounded(4, replicas=4))
    before = world.engine
    wide = {"profile": "cuda", "tensorParallelSize": 4}
    grown = settle(with_spec(world, engine=wide))
    assert (grown.engine.template_hash, grown.engine.desired_replicas) == (before.template_hash, 4)
    assert grown.condition("Stalled") == ("True", "GPUBudget")
    fitting = settle(with_spec(grown, replicas=1))
    assert (fitting.engine.accelerators, fitting.engine.desired_replicas) == (4, 1)
    assert fitting.condition("Stalled") is None


@pytest.mark.parametrize(
    ("paused", "blocked", "wanted"), [(False, "", 9), (True, "", 2), (False, "no pod starts", 2)]
)
def test_a_pin_that_is_not_carried_out_takes_nothing_from_others(
    paused: bool, blocked: str, wanted: int
) -> None:
    """A paused service and one whose revision cannot start create nothing."""
    loop = Loop(ControlSettings(activation=Activation(State.PINNED, 9), paused=paused), replicas=2)
    assert loop.tick(scale_up_blocked=blocked).want.replicas == wanted


def test_a_contested_number_is_still_left_alone() -> None:
    """The budget does not enter a fight over the number."""
    world = settle(bounded(4, replicas=3))
    foreign = tuple((world.now - 10 * number, "hpa") for number in range(4))
    scaled = edited(world, (Kind.DEPLOYMENT, "chat"), desired_replicas=1, replicas_manager="hpa")
    assert settle(replace(scaled, foreign_writes=foreign)).engine.desired_replicas == 1


def with_claims(env: object, **limits: str) -> dict[str, object]:
    containers = [{"env": env, "resources": {"limits": limits}}]
    return {"resourceClaims": [{"name": "gpu"}], "containers": containers}


def claimed(value: object) -> list[object]:
    return ["garbage", {"name": "A"}, {"name": "FLEETKEEPER_ACCELERATORS", "value": value}]


@pytest.mark.parametrize(
    ("pod_spec", "count"),
    [
        (with_claims(claimed("2")), 2),
        (with_claims(claimed("2"), **{"rdma/hca": "8"}), 8),
        (with_claims(claimed("9" * 5000)), 0),
        (with_claims(claimed(None)), 0),
        (with_claims("garbage"), 0),
        ({**with_claims(claimed("2")), "resourceClaims": []}, 0),
    ],
)
def test_accelerators_of_claims_are_counted(pod_spec: dict[str, object], count: int) -> None:
    assert accelerators_of(pod_spec) == count


@pytest.mark.parametrize("accelerator", [None, {"count": 2}])
def test_a_service_with_claims_counts_against_the_budget(
    accelerator: dict[str, int] | None,
) -> None:
    """Whether the claims hold the GPUs or stand beside them."""
    resources = {"claims": [{"name": "devices", "resourceClaimTemplateName": "devices"}]}
    world = settle(
        bounded(
            5,
            engine={"profile": "cuda", "tensorParallelSize": 2},
            resources={**resources, **({"accelerator": accelerator} if accelerator else {})},
            replicas=3,
        )
    )
    assert (world.engine.accelerators, world.engine.desired_replicas) == (2, 2)


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({"nvidia.com/gpu": "2", "memory": "32Gi"}, 2),
        ({"nvidia.com/gpu": "2", "rdma/hca": "8"}, 8),
        ({"nvidia.com/mig-1g.5gb": 1}, 1),
        ({"cpu": "4", "hugepages-2Mi": "1Gi"}, 0),
        ({"nvidia.com/gpu": "9" * 5000}, 0),
        ("garbage", 0),
    ],
)
def test_accelerators_are_what_the_pod_asks_for(limits: object, count: int) -> None:
    """Extended resources of the containers; what cannot be read is no accelerator."""
    assert accelerators_of({"containers": [{"resources": {"limits": limits}}, "garbage"]}) == count
    assert accelerators_of({"containers": limits}) == 0
