"""Live objects become lean records; what is missing or strange is unknown, never an error."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.adapters.kubernetes.pod_records import event_record
from fleetkeeper.adapters.kubernetes.records import seen
from fleetkeeper.common.nodes import ANY_NODE, NodeNeeds
from fleetkeeper.reconcile.observe.pod_problems import engine_line
from fleetkeeper.reconcile.types import (
    Job,
    Kind,
    ObjectCondition,
    Pod,
    Revision,
    SecretUse,
    Workload,
)
from fleetkeeper_contract import rfc3339
from fleetkeeper_kube.reading import version_of

Live = dict[str, Any]

POD: Live = {
    "metadata": {
        "name": "chat-abc-1",
        "namespace": "a",
        "uid": "p1",
        "resourceVersion": "41",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"fleetkeeper.io/service": "chat", "fleetkeeper.io/component": "engine"},
        "annotations": {
            "fleetkeeper.io/template-hash": "7f3a",
            "controller.kubernetes.io/pod-deletion-cost": "-7",
        },
        "ownerReferences": [{"kind": "ReplicaSet", "uid": "r1", "controller": True}],
    },
    "spec": {"nodeName": "gpu-1"},
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.7",
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:10Z"},
        ],
        "containerStatuses": [
            {
                "name": "engine",
                "ready": True,
                "restartCount": 2,
                "state": {"running": {}},
                "lastState": {
                    "terminated": {"exitCode": 72, "reason": "Error", "message": "out of memory"}
                },
            }
        ],
    },
}


def test_a_pod() -> None:
    found = seen("Pod", POD)
    pod = found.record
    assert (found.version, found.service, found.name) == (41, "chat", "chat-abc-1")
    assert isinstance(pod, Pod)
    assert (pod.revision_uid, pod.template_hash, pod.deletion_cost) == ("r1", "7f3a", -7)
    assert (pod.ready, pod.scheduled, pod.ip, pod.node) == (True, True, "10.0.0.7", "gpu-1")
    assert pod.ready_since is not None
    assert pod.ready_since - pod.created == 10.0
    (container,) = pod.containers
    assert container.restarts == 2
    assert container.last_terminated is not None
    assert container.last_terminated.exit_code == 72
    assert container.last_terminated.message == "out of memory"


def test_the_secrets_of_a_pods_variables_are_kept_and_oddities_are_not() -> None:
    reference = {"name": "proxy", "key": "url"}
    env = [
        {"name": "HTTPS_PROXY", "valueFrom": {"secretKeyRef": reference}},
        {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "PLAIN", "value": "x"},
        {"name": 7, "valueFrom": {"secretKeyRef": {"name": None, "key": []}}},
        {"valueFrom": "garbage"},
        "garbage",
    ]
    spec = {"containers": [{"env": env}, {"env": env[0]}, 3]}
    found = seen("Pod", {**POD, "spec": spec}).record
    assert isinstance(found, Pod)
    assert found.secret_uses == (SecretUse("HTTPS_PROXY", "proxy", "url"), SecretUse("", "", ""))
    many = {"containers": [{"env": env[:1] * 1000}]}
    crowded = seen("Pod", {**POD, "spec": many}).record
    assert isinstance(crowded, Pod)
    assert len(crowded.secret_uses) == 64


def test_the_images_that_a_pod_mounts_are_kept_and_oddities_are_not() -> None:
    volumes = [
        {"name": "model-image-0", "image": {"reference": "registry.example.com/a"}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "odd", "image": {"reference": 7}},
        {"name": "odder", "image": "garbage"},
        "garbage",
    ]
    found = seen("Pod", {**POD, "spec": {"volumes": volumes}}).record
    assert isinstance(found, Pod)
    assert found.image_volumes == ("registry.example.com/a",)
    crowded = seen("Pod", {**POD, "spec": {"volumes": volumes[:1] * 1000}}).record
    assert isinstance(crowded, Pod)
    assert len(crowded.image_volumes) == 33


def test_the_engines_last_word_is_kept_however_much_output_it_quotes() -> None:
    line = json.dumps(
        {"class": "BadEngineOption", "code": 64, "message": "vLLM refuses it", "detail": "x" * 3000}
    )
    assert engine_line(last_message(line)) == {
        "class": "BadEngineOption",
        "message": "vLLM refuses it",
    }


def test_a_termination_message_of_any_shape_is_a_record() -> None:
    """It comes from a container and passes the reflector, on which every service depends."""
    for text in ('{"class":' + "[" * 4000, '{"class": [1, {}], "message": {"a": 1}}', "\x00\ud800"):
        assert len(last_message(text)) <= 2 * 1024 + 64


def test_of_a_containers_log_the_end_is_kept() -> None:
    """Kubernetes falls back to the log's last lines, and the last of them says most."""
    assert last_message("start\n" * 400 + "killed").endswith("killed")


