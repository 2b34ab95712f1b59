"""The engines' Deployment: what each part of a spec becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleetkeeper.api.names import Component, selector
from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.types import RolloutStrategy
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.digest import digest_of
from fleetkeeper.reconcile.manifests.engine import desired_engine_deployment
from fleetkeeper.reconcile.manifests.engine_document import EngineOptionRefused
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from fleetkeeper.reconcile.manifests.tuning import AS_SPECIFIED, EngineTuning
from tests.support.reconcile.random_specs import service_manifest

CONTEXT = default_context()
COMMIT = "a" * 40


def _deployment(
    profile: str = "cuda",
    tuning: EngineTuning = AS_SPECIFIED,
    strategy: RolloutStrategy = RolloutStrategy.SURGE,
    replicas: int = 1,
    **sections: Any,
) -> Manifest:
    spec = {"model": {"source": "pvc://models/llama"}, **sections}
    service = parse_service(service_manifest(spec))
    template = desired_engine_template(service, CONTEXT.catalog.resolve(profile), CONTEXT, tuning)
    return desired_engine_deployment(service, template, replicas=replicas, strategy=strategy)


def _pod(**arguments: Any) -> Manifest:
    pod: Manifest = _deployment(**arguments)["spec"]["template"]["spec"]
    return pod


def _container(**arguments: Any) -> Manifest:
    (container,) = _pod(**arguments)["containers"]
    return dict(container)


def _env(**arguments: Any) -> dict[str, Any]:
    return {
        entry["name"]: entry.get("value", entry.get("valueFrom"))
        for entry in _container(**arguments)["env"]
    }


def _document(**arguments: Any) -> Manifest:
    document: Manifest = json.loads(_env(**arguments)["FLEETKEEPER_ENGINE"])
    return document


def test_replicas_are_always_written() -> None:
    """An applied field that is left out would return to 1."""
    assert [_deployment(replicas=count)["spec"]["replicas"] for count in (0, 1, 7)] == [0, 1, 7]


def test_an_injected_supervisor_starts_an_unmodified_image() -> None:
    """An init container copies it into a volume; the engine's own image runs it from there."""
    pod = _pod(profile="cuda")
    (install,) = pod["initContainers"]
    (engine,) = pod["containers"]
    assert install["image"] == "fleetkeeper-engine:0.1.0"
    assert install["command"] == ["fleetkeeper-engine", "install", "/opt/fleetkeeper"]
    assert engine["image"] == "vllm/vllm-openai:v0.32.0"
    assert engine["command"] == ["/opt/fleetkeeper/bin/fleetkeeper-engine"]
    assert engine["lifecycle"]["preStop"]["exec"]["command"] == [*engine["command"], "drain"]
    mounts = {m["name"]: m for c in (install, engine) for m in c["volumeMounts"]}
    assert mounts["supervisor"]["readOnly"] is True


def test_a_baked_image_needs_nothing_beside_it() -> None:
    """Our own image holds the supervisor."""
    pod = _pod(profile="cpu")
    assert "initContainers" not in pod
    assert pod["containers"][0]["command"] == ["fleetkeeper-engine"]
    assert all(volume["name"] != "supervisor" for volume in pod["volumes"])


def test_requests_equal_limits_but_for_cpu_beside_an_accelerator() -> None:
    """On cpu profiles the cores are the accelerator."""
    gpu = _container(profile="cuda", engine={"tensorParallelSize": 4})["resources"]
    assert gpu["requests"] == {"cpu": "4", "memory": "32Gi", "nvidia.com/gpu": "4"}
    assert gpu["limits"] == {"memory": "32Gi", "nvidia.com/gpu": "4"}
    cpu = _container(profile="cpu", resources={"cpu": "600m"})["resources"]
    assert cpu["requests"] == cpu["limits"] == {"cpu": "600m", "memory": "16Gi"}


