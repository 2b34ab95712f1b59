"""A new model is downloaded into a shared cache before an engine is replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper.api.names import ANNOTATION_TEMPLATE_HASH
from fleetkeeper.common.values import Manifest, ReplicaAllocation
from fleetkeeper.reconcile.manifests.engine_document import model_of
from fleetkeeper.reconcile.plan import Apply
from fleetkeeper.reconcile.types import (
    Container,
    Job,
    Kind,
    ObjectCondition,
    Pod,
    Termination,
)
from tests.support.reconcile.plan_cluster import live, settle
from tests.support.reconcile.plan_world import (
    Behaviour,
    World,
    act,
    new_world,
    plan_of,
    with_spec,
    without_child,
)

OLD, NEW, NEWER = "a" * 40, "b" * 40, "c" * 40
JOB = (Kind.JOB, "chat-fk-prefetch")
POLICY = (Kind.NETWORK_POLICY, "chat-fk-prefetch")
ENGINE = (Kind.DEPLOYMENT, "chat")
COMPLETE = ObjectCondition("Complete", "True", "CompletionsReached")


def model(revision: str, **fields: Any) -> dict[str, Any]:
    """A model of the hub with a shared cache."""
    return {
        "source": "hf://example/llama",
        "revision": revision,
        "cache": {"claimName": "hub-cache"},
        **fields,
    }


RESTING = settle(new_world(model=model(OLD), replicas=2))


def engine_document(world: World) -> str:
    """The engine's document in the template that the Deployment has."""
    container = world.manifests[ENGINE]["spec"]["template"]["spec"]["containers"][0]
    (text,) = (item["value"] for item in container["env"] if item["name"] == "FLEETKEEPER_ENGINE")
    return str(text)


def waiting(revision: str = NEW, **spec: Any) -> World:
    """The world whose model changed, at rest while the Job runs."""
    return settle(with_spec(RESTING, model=model(revision), **spec))


def ended(world: World, end: ObjectCondition = COMPLETE) -> World:
    """The world after the end of the Job."""
    job = world.children[JOB]
    assert isinstance(job, Job)
    return replace(world, children={**world.children, JOB: replace(job, end=end)})


def with_pod(world: World, phase: str, *containers: Container) -> World:
    """The world with a pod of the Job."""
    pod = Pod(
        "chat-fk-prefetch-x1",
        "pod-x1",
        "chat",
        "prefetch",
        world.children[JOB].uid,
        "",
        world.now,
        phase=phase,
        scheduled=True,
        containers=containers,
    )
    return replace(world, pods=(*world.pods, pod))


def message(world: World, kind: str) -> str:
    """The message of a condition."""
    return next(str(i["message"]) for i in world.status["conditions"] if i["type"] == kind)


def test_a_new_model_is_downloaded_before_a_template_changes() -> None:
    world = waiting()
    assert JOB in world.children
    assert POLICY in world.children
    assert NEW not in engine_document(world)
    assert world.ready == 2
    assert world.condition("Progressing") == ("True", "PrefetchingModel")
    assert world.condition("Reconciling") == ("True", "PrefetchingModel")
    assert world.condition("Available") == ("True", "Answering")
    assert world.condition("Stalled") is None
    assert NEW in str(world.manifests[JOB])
    before = world.engine.template_hash
    done = settle(ended(world))
    assert NEW in engine_document(done)
    assert done.engine.template_hash != before
    assert done.condition("Ready") == ("True", "AllReplicasReady")
    assert JOB not in done.children
    assert POLICY not in done.children
    assert plan_of(done).is_empty


def test_the_policy_is_written_before_the_job() -> None:
    actions = plan_of(
        act(changed := with_spec(RESTING, model=model(NEW)), plan_of(changed))
    ).actions
    names = [item.kind for item in (*plan_of(changed).actions, *actions) if isinstance(item, Apply)]
    assert names.index(Kind.NETWORK_POLICY) < names.index(Kind.JOB)
    assert Kind.DEPLOYMENT not in names


def test_a_world_that_waits_writes_nothing() -> None:
    world = waiting()
    assert plan_of(world).is_empty
    assert plan_of(world).requeue_after_s is None
    assert live(world, 600.0).writes == world.writes