def last_message(text: str) -> str:
    """What is kept of a termination message."""
    pod = copy.deepcopy(POD)
    (status,) = pod["status"]["containerStatuses"]
    status["lastState"]["terminated"]["message"] = text
    record = seen("Pod", pod).record
    assert isinstance(record, Pod)
    ended = record.containers[0].last_terminated
    assert ended is not None
    return ended.message


@pytest.mark.parametrize(
    ("container", "turned", "ejected"),
    [
        ({"started": True, "state": {"running": {"startedAt": "2026-01-01T00:01:00Z"}}}, 120, True),
        ({"started": False, "state": {"running": {"startedAt": "2026-01-01T00:01:00Z"}}}, 120, False),
        ({"started": True, "state": {"running": {"startedAt": "2026-01-01T00:01:00Z"}}}, 5, False),
        ({"started": True, "state": {"running": {"startedAt": "2026-01-01T00:02:00Z"}}}, 120, False),
        ({"started": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}, 120, False),
        ({"started": True, "state": {"running": {}}}, 120, False),
        ({"started": True, "ready": True, "state": {"running": {"startedAt": "2026-01-01T00:01:00Z"}}}, 120, False),
    ],
    ids=[
        "ready once, then not",
        "never started",
        "not ready yet since before its run",
        "restarted when it turned",
        "ended",
        "no time",
        "another container",
    ],
)  # fmt: skip
def test_a_pod_that_its_own_readiness_takes_out_is_told_from_one_that_starts(
    container: dict[str, Any], turned: int, ejected: bool
) -> None:
    """The container runs, had started, and Ready turned False in that run."""
    at = f"2026-01-01T00:{turned // 60:02}:{turned % 60:02}Z"
    condition = {"type": "Ready", "status": "False", "lastTransitionTime": at}
    row = {"name": "engine", "ready": False, **container}
    live = {
        "metadata": POD["metadata"],
        "status": {"conditions": [condition], "containerStatuses": [row]},
    }
    pod = seen("Pod", live).record
    assert isinstance(pod, Pod)
    assert pod.ejected_since == (rfc3339.parse(at) if ejected else None)
    assert not pod.ready


def test_a_pod_that_found_no_place() -> None:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/8 nodes are available: 8 Insufficient nvidia.com/gpu.",
    }
    live = {"metadata": POD["metadata"], "status": {"conditions": [condition]}}
    pod = seen("Pod", live).record
    assert isinstance(pod, Pod)
    assert "Insufficient nvidia.com/gpu" in pod.unschedulable
    assert (pod.ready, pod.ready_since, pod.scheduled) == (False, None, False)


