"""Simulated engines: the profile, what the operator leaves out for them, and where it says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from pydantic import ValidationError

from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.profiles.defaults import simulated_catalog
from fleetkeeper.api.profiles.errors import profile_errors
from fleetkeeper.api.profiles.object_storage import ObjectStorage
from fleetkeeper.api.profiles.profile import EgressPeer, EngineProfile, effective_resources
from fleetkeeper.api.profiles.simulation import HARDWARE, Simulation
from fleetkeeper.api.profiles.tracing import Collector, Tracing
from fleetkeeper.common.budget import accelerators_of
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import MODEL_HUB, PlanContext, default_context
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from fleetkeeper.reconcile.status.gauges import gauges_of_service
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_engine.simulation import Simulation as EngineSimulation
from fleetkeeper_engine.spec import parse_document
from fleetkeeper_steps.hardware import known_hardware
from tests.support.reconcile.plan_cluster import settle
from tests.support.reconcile.plan_world import new_world, plan_of, service, with_spec
from tests.support.reconcile.random_specs import random_services

CONTEXT = replace(default_context(), catalog=simulated_catalog(), model_hub_rule=MODEL_HUB)
PROFILE = CONTEXT.catalog.resolve("simulated")
SIMULATED: dict[str, Any] = {"engine": {"profile": "simulated"}}
COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
COSTS = {
    "t0Seconds": 0.001,
    "wSeconds": 0.002,
    "gSeconds": 0.00002,
    "bSeconds": 0.0,
    "cSeconds": 0.0,
    "qSeconds": 0.0,
    "requestSeconds": 0.01,
}
EVERYTHING: dict[str, Any] = {
    "hardware": "h200-70b-fp8",
    "costs": COSTS,
    "kvCapacityTokens": 100_000,
    "speed": 20,
    "seed": 7,
    "startSeconds": {"weights": 3, "load": 2, "warmUp": 0.5},
    "faults": [{"kind": "Freeze", "afterSeconds": 60}, {"kind": "Crash"}],
}
MODELS: dict[str, dict[str, Any]] = {
    "claim": {"source": "pvc://models/llama"},
    "hub": {
        "source": "hf://example/llama",
        "revision": COMMIT,
        "tokenSecret": {"name": "hf"},
        "cache": {"claimName": "hub-cache"},
    },
    "ephemeral cache": {
        "source": "hf://example/llama",
        "revision": COMMIT,
        "cache": {"ephemeralSize": "10Gi"},
    },
    "object storage": {"source": "s3://models/llama", "credentialsSecret": "s3"},
    "image": {"source": f"oci://registry.example.com/llama@sha256:{'a' * 64}"},
    "adapters": {
        "source": "pvc://models/llama",
        "adapters": [
            {"name": "sql", "source": "pvc://adapters/sql"},
            {"name": "law", "source": "hf://example/law", "revision": COMMIT},
        ],
    },
}


def profile(**change: Any) -> EngineProfile:
    """The chart's simulated profile with another content."""
    return EngineProfile.model_validate({**PROFILE.to_manifest(), **change})


def context(of: EngineProfile) -> PlanContext:
    """The settings with another simulated profile of the same name."""
    others = tuple(item for item in CONTEXT.catalog.profiles if item.name != of.name)
    catalog = CONTEXT.catalog.model_copy(update={"profiles": (*others, of)})
    return replace(CONTEXT, catalog=catalog)


def document(of: EngineProfile) -> dict[str, Any]:
    """The engine document of a service with this profile."""
    template = desired_engine_template(parse_service(service(**SIMULATED)), of, context(of))
    variables = {item["name"]: item.get("value") for item in _engine(template)["env"]}
    found: dict[str, Any] = json.loads(variables["FLEETKEEPER_ENGINE"])
    return found


def _engine(template: Manifest) -> Manifest:
    engine: Manifest
    (engine,) = template["spec"]["containers"]
    return engine


