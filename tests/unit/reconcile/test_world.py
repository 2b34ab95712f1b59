"""Whatever happens to a service, plans bring it to rest, and do no harm on the way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fleetkeeper.api.conditions import Reason
from fleetkeeper.common.values import Manifest, ReplicaAllocation
from fleetkeeper.reconcile.plan import Apply, Delete, Plan
from fleetkeeper.reconcile.types import Kind
from tests.support.lanes import examples, keep_first
from tests.support.reconcile.plan_cluster import live, settle, step
from tests.support.reconcile.plan_world import (
    Behaviour,
    World,
    act,
    edited,
    new_world,
    plan_of,
    service,
    with_spec,
    without_child,
)
from tests.support.reconcile.random_specs import random_spec

ENGINE = (Kind.DEPLOYMENT, "chat")
MODELS = ("pvc://models/llama", "pvc://models/mistral", "pvc://models/qwen")
SETTLE_S = 5_000.0
"""More than startupSeconds (600 in these worlds) and all patience together."""


def assert_harmless(world: World, plan: Plan) -> None:
    """What no plan may contain, in any state of the world."""
    spec = world.resource["spec"]
    for action in plan.actions:
        if isinstance(action, Delete):
            child = world.children[Kind(action.kind), action.name]
            assert (child.kind, child.name) != ENGINE
            assert child.controller_uid == world.resource["metadata"]["uid"]
            assert action.resource_version == child.resource_version
        if isinstance(action, Apply):
            assert action.manifest["metadata"]["namespace"] == "team-a"
            present = world.children.get((action.kind, action.name))
            if present is not None:
                assert present.controller_uid in {None, "uid-of-chat"}
                assert action.resource_version == present.resource_version
            if (action.kind, action.name) == ENGINE:
                assert_ordered(world, spec, action.manifest["spec"]["replicas"])
    assert not (spec.get("paused") and plan.actions)


def assert_ordered(world: World, spec: dict[str, object], replicas: int) -> None:
    """The number is the pin, or within the bounds, or the live one."""
    present = world.children.get(ENGINE)
    held = world.engine.desired_replicas if present else None
    scaling = spec.get("scaling")
    assert isinstance(scaling, dict)
    if spec.get("suspend"):
        assert replicas in {0, held}
    elif "replicas" in spec:
        assert replicas in {spec["replicas"], held}
    else:
        assert scaling["minReplicas"] <= replicas <= scaling["maxReplicas"] or replicas == held


def assert_still_serving(before: World, after: World) -> None:
    """Ready pods never all go, unless somebody took the Deployment down, asked for none, or asked
    that an old pod goes before the new one comes (and the roll-out does so).
    """
    present = before.children.get(ENGINE)
    is_asked_to_replace = before.resource["spec"]["rollout"].get("strategy") == "Replace"
    if is_asked_to_replace and present is not None and before.engine.max_surge == 0:
        return
    if before.ready and present is not None and before.engine.desired_replicas > 0:
        assert after.ready >= 1, f"nothing serves any more after {before.writes[-4:]}"


class Service(RuleBasedStateMachine):
    """Somebody changes the spec, the children, the cluster; time passes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.world = new_world()

    @initialize(routed=st.booleans())
    def begin(self, routed: bool) -> None:
        """A small service that gives up a start after ten minutes."""
        self.world = new_world(
            routing={"policy": "LeastLoaded" if routed else "None"},
            rollout={"startupSeconds": 600},
            scaling={"minReplicas": 1, "maxReplicas": 4},
        )

    def run(self, world: World, seconds: float) -> None:
        """Planner and cluster side by side; each plan is checked."""
        end = world.now + seconds
        while world.now < end:
            for _ in range(6):
                plan = plan_of(world)
                assert_harmless(world, plan)
                if plan.is_empty and not plan.wants_templates:
                    break
                world = act(world, plan)
            after = step(world, 10.0)
            assert_still_serving(world, after)
            world = after
        self.world = world

    @rule(model=st.sampled_from(MODELS), behaviour=st.sampled_from(list(Behaviour)))
    def change_model(self, model: str, behaviour: Behaviour) -> None:
        """Another template, which may be a bad one."""
        world = replace(self.world, next_behaviour=behaviour)
        self.run(with_spec(world, model={"source": model}), 30)

    @rule(replicas=st.sampled_from([None, 0, 1, 2, 3]))
    def pin(self, replicas: int | None) -> None:
        """A person sets spec.replicas, or lets go."""
        self.run(with_spec(self.world, replicas=replicas), 20)

    @rule(replicas=st.sampled_from([None, 1, 3, 9]))
    def allocation(self, replicas: int | None) -> None:
        """The arbitration allocates replicas, sometimes beyond the bounds."""
        allocation = ReplicaAllocation(replicas, "Test", "as the test says") if replicas else None
        self.run(replace(self.world, allocation=allocation), 20)

    @rule(least=st.integers(1, 2), most=st.integers(2, 5))
    def bounds(self, least: int, most: int) -> None:
        """Other bounds."""
        scaling = {"minReplicas": least, "maxReplicas": most}
        self.run(with_spec(self.world, scaling=scaling), 20)

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        """Break-glass and back."""
        self.run(with_spec(self.world, paused=paused or None), 20)

    @rule(suspended=st.booleans())
    def suspend(self, suspended: bool) -> None:
        """No replicas, and back."""
        self.run(with_spec(self.world, suspend=suspended or None), 20)

    @rule(policy=st.sampled_from(["None", "LeastLoaded", "RoundRobin"]))
    def route(self, policy: str) -> None:
        """With and without a router: children come and go."""
        self.run(with_spec(self.world, routing={"policy": policy}), 20)

    @rule(
        strategy=st.sampled_from(["Auto", "Surge", "Replace"]),
        failure=st.sampled_from(["Rollback", "Hold"]),
    )
    def rules_of_rollout(self, strategy: str, failure: str) -> None:
        """Another way of rolling out."""
        rules = {"startupSeconds": 600, "strategy": strategy, "onFailure": failure}
        self.run(with_spec(self.world, rollout=rules), 20)

    @rule(data=st.data())
    def delete_child(self, data: st.DataObject) -> None:
        """Somebody deletes a child."""
        if self.world.children:
            key = data.draw(st.sampled_from(sorted(self.world.children)))
            self.run(without_child(self.world, key), 20)

    @rule(data=st.data(), owner=st.booleans())
    def edit_child(self, data: st.DataObject, owner: bool) -> None:
        """Somebody edits a child, or takes its owner away."""
        if self.world.children:
            key = data.draw(st.sampled_from(sorted(self.world.children)))
            change = {"controller_uid": None} if owner else {"digest": "other"}
            self.run(edited(self.world, key, **change), 20)

    @rule(replicas=st.integers(0, 5))
    def scale_deployment(self, replicas: int) -> None:
        """Somebody scales the engine Deployment by hand."""
        if ENGINE in self.world.children:
            changed = edited(
                self.world, ENGINE, desired_replicas=replicas, replicas_manager="kubectl"
            )
            self.run(changed, 20)

    @rule(gpus=st.sampled_from([0, 2, 1000]))
    def resize_cluster(self, gpus: int) -> None:
        """Accelerators come and go; pods that run stay."""
        self.run(replace(self.world, gpus=gpus), 30)

    @rule(missing=st.booleans())
    def swap_crd(self, missing: bool) -> None:
        """An older CRD is installed, and the right one again."""
        fields = ("spec.breaker",) if missing else ()
        self.run(replace(self.world, crd_missing=fields), 20)

    @rule(bad=st.booleans())
    def break_spec(self, bad: bool) -> None:
        """A spec that yesterday's schema accepted."""
        tiers = {"batch": {"sharePercent": 1, "floorPercent": 50}} if bad else None
        before = self.world
        self.run(with_spec(self.world, tiers=tiers), 20)
        if bad and self.world.condition("Stalled") == ("True", "InvalidSpec"):
            assert before.children.keys() <= self.world.children.keys()

    @rule(seconds=st.sampled_from([10.0, 70.0, 700.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.run(self.world, seconds)

    @invariant()
    def same_snapshot_same_plan(self) -> None:
        """A decision has no memory of its own."""
        assert plan_of(self.world) == plan_of(self.world)

    def teardown(self) -> None:
        """In the end everything rests, and the status has one of the closed reasons."""
        world = settle(self.world, SETTLE_S)
        status = world.status
        assert status["observedGeneration"] == world.resource["metadata"]["generation"]
        ready = world.condition("Ready")
        assert ready is not None
        assert ready[0] in {"True", "False"}
        assert ready[1] in set(Reason)
        assert all(len(item["message"]) <= 256 for item in status["conditions"])
        if ready[0] == "True" and world.condition("Stalled") is None:
            assert world.ready >= 1


Service.TestCase.settings = settings(
    examples(30),
    stateful_step_count=10,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestService = pytest.mark.timeout(600)(Service.TestCase)


@pytest.mark.parametrize(("policy", "children"), [("None", 5), ("LeastLoaded", 9)])
def test_creation_writes_each_child_once_and_the_status_once(policy: str, children: int) -> None:
    """Pods that are ready within seconds: at most ten writes, and none a minute later."""
    world = settle(new_world(routing={"policy": policy}))
    assert world.status_writes == 1
    assert len(world.writes) - world.status_writes == len(world.children) == children
    assert len(world.writes) <= 10


def test_a_crash_of_the_operator_after_any_write_leads_to_the_same_end() -> None:
    """Each plan is cut after its k-th action; the next reconcile starts from what exists."""
    whole = settle(new_world())
    for cut in range(len(plan_of(new_world()).actions) + 1):
        world = new_world()
        plan = plan_of(world)
        world = act(world, replace(plan, actions=plan.actions[:cut], status=None))
        world = settle(replace(world, status_written=None))
        created = [write for write in world.writes if write.startswith("create")]
        assert len(created) == len(set(created)) == len(whole.children)
        assert {key: item.digest for key, item in world.children.items()} == {
            key: item.digest for key, item in whole.children.items()
        }


def test_the_same_spec_by_another_path_gives_the_same_children() -> None:
    """Children follow from the spec, not from its history."""
    straight = settle(new_world(replicas=2, routing={"policy": "RoundRobin"}))
    winding = settle(new_world(routing={"policy": "None"}))
    winding = settle(with_spec(winding, model={"source": "pvc://models/qwen"}, replicas=3))
    winding = with_spec(winding, model={"source": "pvc://models/llama"}, replicas=2)
    winding = settle(with_spec(winding, routing={"policy": "RoundRobin"}))
    assert {key: item.digest for key, item in winding.children.items()} == {
        key: item.digest for key, item in straight.children.items()
    }
    assert winding.engine.desired_replicas == straight.engine.desired_replicas


def test_applying_the_same_manifest_again_writes_nothing() -> None:
    """GitOps re-applies every few minutes."""
    world = settle(new_world())
    again = with_spec(world, **world.resource["spec"])
    assert plan_of(again).is_empty
    writes = world.writes
    assert live(again, 600).writes == writes


@pytest.mark.parametrize("seed", keep_first(8, range(40), pytest.mark.slow))
def test_any_spec_that_the_schema_accepts_comes_to_rest(seed: int) -> None:
    """A chain of random specs: no plan breaks, each ends at rest with a closed reason."""
    rng = random.Random(seed)
    world = World(resource=random_service(rng))
    for _ in range(3):
        spec = random_service(rng)["spec"]
        world = replace(world, next_behaviour=rng.choice(list(Behaviour)))
        changed = {**dict.fromkeys(world.resource["spec"]), **spec}
        world = settle(with_spec(world, **changed), 20_000)
        ready = world.condition("Ready")
        assert ready is not None
        assert ready[0] in {"True", "False"}
        assert ready[1] in set(Reason)
        assert_harmless(world, plan_of(world))


def random_service(rng: random.Random) -> Manifest:
    """A random spec on the service `chat`: few replicas, and a start that gives up in minutes."""
    spec = {**random_spec(rng), "paused": False, "scaling": {"minReplicas": rng.randint(1, 3)}}
    spec["rollout"] = {**spec.get("rollout", {}), "startupSeconds": rng.randint(60, 900)}
    if "replicas" in spec:
        spec["replicas"] = rng.randint(0, 4)
    return service(**spec)