DEPLOYMENT: Live = {
    "metadata": {
        "name": "chat",
        "namespace": "a",
        "uid": "d1",
        "resourceVersion": "50",
        "generation": 4,
        "labels": {"fleetkeeper.io/service": "chat"},
        "managedFields": [
            {
                "manager": "fleetkeeper",
                "operation": "Apply",
                "time": "2026-01-01T00:00:00Z",
                "fieldsV1": {"f:spec": {"f:replicas": {}, "f:minReadySeconds": {}}},
            }
        ],
    },
    "spec": {
        "replicas": 3,
        "minReadySeconds": 5,
        "strategy": {"rollingUpdate": {"maxSurge": 1}},
        "template": {"metadata": {"annotations": {"fleetkeeper.io/template-hash": "7f3a"}}},
    },
    "status": {
        "observedGeneration": 4,
        "replicas": 3,
        "readyReplicas": 2,
        "conditions": [{"type": "Available", "status": "True", "reason": "Enough"}],
    },
}


def test_a_deployment() -> None:
    workload = seen(Kind.DEPLOYMENT, DEPLOYMENT).record
    assert isinstance(workload, Workload)
    assert (workload.template_hash, workload.max_surge) == ("7f3a", 1)
    assert (workload.desired_replicas, workload.replicas_manager) == (3, "fleetkeeper")
    assert (workload.ready_replicas, workload.updated_replicas) == (2, 0)
    assert workload.conditions == (ObjectCondition("Available", "True", "Enough"),)


def test_a_deployment_names_the_model_of_its_engines() -> None:
    """However long its name is: a part of it would look like another model."""
    source = f"{'x' * 300}/model"
    document = json.dumps({"model": {"source": source, "revision": "c1"}})
    env = [{"name": "FLEETKEEPER_ENGINE", "value": document}]
    pod = {"containers": [{"name": "added"}, {"name": "engine", "env": env}]}
    live = {"metadata": {}, "spec": {"template": {"spec": pod}}}
    workload = seen(Kind.DEPLOYMENT, live).record
    assert isinstance(workload, Workload)
    assert workload.model == f"{source}@c1"


def test_a_deployment_says_what_its_pods_need_of_a_node() -> None:
    required: Live = {"nodeSelectorTerms": [{"matchFields": []}]}
    pod = {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"operator": "Exists", "key": "spot"}],
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required},
            "podAffinity": {},
        },
        "containers": [{"resources": {"limits": {"nvidia.com/gpu": "2", "cpu": "4"}}}, {}],
        "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "fast-nic"}],
    }
    assert _needs(pod) == NodeNeeds(
        frozenset({"nvidia.com/gpu", "fast-nic"}),
        frozenset({("gpu", "h100")}),
        '{"nodeSelectorTerms":[{"matchFields":[]}]}',
        frozenset({'{"key":"spot","operator":"Exists"}'}),
    )
    assert _needs({}) == ANY_NODE


def _needs(pod: Live) -> NodeNeeds:
    live = {"metadata": {}, "spec": {"template": {"spec": pod}}}
    workload = seen(Kind.DEPLOYMENT, live).record
    assert isinstance(workload, Workload)
    return workload.node_needs


@pytest.mark.parametrize(
    ("conditions", "end"),
    [
        (None, None),
        ("strange", None),
        ([{"type": "Suspended", "status": "True"}], None),
        ([{"type": "FailureTarget", "status": "True"}], None),
        ([{"type": "Complete", "status": "False"}], None),
        (
            [
                {"type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded"},
                {"type": "Failed", "status": "True", "reason": "DeadlineExceeded"},
            ],
            ObjectCondition("Failed", "True", "DeadlineExceeded"),
        ),
        ([{"type": "Complete", "status": "True"}], ObjectCondition("Complete", "True")),
    ],
)
def test_a_job_has_ended_if_kubernetes_says_so(
    conditions: object, end: ObjectCondition | None
) -> None:
    job = seen(Kind.JOB, {"metadata": {}, "status": {"conditions": conditions}}).record
    assert isinstance(job, Job)
    assert job.end == end