def test_the_status_says_what_the_pod_of_the_job_does() -> None:
    world = settle(with_pod(waiting(), "Running"))
    assert "its pod is Running" in message(world, "Progressing")
    pulls = Container("engine", waiting_reason="ImagePullBackOff", waiting_message="no such")
    world = settle(with_pod(waiting(), "Pending", pulls))
    assert "cannot be pulled" in message(world, "Progressing")


def test_replicas_scale_with_the_old_template_while_the_job_runs() -> None:
    world = settle(with_spec(waiting(), replicas=3))
    assert world.engine.desired_replicas == 3
    assert NEW not in engine_document(world)
    assert world.ready == 3
    assert plan_of(world).is_empty
    assert NEW in engine_document(settle(ended(world)))


def test_the_control_loop_scales_while_the_job_runs() -> None:
    scaling = {"mode": "Auto", "minReplicas": 1, "maxReplicas": 8}
    world = settle(new_world(model=model(OLD), scaling=scaling))
    world = settle(with_spec(world, model=model(NEW)))
    world = settle(replace(world, allocation=ReplicaAllocation(3, "QueueWaitAboveTarget", "t")))
    assert world.engine.desired_replicas == 3
    assert NEW not in engine_document(world)
    assert JOB in world.children


LINE = '{"class": "ModelNotFound", "code": 66, "phase": "start", "message": "no such revision", "detail": ""}'
FAILED = ObjectCondition("Failed", "True", "BackoffLimitExceeded", "too many attempts")


def failed() -> World:
    """The world in which the download failed for a reason that its pod told."""
    end = Container("engine", terminated=Termination(66, "Error", LINE, 1.0))
    return settle(ended(with_pod(waiting(), "Failed", end), FAILED))


def test_after_a_failure_the_old_replicas_serve() -> None:
    world = failed()
    assert NEW not in engine_document(world)
    assert world.ready == 2
    assert world.condition("Available") == ("True", "Answering")
    for kind, status in (("Stalled", "True"), ("Degraded", "True"), ("Progressing", "False")):
        assert world.condition(kind) == (status, "PrefetchFailed")
        assert "ModelNotFound: no such revision" in message(world, kind)
    assert "delete Job chat-fk-prefetch" in message(world, "Stalled")
    assert world.condition("Ready") == ("False", "PrefetchFailed")
    assert plan_of(world).is_empty
    assert live(world, 600.0).writes == world.writes


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (ObjectCondition("Failed", "True", "DeadlineExceeded", "long"), "rollout.startupSeconds"),
        (FAILED, "too many attempts"),
    ],
)
def test_a_failure_without_a_pod_has_the_words_of_the_job(end: ObjectCondition, words: str) -> None:
    world = settle(ended(waiting(), end))
    assert world.condition("Stalled") == ("True", "PrefetchFailed")
    assert words in message(world, "Stalled")


def test_a_deleted_job_is_tried_again() -> None:
    world = settle(without_child(failed(), JOB))
    assert JOB in world.children
    assert world.condition("Progressing") == ("True", "PrefetchingModel")
    assert NEW in engine_document(settle(ended(world)))


def test_another_change_replaces_the_job() -> None:
    """Of one that runs, and of one that failed."""
    for before in (waiting(), failed(), ended(waiting())):
        uid = before.children[JOB].uid
        world = settle(with_spec(before, model=model(NEWER)))
        assert world.children[JOB].uid != uid
        assert f"delete Job {JOB[1]}" in world.writes
        assert NEWER in str(world.manifests[JOB])
        assert OLD in engine_document(world)
        assert world.condition("Progressing") == ("True", "PrefetchingModel")
        assert NEWER in engine_document(settle(ended(world)))


def test_a_return_to_the_old_model_removes_the_job() -> None:
    world = settle(with_spec(waiting(), model=model(OLD)))
    assert JOB not in world.children
    assert world.engine.template_hash == RESTING.engine.template_hash
    assert world.condition("Ready") == ("True", "AllReplicasReady")
    assert plan_of(world).is_empty


def test_a_corrected_token_starts_a_new_job() -> None:
    world = failed()
    uid = world.children[JOB].uid
    world = settle(with_spec(world, model=model(NEW, tokenSecret={"name": "hf"})))
    assert world.children[JOB].uid != uid
    assert "hf" in str(world.manifests[JOB]["spec"]["template"]["spec"]["containers"][0]["env"])