def _values(value: object, key: str) -> Iterator[Any]:
    """Yield what any map inside the value has under this key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from _values(inner, key)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(inner, key)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"accelerator": "cuda"}, "simulated requires accelerator cpu"),
        ({"delivery": "inject", "injectedImage": "x"}, "simulated requires delivery baked"),
        ({"objectStorage": {}}, "remove objectStorage"),
        ({"simulated": False, "simulation": {}}, "simulation requires simulated: true"),
        ({"simulation": {"hardware": "h100"}}, r"simulation\.hardware.*\n.*'h100' is unknown"),
        ({"simulation": {"speed": 0}}, r"simulation\.speed"),
        ({"simulation": {"speed": 1001}}, r"simulation\.speed"),
        ({"simulation": {"speed": float("nan")}}, r"simulation\.speed"),
        ({"simulation": {"kvCapacityTokens": 15}}, r"simulation\.kvCapacityTokens"),
        ({"simulation": {"costs": {"t0Seconds": 1}}}, r"simulation\.costs\.wSeconds"),
        ({"simulation": {"costs": {**COSTS, "bSeconds": -1}}}, r"costs\.bSeconds"),
        ({"simulation": {"faults": [{"kind": "Fire"}]}}, r"simulation\.faults\.0\.kind"),
        ({"simulation": {"faults": [{"kind": "Crash"}] * 9}}, r"simulation\.faults"),
        ({"simulation": {"startSeconds": {"warm_ups": 1}}}, r"startSeconds\.warm_ups"),
    ],
)
def test_a_simulated_profile_that_does_not_fit_is_refused(
    change: dict[str, Any], words: str
) -> None:
    """With the profile's or the field's name."""
    with pytest.raises(ValidationError, match=words):
        profile(**change)


def test_only_the_simulators_hardware_is_known() -> None:
    assert set(HARDWARE) == set(known_hardware())


@pytest.mark.parametrize("simulation", [None, {}, EVERYTHING])
def test_the_engine_gets_every_value_of_the_simulation(simulation: dict[str, Any] | None) -> None:
    """Defaults too, so that those of a newer engine change nothing. The engine reads the same ones."""
    written = document(profile(**({} if simulation is None else {"simulation": simulation})))
    read = parse_document(json.dumps(written)).simulation
    assert read is not None
    dumped = read.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert written["simulation"] == dumped
    assert dumped == Simulation.model_validate(simulation or {}).to_manifest()


def test_the_engine_has_the_same_fields_and_bounds() -> None:
    """Except that hardware is a known name here, and that speed has a smallest value."""

    def bounds(schema: dict[str, Any]) -> dict[tuple[str, str], set[tuple[str, Any]]]:
        found = {}
        for name, part in {"": schema, **schema.pop("$defs")}.items():
            for key, field in part.get("properties", {}).items():
                ways = field.get("anyOf", [field])
                found[name, key] = {
                    (kind, way[kind])
                    for way in ways
                    for kind in ("type", "minimum", "maximum", "maxItems")
                    if kind in way and (key, kind) != ("speed", "minimum") and way[kind] != "null"
                }
        return found

    ours = bounds(Simulation.model_json_schema(by_alias=True))
    assert ours == bounds(EngineSimulation.model_json_schema(by_alias=True))


def test_other_engines_get_no_section() -> None:
    assert "simulation" not in document(CONTEXT.catalog.resolve("cpu"))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_simulated_engine_gets_nothing_of_the_model(model: dict[str, Any]) -> None:
    """Neither volumes nor Secrets nor addresses; it still has the model's name and source."""
    chat = parse_service(service(**SIMULATED, model=model))
    assert profile_errors(chat.spec, PROFILE) == []
    children = desired_children(chat, PROFILE, CONTEXT, replicas=2)
    (template,) = (
        child["spec"]["template"]
        for child in children
        if child["kind"] == "Deployment" and child["metadata"]["name"] == "chat"
    )
    names = {volume["name"] for volume in template["spec"]["volumes"]}
    assert names == {"control", "home", "shared-memory", "tmp"}
    assert {mount["name"] for mount in _engine(template)["volumeMounts"]} == names
    assert not [*_values(template, "secretKeyRef")]
    assert "fsGroup" not in template["spec"]["securityContext"]
    (policy,) = (child for child in children if child["metadata"]["name"] == "chat-fk-engine" and child["kind"] == "NetworkPolicy")  # fmt: skip
    assert "Egress" in policy["spec"]["policyTypes"]
    assert "egress" not in policy["spec"]
    assert "Egress" in policy["spec"]["policyTypes"]
    assert template["metadata"]["labels"]["fleetkeeper.io/simulated"] == "true"