@pytest.mark.parametrize(
    ("written", "kept"),
    [("1000m", "1"), ("0.5", "500m"), ("4096Mi", "4Gi"), ("1e9", "1e9"), ("1.5Gi", "1536Mi")],
)
def test_quantities_are_written_as_the_api_server_writes_them(written: str, kept: str) -> None:
    """Otherwise every reconcile would find a difference."""
    resources = {"cpu": "1", "memory": "64Gi", "sharedMemory": written}
    volumes = {v["name"]: v for v in _pod(profile="cpu", resources=resources)["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": kept}


def test_memory_is_given_to_the_engine_in_bytes() -> None:
    """For the cap on cpu profiles."""
    memory = _document(profile="cpu", resources={"memory": "1.5Gi", "sharedMemory": "1Gi"})
    assert memory["memory"] == {"capPercent": 80, "limitBytes": 1610612736}


def test_a_model_in_a_claim_is_mounted_read_only_and_nothing_is_downloaded() -> None:
    """The claim as a whole, so that the engine reports a missing folder, not the kubelet."""
    pod = _pod()
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["model-0"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["model-0"] == {
        "name": "model-0",
        "mountPath": "/models/models",
        "readOnly": True,
    }
    assert _document()["model"]["source"] == "/models/models/llama"
    assert _env()["HF_HUB_OFFLINE"] == "1"
    assert "cache" not in volumes


@pytest.mark.parametrize(
    ("cache", "volume", "has_group"),
    [
        (None, {"emptyDir": {}}, False),
        ({"ephemeralSize": "102400Mi"}, {"emptyDir": {"sizeLimit": "100Gi"}}, False),
        ({"claimName": "hub"}, {"persistentVolumeClaim": {"claimName": "hub"}}, True),
    ],
)
def test_a_model_of_a_hub_is_downloaded_into_its_cache(
    cache: dict[str, str] | None, volume: Manifest, *, has_group: bool
) -> None:
    """The files of a claim get the pod's group, so that the pod can write them."""
    model = {"source": "hf://acme/model", "revision": COMMIT}
    if cache is not None:
        model |= {"cache": cache}  # type: ignore[dict-item]
    pod = _pod(model=model)
    (found,) = (one for one in pod["volumes"] if one["name"] == "cache")
    assert found == {"name": "cache", **volume}
    assert ("fsGroup" in pod["securityContext"]) is has_group
    assert _env(model=model)["HF_HOME"] == "/cache"
    assert "HF_HUB_OFFLINE" not in _env(model=model)
    document = _document(model=model)["model"]
    assert (document["source"], document["revision"]) == ("acme/model", COMMIT)


@pytest.mark.promise("keys-by-file")
def test_a_token_is_named_and_never_read() -> None:
    """A Secret that is missing shows in the pod's status, because the reference is not optional."""
    model = {
        "source": "hf://acme/model",
        "revision": COMMIT,
        "tokenSecret": {"name": "hf", "key": "t"},
    }
    assert _env(model=model)["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "t"}}


def test_adapters_keep_their_names_places_and_revisions() -> None:
    """Each claim is mounted once."""
    model = {
        "source": "pvc://models/llama",
        "adapters": [
            {"name": "sql", "source": "pvc://models/sql"},
            {"name": "tone", "source": "pvc://other/tone"},
            {"name": "far", "source": "hf://acme/far", "revision": COMMIT},
        ],
    }
    assert _document(model=model)["model"]["adapters"] == [
        {"name": "sql", "path": "/models/models/sql"},
        {"name": "tone", "path": "/models/other/tone"},
        {"name": "far", "path": "acme/far", "revision": COMMIT},
    ]
    claims = [v["name"] for v in _pod(model=model)["volumes"] if v["name"].startswith("model-")]
    assert claims == ["model-0", "model-1"]


def test_an_image_is_mounted_once_and_read_only_whatever_is_taken_from_it() -> None:
    """By its digest: the same digest is the same content, in whichever repository."""
    digest = "a" * 64
    model = {
        "source": f"oci://registry.example.com/llama@sha256:{digest}/base/v1",
        "adapters": [
            {"name": "sql", "source": f"oci://registry.example.com/llama@sha256:{digest}/sql"},
            {"name": "tone", "source": f"oci://localhost:5000/copy@sha256:{digest}"},
        ],
    }
    document = _document(model=model)["model"]
    assert document["source"] == f"/images/{digest}/base/v1"
    assert [one["path"] for one in document["adapters"]] == [
        f"/images/{digest}/sql",
        f"/images/{digest}",
    ]
    reference = f"registry.example.com/llama@sha256:{digest}"
    assert [item for item in _pod(model=model)["volumes"] if "image" in item] == [
        {"name": "model-image-0", "image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
    ]
    mounts = [item for item in _container(model=model)["volumeMounts"] if "image" in item["name"]]
    assert mounts == [{"name": "model-image-0", "mountPath": f"/images/{digest}", "readOnly": True}]


def test_an_adapter_named_like_the_model_is_refused() -> None:
    """Before an accelerator is taken."""
    model = {
        "source": "pvc://models/llama",
        "adapters": [{"name": "chat", "source": "pvc://models/a"}],
    }
    with pytest.raises(EngineOptionRefused, match="rename it"):
        _deployment(model=model)


def test_variables_are_sorted_and_ours_come_from_nobody_else() -> None:
    """The spec's and ours; the pod's UID by the downward API, for the control port."""
    asked = [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "HTTPS_PROXY", "value": ""}]
    env = _container(engine={"env": asked})["env"]
    assert [entry["name"] for entry in env] == sorted(entry["name"] for entry in env)
    assert {"name": "HTTPS_PROXY"} in env
    assert _env()["POD_UID"]["fieldRef"]["fieldPath"] == "metadata.uid"


def test_a_service_cannot_replace_our_variables_even_where_a_profile_lists_them() -> None:
    cuda = CONTEXT.catalog.resolve("cuda")
    listed = cuda.model_copy(update={"env": ("HOME", "POD_UID", "HF_TOKEN")})
    reference = {"secretKeyRef": {"name": "mine", "key": "x"}}
    asked = [{"name": name, "valueFrom": reference} for name in listed.env]
    spec = {
        "model": {"source": "hf://a/b", "revision": COMMIT, "tokenSecret": {"name": "hf"}},
        "engine": {"env": asked},
    }
    service = parse_service(service_manifest(spec))
    template = desired_engine_template(service, listed, CONTEXT)
    assert "mine" not in json.dumps(template)


@pytest.mark.parametrize(
    ("tuning", "sequences", "floor", "cap"),
    [
        (AS_SPECIFIED, 64, 16, 70),
        (EngineTuning(max_sequences=32), 32, 16, 70),
        (EngineTuning(max_sequences=8), 8, 8, 70),
        (EngineTuning(max_sequences=0), 1, 1, 70),
        (EngineTuning(max_sequences=500, cap_percent=80), 64, 16, 70),
        (EngineTuning(cap_percent=65), 64, 16, 65),
        (EngineTuning(cap_percent=1), 64, 16, 10),
    ],
)
def test_a_remedy_only_lowers(tuning: EngineTuning, sequences: int, floor: int, cap: int) -> None:
    """Start-up sequences and the cap, within what the engine takes."""
    document = _document(
        tuning=tuning,
        batching={"minSequences": 16, "maxSequences": 64},
        memory={"capPercent": 70},
    )
    assert document["batching"]["maxSequences"] == sequences
    assert document["batching"]["minSequences"] == floor
    assert document["memory"]["capPercent"] == cap


def test_guessed_tokens_count_against_a_step() -> None:
    """The document has their number."""
    options = {"spec-method": "ngram", "spec-tokens": "4"}
    assert _document(engine={"options": options})["engine"]["speculativeTokens"] == 4
    assert _document()["engine"]["speculativeTokens"] == 0


@pytest.mark.parametrize(("startup_s", "failures"), [(60, 40), (3600, 1220), (86_400, 28_820)])
def test_the_engine_may_start_for_startup_seconds(startup_s: int, failures: int) -> None:
    """And a minute longer, so that the supervisor can report the cause before it is killed."""
    container = _container(rollout={"startupSeconds": startup_s})
    probe = container["startupProbe"]
    assert probe["failureThreshold"] == failures
    assert probe["failureThreshold"] * probe["periodSeconds"] >= startup_s + 60
    assert _document(rollout={"startupSeconds": startup_s})["health"]["startupSeconds"] == startup_s


def test_a_hung_engine_leaves_the_router_within_fifteen_seconds() -> None:
    """Ten seconds until the supervisor reports it, and two probes by the kubelet."""
    probe = _container()["readinessProbe"]
    assert 10 + probe["periodSeconds"] * probe["failureThreshold"] < 15


@pytest.mark.parametrize("drain_s", [0, 10, 120, 3600])
def test_running_requests_may_end_within_drain_seconds(drain_s: int) -> None:
    """The grace period is longer; a hung engine has less, for it has nothing left that could end."""
    rollout = {"drainSeconds": drain_s}
    pod = _pod(rollout=rollout)
    assert pod["terminationGracePeriodSeconds"] == drain_s + 20
    assert pod["containers"][0]["livenessProbe"]["terminationGracePeriodSeconds"] == min(
        30, drain_s + 20
    )
    assert _document(rollout=rollout)["drain"]["seconds"] == drain_s


@pytest.mark.parametrize(
    ("rollout", "strategy", "surge", "unavailable"),
    [
        ({}, RolloutStrategy.SURGE, 1, 0),
        ({}, RolloutStrategy.AUTO, 1, 0),
        ({}, RolloutStrategy.REPLACE, 0, 1),
        ({"maxSurge": 3, "maxUnavailable": 2}, RolloutStrategy.SURGE, 3, 2),
        ({"maxSurge": 3, "maxUnavailable": 2}, RolloutStrategy.REPLACE, 0, 2),
        (
            {"maxSurge": 0, "maxUnavailable": 1, "strategy": "Replace"},
            RolloutStrategy.SURGE,
            0,
            1,
        ),
        ({"maxSurge": "25%", "maxUnavailable": "10%"}, RolloutStrategy.SURGE, "25%", "10%"),
        ({"maxSurge": "25%", "maxUnavailable": "10%"}, RolloutStrategy.REPLACE, 0, "10%"),
        ({"maxSurge": "25%", "maxUnavailable": "0%"}, RolloutStrategy.REPLACE, 0, 1),
    ],
)
def test_the_strategy_says_which_pod_goes_first(
    rollout: dict[str, Any],
    strategy: RolloutStrategy,
    surge: int | str,
    unavailable: int | str,
) -> None:
    """Kubernetes refuses two zeros; so do we never write them."""
    written = _deployment(strategy=strategy, rollout=rollout)["spec"]["strategy"]
    assert written["rollingUpdate"] == {"maxSurge": surge, "maxUnavailable": unavailable}


def test_old_revisions_are_kept_for_a_return() -> None:
    """At least three; and Kubernetes waits for a start and a drain before it calls us stuck."""
    spec = _deployment(rollout={"startupSeconds": 100, "drainSeconds": 50})["spec"]
    assert spec["revisionHistoryLimit"] >= 3
    assert spec["progressDeadlineSeconds"] == 750


def test_an_older_template_is_applied_as_it_is() -> None:
    """The Deployment then uses its old ReplicaSet again."""
    service = parse_service(service_manifest({"model": {"source": "pvc://models/llama"}}))
    old = desired_engine_template(service, CONTEXT.catalog.resolve("cpu"), CONTEXT)
    rolled_back = desired_engine_deployment(service, old, replicas=1)
    assert rolled_back["spec"]["template"] == old
    assert digest_of(rolled_back) != digest_of(_deployment())


@pytest.mark.parametrize(
    "changes",
    [
        {"scaling": {"maxReplicas": 3}},
        {"replicas": 4},
        {"routing": {"policy": "RoundRobin", "replicas": 2}},
        {"networkPolicy": {"preset": "SameNamespace"}},
        {"disruption": {"maxUnavailable": 2}},
        {"rollout": {"maxSurge": 2, "onFailure": "Hold", "engineUpdates": "Automatic"}},
        {"breaker": {"mode": "Disabled"}},
        {"batching": {"mode": "Advisory"}},
        {"objectives": {"attainmentPercent": 90}},
        {"paused": True},
    ],
)
def test_what_concerns_no_engine_restarts_none(changes: dict[str, Any]) -> None:
    """These fields are acted upon from outside the pod."""
    template = _deployment()["spec"]["template"]
    assert _deployment(**changes)["spec"]["template"] == template


def test_labels_of_a_user_never_displace_ours() -> None:
    """The API refuses our prefix; the selector holds even if it did not."""
    deployment = _deployment(podMetadata={"labels": {"team": "a"}, "annotations": {"b": "c"}})
    metadata = deployment["spec"]["template"]["metadata"]
    assert metadata["labels"]["team"] == "a"
    assert metadata["annotations"]["b"] == "c"
    wanted = selector("chat", Component.ENGINE)
    assert deployment["spec"]["selector"]["matchLabels"] == wanted
    assert wanted.items() <= metadata["labels"].items()
    assert metadata["annotations"]["prometheus.io/port"] == "9090"


def test_selectors_of_a_service_never_overlap_and_never_reach_another() -> None:
    """Each selector holds the service and the component."""
    seen = [selector(name, part) for name in ("chat", "code") for part in Component]
    for one in seen:
        assert sum(one.items() <= other.items() for other in seen) == 1