def rolled_out(world: World, **spec: Any) -> World:
    """The world after a change of its spec, which must write no Job."""
    world = settle(with_spec(world, **spec))
    assert not [item for item in world.writes if "Job" in item]
    return world


def test_a_new_service_has_no_job() -> None:
    assert not [item for item in RESTING.writes if "Job" in item]


@pytest.mark.parametrize(
    "spec",
    [
        {"rollout": {"strategy": "Replace"}},
        {"engine": {"maxModelLength": 4096}},
        {"batching": {"maxSequences": 32}},
        {"model": model(OLD, servedName="other")},
        {"model": model(OLD, cache={"claimName": "other-cache"})},
    ],
    ids=str,
)
def test_a_change_of_something_else_has_no_job(spec: dict[str, Any]) -> None:
    world = rolled_out(RESTING, **spec)
    assert world.condition("Ready") == ("True", "AllReplicasReady")


@pytest.mark.parametrize("cache", [None, {"ephemeralSize": "40Gi"}], ids=str)
def test_a_cache_that_is_not_shared_has_no_job(cache: dict[str, str] | None) -> None:
    fields = {"source": "hf://example/llama", **({"cache": cache} if cache else {})}
    world = settle(new_world(model={**fields, "revision": OLD}))
    assert NEW in engine_document(rolled_out(world, model={**fields, "revision": NEW}))


def test_a_model_of_a_claim_has_no_job() -> None:
    assert "/models/a" in engine_document(rolled_out(RESTING, model={"source": "pvc://models/a"}))


def test_a_service_without_replicas_has_no_job() -> None:
    """Suspended, stopped, and stopped in the same change: nothing drains."""
    suspended = rolled_out(settle(with_spec(RESTING, suspend=True)), model=model(NEW))
    assert NEW in engine_document(suspended)
    assert JOB not in rolled_out(suspended, suspend=False).children
    stopped = rolled_out(RESTING, replicas=0, model=model(NEW))
    assert stopped.engine.desired_replicas == 0


def test_a_suspended_service_ends_its_job() -> None:
    world = settle(with_spec(waiting(), suspend=True))
    assert JOB not in world.children
    assert world.engine.desired_replicas == 0


def test_a_paused_service_starts_no_job() -> None:
    world = rolled_out(RESTING, paused=True, model=model(NEW))
    assert NEW not in engine_document(world)
    assert JOB in settle(with_spec(world, paused=False)).children


def test_an_upgrade_of_the_operator_starts_no_job() -> None:
    """Another template for the same model, and a live template whose model cannot be read."""
    router = RESTING.context.router.model_copy(update={"image": "router:next"})
    upgraded = replace(RESTING, context=replace(RESTING.context, router=router))
    assert plan_of(upgraded).is_empty
    unknown = replace(RESTING.engine, model="")
    world = replace(RESTING, children={**RESTING.children, ENGINE: unknown})
    assert plan_of(world).is_empty
    assert JOB not in act(world, plan_of(with_spec(world, model=model(NEW)))).children


def test_an_image_without_the_command_is_rolled_out_as_before() -> None:
    end = ObjectCondition("Failed", "True", "PodFailurePolicy", "exit code 2")
    world = settle(ended(waiting(), end))
    assert NEW in engine_document(world)
    assert world.condition("Stalled") is None


def test_a_roll_out_that_fails_returns_without_a_job() -> None:
    """The last good model was downloaded before; the failed template is not tried again."""
    world = replace(waiting(), next_behaviour=Behaviour.BAD_OPTION)
    before = RESTING.engine.template_hash
    world = settle(ended(world))
    assert world.condition("Stalled") == ("True", "RolledBack")
    assert world.engine.template_hash == before
    assert JOB not in world.children
    assert plan_of(world).is_empty


def test_a_return_during_a_roll_out_needs_no_job() -> None:
    """The old revision still has ready replicas, so its model is there."""
    world = replace(waiting(), next_behaviour=Behaviour.SILENT)
    world = live(ended(world), 30.0)
    assert NEW in engine_document(world)
    mark = len(world.writes)
    world = settle(with_spec(world, model=model(OLD)))
    assert not [item for item in world.writes[mark:] if item.startswith("create Job")]
    assert world.engine.template_hash == RESTING.engine.template_hash


def job_pod(world: World) -> Manifest:
    """The pod of the Job."""
    found: Manifest = world.manifests[JOB]["spec"]["template"]
    return found


