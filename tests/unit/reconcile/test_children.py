"""Children are created, repaired, adopted and removed; what is not ours is never touched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.reconcile.plan import Apply, Delete
from fleetkeeper.reconcile.types import Child, Kind, WriteFailure, WriteProblem
from tests.support.reconcile.plan_cluster import settle, settled_with_vllm_router
from tests.support.reconcile.plan_world import (
    World,
    act,
    edited,
    new_world,
    plan_of,
    with_spec,
    without_child,
)

ENGINE = (Kind.DEPLOYMENT, "chat")
ENGINE_POLICY = (Kind.NETWORK_POLICY, "chat-fk-engine")
ADDRESS = (Kind.SERVICE, "chat")
RESTING = settle(new_world())
"""A routed service at rest; worlds are values, so tests may share it."""


def applies(world: World) -> list[Apply]:
    """What would be applied now."""
    return [item for item in plan_of(world).actions if isinstance(item, Apply)]


def test_a_new_service_creates_every_child_without_force() -> None:
    """Absent children are read by name first and never overwrite anything."""
    plan = plan_of(new_world())
    assert len(plan.actions) == 9
    assert all(
        isinstance(item, Apply) and item.create_only and not item.force for item in plan.actions
    )


def test_an_unchanged_world_gives_an_empty_plan() -> None:
    """Nothing to do is nothing to write."""
    plan = plan_of(RESTING)
    assert plan.is_empty
    assert not plan.wants_templates
    assert not plan.wants_events


@pytest.mark.parametrize("key", sorted(RESTING.children), ids=str)
def test_a_deleted_child_comes_back(key: tuple[Kind, str]) -> None:
    """One write, for that child alone."""
    (write,) = applies(without_child(RESTING, key))
    assert (write.kind, write.name, write.create_only) == (*key, True)
    assert plan_of(settle(without_child(RESTING, key))).is_empty


@pytest.mark.parametrize("key", sorted(RESTING.children), ids=str)
def test_an_edited_child_is_brought_back(key: tuple[Kind, str]) -> None:
    """One forced write; a child as wanted is left alone."""
    (write,) = applies(edited(RESTING, key, digest="edited"))
    assert (write.kind, write.name, write.force, write.why) == (*key, True, "repair")


@pytest.mark.parametrize("key", sorted(RESTING.children), ids=str)
def test_an_orphan_with_our_labels_is_adopted(key: tuple[Kind, str]) -> None:
    """Restored from a backup, or its owner reference was taken away."""
    (write,) = applies(edited(RESTING, key, controller_uid=None))
    assert (write.kind, write.name, write.why) == (*key, "adopt")


@pytest.mark.parametrize("key", sorted(RESTING.children), ids=str)
def test_a_child_whose_labels_were_removed_is_repaired(key: tuple[Kind, str]) -> None:
    """Our owner UID is enough; it was read by name."""
    (write,) = applies(edited(RESTING, key, service=None, digest="unlabelled"))
    assert (write.kind, write.name, write.why) == (*key, "repair")


@pytest.mark.promise("foreign-objects")
@pytest.mark.parametrize("key", sorted(RESTING.children), ids=str)
def test_a_foreign_object_under_a_childs_name_is_never_written(key: tuple[Kind, str]) -> None:
    """Stalled/NameConflict names it; it stays as it is."""
    foreign = replace(
        RESTING.children[key], controller_uid="somebody", service=None, digest="theirs"
    )
    world = replace(RESTING, children={**RESTING.children, key: foreign})
    world = settle(world)
    assert world.children[key] == foreign
    assert world.condition("Stalled") == ("True", "NameConflict")
    (stalled,) = [item for item in world.status["conditions"] if item["type"] == "Stalled"]
    assert f"{key[0]} {key[1]}" in stalled["message"]


@pytest.mark.promise("owned-address")
def test_the_status_has_an_address_while_the_service_owns_it() -> None:
    """The gateway sends requests there, with grants."""
    before = act(new_world(), plan_of(new_world()))
    assert "url" not in before.status, "the Kubernetes Service may be somebody else's"
    assert RESTING.status["url"] == "http://chat.team-a.svc:80/v1"
    for changes in ({"controller_uid": "somebody", "service": None}, {"controller_uid": "former"}):
        world = edited(RESTING, ADDRESS, **changes)
        assert "url" not in act(world, plan_of(world)).status
    for kept in (edited(RESTING, ADDRESS, controller_uid=None), without_child(RESTING, ADDRESS)):
        assert act(kept, plan_of(kept)).status["url"] == RESTING.status["url"]


def test_an_object_without_any_owner_and_without_our_labels_is_foreign() -> None:
    """Somebody made a Deployment by hand under the same name."""
    foreign = Child(Kind.DEPLOYMENT, "chat", "theirs", "7", "digest")
    world = settle(replace(new_world(), children={ENGINE: foreign}))
    assert world.children == {ENGINE: foreign}, "half a service was created"
    assert world.condition("Ready") == ("False", "NameConflict")


def test_a_conflict_found_by_the_executor_stalls_and_is_tried_again() -> None:
    """The cache has no foreign objects: the refused creation reveals them."""
    world = new_world()
    refusal = WriteFailure("Service", "chat", WriteProblem.CONFLICT, "taken", world.now, world.now)
    world = act(world, plan_of(replace(world, failures=(refusal,))))
    assert not world.children, "nothing is created while a name is taken"
    assert "url" not in world.status
    assert world.condition("Stalled") == ("True", "NameConflict")
    again = plan_of(replace(world, failures=(refusal,)))
    assert again.is_empty
    assert again.requeue_after_s == pytest.approx(30)
    later = plan_of(replace(world, failures=(refusal,), now=world.now + 30))
    assert [item.name for item in later.actions] == ["chat"]


def test_a_child_of_a_former_service_of_the_same_name_is_waited_for() -> None:
    """The garbage collector removes it; that is no conflict to cry about."""
    leftover = replace(RESTING.children[ADDRESS], controller_uid="former")
    world = replace(new_world(), children={ADDRESS: leftover})
    world = act(world, plan_of(world))
    assert world.children == {ADDRESS: leftover}
    assert world.condition("Stalled") is None
    gone = settle(replace(world, children={}))
    assert gone.condition("Ready") == ("True", "AllReplicasReady")


def test_what_a_changed_mode_no_longer_needs_is_removed() -> None:
    """Without routing the router goes: by uid and resourceVersion, and only what is ours."""
    resting = settled_with_vllm_router()
    world = with_spec(resting, routing={"policy": "None"})
    foreign = replace(
        resting.children[Kind.SERVICE_ACCOUNT, "chat-fk-router"], controller_uid="somebody"
    )
    world = replace(
        world, children={**world.children, (Kind.SERVICE_ACCOUNT, "chat-fk-router"): foreign}
    )
    removed = [item for item in plan_of(world).actions if isinstance(item, Delete)]
    assert {(item.kind, item.name) for item in removed} == {
        (Kind.DEPLOYMENT, "chat-fk-router"),
        (Kind.NETWORK_POLICY, "chat-fk-router"),
        (Kind.POD_DISRUPTION_BUDGET, "chat-fk-router"),
        (Kind.ROLE_BINDING, "chat-fk-router"),
        (Kind.SERVICE, "chat-fk-engines"),
    }
    for item in removed:
        child = resting.children[Kind(item.kind), item.name]
        assert (item.uid, item.resource_version) == (child.uid, child.resource_version)


def test_a_child_that_is_being_deleted_is_waited_for() -> None:
    """A write would be lost; it is created when it is gone."""
    world = edited(RESTING, ADDRESS, deleting=True, digest="edited")
    assert not plan_of(world).actions


def test_a_deleting_service_gets_no_writes() -> None:
    """Its children go with it by their owner references."""
    metadata = {**RESTING.resource["metadata"], "deletionTimestamp": "2027-01-01T00:00:00Z"}
    world = replace(RESTING, resource={**RESTING.resource, "metadata": metadata}, children={})
    assert plan_of(world).is_empty


def test_a_paused_service_gets_no_write_to_a_child() -> None:
    """Break-glass: edits by hand stay, and the status is still written."""
    world = with_spec(RESTING, paused=True)
    world = edited(world, ENGINE, digest="by hand")
    plan = plan_of(world)
    assert not plan.actions
    assert plan.status is not None
    world = settle(world)
    assert world.children[ENGINE].digest == "by hand"
    assert settle(with_spec(world, paused=None)).children[ENGINE].digest != "by hand"


def test_a_refused_write_waits_half_a_minute_or_for_the_spec() -> None:
    """No storm of refused requests; another write than the refused one is tried at once."""
    world = edited(RESTING, ADDRESS, digest="edited")
    (write,) = applies(world)
    refusal = WriteFailure(
        "Service", "chat", WriteProblem.ADMISSION, "no", world.now, world.now, write.digest
    )
    refused = replace(world, failures=(refusal,))
    assert not plan_of(refused).actions
    assert plan_of(refused).requeue_after_s == pytest.approx(30)
    assert plan_of(replace(refused, now=world.now + 30)).actions
    other = replace(refusal, digest="that of another manifest")
    assert plan_of(replace(world, failures=(other,))).actions


def test_pods_come_after_what_they_need_and_do_not_wait_for_an_address() -> None:
    """Kubernetes allots cluster addresses one after another; the executor first checks that the name is free."""
    kinds = [item.kind for item in applies(new_world())]
    assert kinds[-4:] == [Kind.DEPLOYMENT, Kind.DEPLOYMENT, Kind.SERVICE, Kind.SERVICE]


def test_a_router_is_ready_before_the_address_leads_to_it() -> None:
    """From routing None to a router without a moment in which nobody answers."""
    world = settle(new_world(routing={"policy": "None"}))
    world = with_spec(world, routing={"policy": "LeastLoaded"})
    plan = plan_of(world)
    assert "create Deployment chat-fk-router" in [
        f"{item.why} {item.kind} {item.name}" for item in plan.actions if isinstance(item, Apply)
    ]
    assert ADDRESS not in {(item.kind, item.name) for item in applies(world)}
    before = world.children[ADDRESS].digest
    clients = world.manifests[ENGINE_POLICY]["spec"]["ingress"][0]["from"]
    world = act(world, plan)
    admitted = world.manifests[ENGINE_POLICY]["spec"]["ingress"][0]["from"]
    assert all(one in admitted for one in clients), "clients reach the engines still"
    assert len(admitted) == len(clients) + 1, "and the router does"
    assert world.children[ADDRESS].digest == before
    assert world.condition("Available") == ("True", "Answering")
    assert world.condition("Ready") == ("True", "RollingOut")
    world = settle(world)
    assert world.children[ADDRESS].digest != before
    assert len(world.manifests[ENGINE_POLICY]["spec"]["ingress"][0]["from"]) == 1
    assert world.condition("Ready") == ("True", "AllReplicasReady")


def test_a_role_binding_that_cannot_change_is_recreated() -> None:
    """The role that it names is immutable: the API server finds the change invalid."""
    key = (Kind.ROLE_BINDING, "chat-fk-router")
    world = edited(settled_with_vllm_router(), key, digest="another role")
    (write,) = applies(world)
    refusal = WriteFailure(
        *key, WriteProblem.INVALID, "immutable", world.now, world.now, write.digest
    )
    (removal,) = plan_of(replace(world, failures=(refusal,))).actions
    assert isinstance(removal, Delete)
    world = settle(replace(without_child(world, key), failures=(refusal,)))
    assert world.children[key].digest == write.digest
    assert not world.failures


def test_a_child_that_cannot_be_written_makes_the_service_not_ready() -> None:
    """It answers, but without the access rules that the spec asks for."""
    world = with_spec(RESTING, networkPolicy={"preset": "SameNamespace"})
    (write,) = applies(world)
    refusal = WriteFailure(
        write.kind,
        write.name,
        WriteProblem.ADMISSION,
        "denied: no",
        world.now,
        world.now,
        write.digest,
    )
    world = replace(world, failures=(refusal,))
    world = act(world, plan_of(world))
    assert world.condition("Available") == ("True", "Answering")
    assert world.condition("Ready") == ("False", "AdmissionDenied")
    assert world.condition("Stalled") == ("True", "AdmissionDenied")
    assert world.condition("Degraded") == ("True", "AdmissionDenied")
    assert plan_of(world).is_empty


def test_an_outage_is_no_refusal() -> None:
    """The queue backs off by itself; the plan stays the same."""
    world = edited(RESTING, ADDRESS, digest="edited")
    outage = WriteFailure("Service", "chat", WriteProblem.UNAVAILABLE, "503", world.now, world.now)
    assert plan_of(replace(world, failures=(outage,))).actions