@pytest.mark.parametrize(("surge", "known"), [("25%", None), (None, None), ("0%", 0), (0, 0)])
def test_a_surge_is_known_if_it_is_a_number_or_nothing(surge: object, known: int | None) -> None:
    spec = {"strategy": {"rollingUpdate": {"maxSurge": surge}}}
    workload = seen(Kind.DEPLOYMENT, {"metadata": {}, "spec": spec}).record
    assert isinstance(workload, Workload)
    assert workload.max_surge == known


def test_a_digest_is_not_taken_anew_while_nothing_of_it_can_have_changed() -> None:
    before = seen(Kind.DEPLOYMENT, DEPLOYMENT)
    moved = {**DEPLOYMENT, "status": {"readyReplicas": 3}, "spec": {"replicas": 3}}
    after = seen(Kind.DEPLOYMENT, moved, before)
    assert isinstance(before.record, Workload)
    assert isinstance(after.record, Workload)
    assert after.record.digest == before.record.digest


@pytest.mark.parametrize(
    "change",
    [
        {"generation": 5},
        {"labels": {"fleetkeeper.io/service": "chat", "x": "y"}},
        {"annotations": {"a": "b"}},
        {"ownerReferences": [{"uid": "u1", "controller": True}]},
        {"managedFields": []},
        {"uid": "d2"},
    ],
)
def test_whatever_can_change_a_digest_has_it_taken_anew(change: Live) -> None:
    before = seen(Kind.DEPLOYMENT, DEPLOYMENT)
    live = {"metadata": {**DEPLOYMENT["metadata"], **change}, "spec": {"minReadySeconds": 9}}
    after = seen(Kind.DEPLOYMENT, live, before)
    assert after.mark != before.mark
    assert after.record == seen(Kind.DEPLOYMENT, live).record


def test_a_revision() -> None:
    live = {
        "metadata": {
            "name": "chat-abc",
            "uid": "r1",
            "annotations": {"deployment.kubernetes.io/revision": "7"},
            "ownerReferences": [{"uid": "d1", "controller": True}],
        },
        "spec": {"replicas": 0},
    }
    revision = seen("ReplicaSet", live).record
    assert isinstance(revision, Revision)
    assert (revision.number, revision.deployment_uid, revision.desired_replicas) == (7, "d1", 0)


def test_an_event() -> None:
    live = {
        "involvedObject": {"uid": "p1"},
        "reason": "FailedMount",
        "message": "m",
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    found = event_record(live)
    assert (found.pod_uid, found.reason) == ("p1", "FailedMount")
    assert found.seen > 0


@pytest.mark.parametrize("text", [None, 7, "", "yesterday", "2026-99-99T00:00:00Z", {}])
def test_a_time_that_cannot_be_read_is_unknown(text: object) -> None:
    assert rfc3339.parse(text) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "phase": JSON,
        "podIP": JSON,
        "conditions": st.lists(JSON, max_size=3) | st.none(),
        "containerStatuses": st.lists(JSON, max_size=3) | st.none(),
    },
)


@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ["affinity", "containers", "nodeSelector", "resourceClaims", "tolerations"], JSON
        ),
    )
)
def test_a_template_of_any_shape_is_survived(pod: Live) -> None:
    assert isinstance(_needs(pod), NodeNeeds)


@given(PARTS)
def test_a_status_of_any_shape_is_survived(status: Live) -> None:
    """Lists of anything, values of any type: whoever may write a pod's status must not stop us."""
    statuses = [s for s in status.get("containerStatuses") or [] if isinstance(s, dict)]
    for found in statuses:
        found.pop("state", None)
        found.pop("lastState", None)
    assert isinstance(seen("Pod", {"metadata": POD["metadata"], "status": status}).record, Pod)


@pytest.mark.parametrize("text", ["", "abc", None])
def test_a_version_that_is_no_number_is_the_oldest(text: object) -> None:
    assert version_of({"metadata": {"resourceVersion": text}}) == 0