def test_the_job_has_the_engines_pod_without_accelerators() -> None:
    placement = {"nodeSelector": {"pool": "a"}, "runtimeClassName": "gvisor"}
    world = settle(
        with_spec(
            settle(new_world(model=model(OLD), placement=placement)),
            model=model(NEW, tokenSecret={"name": "hf", "key": "t"}),
        )
    )
    engine = world.manifests[ENGINE]["spec"]["template"]["spec"]
    spec = job_pod(world)["spec"]
    for key in ("securityContext", "nodeSelector", "runtimeClassName"):
        assert spec[key] == engine[key]
    assert spec["automountServiceAccountToken"] is False
    assert spec["restartPolicy"] == "Never"
    (container,) = spec["containers"]
    assert container["image"] == engine["containers"][0]["image"]
    assert container["securityContext"] == engine["containers"][0]["securityContext"]
    assert container["command"][-1] == "fetch"
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}
    assert {"name": "cache", "mountPath": "/cache"} in container["volumeMounts"]
    env = {item["name"]: item for item in container["env"]}
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hf", "key": "t"}
    assert NEW in env["FLEETKEEPER_ENGINE"]["value"]
    assert {"ports", "livenessProbe", "lifecycle"}.isdisjoint(container)
    assert [item["name"] for item in spec.get("initContainers", [])] == [
        item["name"] for item in engine.get("initContainers", [])
    ]
    job = world.manifests[JOB]
    assert job["spec"]["backoffLimit"] == 3
    assert job["spec"]["activeDeadlineSeconds"] == 3600
    assert job["metadata"]["ownerReferences"][0]["controller"] is True
    assert job_pod(world)["metadata"]["labels"]["fleetkeeper.io/component"] == "prefetch"
    assert ANNOTATION_TEMPLATE_HASH not in job_pod(world)["metadata"].get("annotations", {})


def test_the_job_has_the_egress_of_the_engines_and_no_ingress() -> None:
    world = waiting()
    own = world.manifests[POLICY]["spec"]
    engine = world.manifests[Kind.NETWORK_POLICY, "chat-fk-engine"]["spec"]
    assert own["egress"] == engine["egress"]
    assert "ingress" not in own
    assert own["podSelector"]["matchLabels"] == {
        "fleetkeeper.io/service": "chat",
        "fleetkeeper.io/component": "prefetch",
    }


def test_the_job_of_a_podtemplate_has_no_added_container_and_its_volumes() -> None:
    """A sidecar would never end. What is added to the engine's own container stays."""
    added = {
        "spec": {
            "containers": [
                {
                    "name": "engine",
                    "env": [{"name": "SSL_CERT_FILE", "value": "/certificates/ca.pem"}],
                    "volumeMounts": [{"name": "certificates", "mountPath": "/certificates"}],
                },
                {"name": "sidecar", "image": "proxy:1"},
            ],
            "volumes": [
                {"name": "certificates", "configMap": {"name": "own-ca"}},
                {"name": "of-the-sidecar", "emptyDir": {}},
            ],
        }
    }
    catalog = RESTING.context.catalog
    profiles = tuple(item.model_copy(update={"pod_template": added}) for item in catalog.profiles)
    context = replace(RESTING.context, catalog=catalog.model_copy(update={"profiles": profiles}))
    world = settle(replace(new_world(model=model(OLD)), context=context))
    world = settle(with_spec(world, model=model(NEW)))
    spec = job_pod(world)["spec"]
    (container,) = spec["containers"]
    assert {"name": "SSL_CERT_FILE", "value": "/certificates/ca.pem"} in container["env"]
    volumes = {item["name"] for item in spec["volumes"]}
    assert "certificates" in volumes
    assert "of-the-sidecar" not in volumes


@pytest.mark.parametrize(
    "text", [None, 5, "", "{", "[]", '{"model": 3}', '{"model": {"source": 3}}', "[" * 100_000]
)
def test_a_model_that_cannot_be_read_is_unknown(text: object) -> None:
    env = [{"name": "FLEETKEEPER_ENGINE", "value": text}]
    assert model_of({"containers": [{"name": "engine", "env": env}]}) == ""
    assert model_of({"containers": text}) == ""
    assert model_of({"containers": [text, {"env": text}, {"env": [text]}]}) == ""