def test_no_random_spec_gives_a_simulated_engine_a_volume_or_a_device() -> None:
    """Properties over whatever the API accepts."""
    for chat in random_services(seed=31, count=60):
        template = desired_engine_template(chat, PROFILE, CONTEXT)
        for volume in template["spec"]["volumes"]:
            assert set(volume) - {"name"} <= {"configMap", "emptyDir"}
        resources = _engine(template)["resources"]
        assert set(resources) == {"limits", "requests"}
        assert set(resources["requests"]) <= {"cpu", "memory", "ephemeral-storage"}
        assert "resourceClaims" not in template["spec"]
        variables = {item["name"]: item.get("value", "") for item in _engine(template)["env"]}
        assert not variables.keys() & {"HF_TOKEN", "HF_HOME", "AWS_ACCESS_KEY_ID"}
        assert parse_document(variables["FLEETKEEPER_ENGINE"]).simulation is not None


def test_processors_are_not_limited_because_steps_end_at_planned_times() -> None:
    template = desired_engine_template(parse_service(service(**SIMULATED)), PROFILE, CONTEXT)
    resources = _engine(template)["resources"]
    assert resources == {
        "limits": {"memory": "256Mi"},
        "requests": {"cpu": "50m", "memory": "256Mi"},
    }


def test_a_peer_of_the_profile_needs_dns_too() -> None:
    """Traces and egress of the profile are the administrator's, as for other engines."""
    tracing = Tracing(
        endpoint="http://collector.observability:4317",
        collector=Collector(pod_labels={"app": "collector"}),
    )
    chat = parse_service(service(**SIMULATED, model=MODELS["hub"]))
    for change in ({"tracing": tracing}, {"egress": (EgressPeer(cidr="10.0.0.0/8"),)}):
        of = PROFILE.model_copy(update=change)
        policy = desired_children(chat, of, context(of), replicas=1)[1]
        dns, peer = policy["spec"]["egress"]
        assert {port["port"] for port in dns["ports"]} == {53}
        assert peer["to"]


def test_a_service_for_gpus_needs_no_change_but_its_profile() -> None:
    """Accelerators, claims and ranks of the spec have no effect."""
    asked = parse_service(
        service(
            engine={"profile": "simulated", "tensorParallelSize": 2},
            resources={
                "accelerator": {"count": 2},
                "claims": [{"name": "nic", "resourceClaimName": "nic"}],
                "memory": "1Gi",
            },
        )
    )
    assert profile_errors(asked.spec, PROFILE) == []
    template = desired_engine_template(asked, PROFILE, CONTEXT)
    assert "resourceClaims" not in template["spec"]
    assert _engine(template)["resources"] == {
        "limits": {"memory": "1Gi"},
        "requests": {"cpu": "50m", "memory": "1Gi"},
    }
    variables = {item["name"]: item.get("value", "") for item in _engine(template)["env"]}
    assert parse_document(variables["FLEETKEEPER_ENGINE"]).engine.tensor_parallel_size == 1
    cpu = CONTEXT.catalog.resolve("cpu")
    paths = [error.path for error in profile_errors(asked.spec, cpu)]
    assert paths == ["spec.resources.accelerator", "spec.engine.tensorParallelSize"]


def test_simulated_replicas_take_nothing_of_a_gpu_budget() -> None:
    chat = parse_service(service(**SIMULATED))
    asked = parse_service(service(**SIMULATED, resources={"accelerator": {}})).spec
    for spec in (chat.spec, asked):
        assert effective_resources(spec, PROFILE).accelerators == 0


def test_a_profile_with_an_accelerator_resource_tests_a_gpu_budget() -> None:
    """Claims stay without effect: the operator cannot know what they hold for an engine without a model."""
    of = profile(resources={"acceleratorResource": "nvidia.com/gpu", "cpu": "50m"})
    for resources in ({}, {"claims": [{"name": "nic", "resourceClaimName": "nic"}]}):
        asked = parse_service(
            service(engine={"profile": "simulated", "tensorParallelSize": 2}, resources=resources)
        )
        assert effective_resources(asked.spec, of).accelerators == 2
        template = desired_engine_template(asked, of, context(of))
        assert accelerators_of(template["spec"]) == 2
        found = _engine(template)["resources"]
        assert found["limits"]["nvidia.com/gpu"] == found["requests"]["nvidia.com/gpu"] == "2"
        assert "cpu" not in found["limits"]
    other = {"accelerator": {"resource": "amd.com/gpu"}}
    asked = parse_service(service(**SIMULATED, resources=other))
    assert (
        _engine(desired_engine_template(asked, of, context(of)))["resources"]["limits"][
            "amd.com/gpu"
        ]
        == "1"
    )


def test_object_storage_of_other_profiles_is_still_required() -> None:
    streamed = parse_service(service(model=MODELS["object storage"])).spec
    cuda = CONTEXT.catalog.resolve("cuda")
    assert [error.path for error in profile_errors(streamed, cuda)] == ["spec.model.source"]
    storage = cuda.model_copy(update={"object_storage": ObjectStorage()})
    assert profile_errors(streamed, storage) == []


def test_a_new_model_is_not_downloaded_before_simulated_engines_are_replaced() -> None:
    """As it is with a shared cache for engines that load it."""
    before = settle(
        replace(new_world(**SIMULATED, model=MODELS["hub"], replicas=2), context=CONTEXT)
    )
    newer = {**MODELS["hub"], "revision": "b" * 40}
    after = settle(with_spec(before, model=newer))
    assert (Kind.JOB, "chat-fk-prefetch") not in after.children
    (text,) = (
        item["value"]
        for item in _engine(after.manifests[Kind.DEPLOYMENT, "chat"]["spec"]["template"])["env"]
        if item["name"] == "FLEETKEEPER_ENGINE"
    )
    assert json.loads(text)["model"]["revision"] == "b" * 40
    ready = after.condition("Ready")
    assert ready is not None
    assert ready[0] == "True"


def test_status_and_metrics_say_simulated_and_nothing_is_written_at_rest() -> None:
    """Services of other profiles have neither the field nor the series."""
    world = settle(replace(new_world(**SIMULATED, replicas=3), context=CONTEXT))
    assert world.status["engine"] == {
        "profile": "simulated-0.32.0-1",
        "requested": "simulated",
        "version": "0.32.0",
        "simulated": True,
    }
    plan = plan_of(world)
    assert (plan.actions, plan.status) == ((), None)
    assert ("service_simulated", (), 1.0) in gauges_of_service({}, world.status, 0)
    real = settle(new_world(replicas=1))
    assert "simulated" not in real.status["engine"]
    assert "service_simulated" not in {name for name, *_ in gauges_of_service({}, real.status, 0)}


@pytest.mark.parametrize("engine", [None, [], "x", {"simulated": "yes"}, {"simulated": 1}])
def test_an_invented_status_is_not_simulated(engine: object) -> None:
    status = MappingProxyType({"engine": engine})
    assert "service_simulated" not in {name for name, *_ in gauges_of_service({}, status, 0)}
