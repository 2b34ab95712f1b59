"""A podTemplate of an engine profile, from the profile to the pods and to `fleetkeeper check`."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from fleetkeeper import cli
from fleetkeeper.api.names import Component, labels
from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.profiles.errors import profile_errors
from fleetkeeper.api.profiles.pod_template import (
    OWNED_ENGINE_FIELDS,
    OWNED_PATHS,
    OWNED_POD_FIELDS,
    OWNED_VARIABLES,
)
from fleetkeeper.api.profiles.profile import EngineProfile, ProfileCatalog
from fleetkeeper.common.budget import accelerators_of
from fleetkeeper.reconcile.context import PlanContext, default_context
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from tests.support.reconcile.golden_services import CASES
from tests.support.reconcile.plan_cluster import settle
from tests.support.reconcile.plan_world import new_world, service
from tests.support.reconcile.pod_templates import PROFILE, RDMA_AND_LOGS

NAME = str(PROFILE["name"])


def a_profile(template: object, **fields: Any) -> EngineProfile:
    return EngineProfile.model_validate({**PROFILE, "podTemplate": template, **fields})


def a_pod(**spec: Any) -> dict[str, Any]:
    return {"spec": spec}


def an_engine(**fields: Any) -> dict[str, Any]:
    return a_pod(containers=[{"name": "engine", **fields}])


def with_profile(template: object) -> PlanContext:
    default = default_context()
    catalog = ProfileCatalog(
        profiles=(*default.catalog.profiles, a_profile(template)), aliases=default.catalog.aliases
    )
    return replace(default, catalog=catalog)


def chat(**spec: Any) -> dict[str, Any]:
    return service(**{"engine": {"profile": NAME}, **spec})


def built(template: object, **spec: Any) -> dict[str, Any]:
    """The pod template of the engines."""
    return desired_engine_template(
        parse_service(chat(**spec)), a_profile(template), default_context()
    )


def test_pods_carry_what_the_template_adds() -> None:
    pod = built(RDMA_AND_LOGS)
    engine, logs = pod["spec"]["containers"]
    assert logs["name"] == "logs"
    assert engine["resources"]["limits"]["rdma/hca_shared_devices_a"] == "1"
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert engine["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert engine["volumeMounts"][-1] == {"name": "vllm-logs", "mountPath": "/var/log/vllm"}
    assert {"name": "vllm-logs", "emptyDir": {"sizeLimit": "1Gi"}} in pod["spec"]["volumes"]
    assert pod["spec"]["tolerations"] == [{"key": "rdma", "operator": "Exists"}]
    assert pod["metadata"]["labels"]["team"] == "platform"
    assert labels("chat", Component.ENGINE).items() <= pod["metadata"]["labels"].items()


def test_everything_that_fleetkeeper_makes_stays_as_it_was() -> None:
    """Each value of the pod without the template is in the pod with it, except replaced lists."""
    without, with_it = built(None), built(RDMA_AND_LOGS)
    mark = "fleetkeeper.io/template-hash"
    assert without["metadata"]["annotations"].pop(mark) != with_it["metadata"]["annotations"][mark]
    assert missing(without, with_it) == []


def missing(part: Any, whole: Any, path: str = "") -> list[str]:
    """The values of a part that the whole lacks. Items of lists have a place or a name."""
    if isinstance(part, dict):
        return [
            text
            for key, item in part.items()
            for text in missing(
                item, whole.get(key) if isinstance(whole, dict) else None, f"{path}.{key}"
            )
        ]
    if isinstance(part, list) and part and isinstance(part[0], dict):
        return [
            f"{path}: {item}"
            for item in part
            if not any(missing(item, other) == [] for other in whole)
        ]
    return [] if part == whole else [path]


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_profile_without_a_template_leaves_every_pod_as_it_was(name: str) -> None:
    """An upgrade restarts nothing: golden files pin the hashes; an empty template adds nothing either."""
    case = CASES[name]
    profile = case.context.catalog.resolve(case.service().spec.engine.profile)
    pod = desired_engine_template(case.service(), profile, case.context)
    empty = profile.model_copy(update={"pod_template": {}})
    assert profile.pod_template is None
    assert desired_engine_template(case.service(), empty, case.context) == pod


REFUSED: dict[str, tuple[object, str]] = {
    **{
        f"the engine's {field}": (an_engine(**{field: "x"}), f"containers[engine].{field} {why}")
        for field, why in OWNED_ENGINE_FIELDS.items()
    },
    **{
        f"the pod's {field}": (a_pod(**{field: "x"}), f"spec.{field} {why}")
        for field, why in OWNED_POD_FIELDS.items()
    },
    **{
        f"the variable {name}": (
            an_engine(env=[{"name": name, "value": "x"}]),
            f"env[{name}] is set by Fleetkeeper",
        )
        for name in (*sorted(OWNED_VARIABLES), "FLEETKEEPER_ENGINE")
    },
    **{
        f"the mount {path}": (
            a_pod(
                containers=[{"name": "engine", "volumeMounts": [{"name": "v", "mountPath": path}]}],
                volumes=[{"name": "v", "emptyDir": {}}],
            ),
            "which Fleetkeeper mounts",
        )
        for path in (*OWNED_PATHS, "/", "/opt", "//tmp/", "/home/engine/x", "/tmp/../models/a")
    },
    **{
        f"the volume {name}": (
            a_pod(volumes=[{"name": name, "emptyDir": {}}]),
            "has the name of a volume of Fleetkeeper",
        )
        for name in ("control", "home", "shared-memory", "tmp", "supervisor", "cache", "model-0")
    },
    "a variable of the profile": (
        an_engine(env=[{"name": "HF_ENDPOINT", "value": "x"}]),
        "is set by variables of the profile",
    ),
    "a variable of the operator in a sidecar": (
        a_pod(
            containers=[
                {
                    "name": "a",
                    "image": "i",
                    "env": [{"name": "FLEETKEEPER_ACCELERATORS", "value": "0"}],
                }
            ]
        ),
        "is set by Fleetkeeper",
    ),
    "memory": (
        an_engine(resources={"limits": {"memory": "1Gi"}}),
        "limits.memory is set by resources of services",
    ),
    "cores": (an_engine(resources={"requests": {"cpu": 1}}), "requests.cpu is set by resources"),
    "GPUs": (
        an_engine(resources={"limits": {"nvidia.com/gpu": 2}}),
        "is set by resources.accelerator of services",
    ),
    "GPUs of a sidecar": (
        a_pod(
            containers=[
                {"name": "a", "image": "i", "resources": {"limits": {"nvidia.com/mig-1g.5gb": 1}}}
            ]
        ),
        "is set by resources.accelerator of services",
    ),
    "the accelerator of the profile": (
        an_engine(resources={"limits": {"example.com/accelerator": 1}}),
        "is set by resources.accelerator of services",
    ),
    "claims": (an_engine(resources={"claims": [{"name": "x"}]}), "is set by resources.claims"),
    "a port of the engine": (
        an_engine(ports=[{"containerPort": 8000}]),
        "has the number or name of a port of the engine",
    ),
    "a port of the engine in a sidecar": (
        a_pod(containers=[{"name": "a", "image": "i", "ports": [{"containerPort": 9090}]}]),
        "has the number or name of a port of the engine",
    ),
    "the install container": (
        a_pod(initContainers=[{"name": "install", "image": "x"}]),
        "has the name of a container of Fleetkeeper",
    ),
    "the engine as an init container": (
        a_pod(initContainers=[{"name": "engine", "image": "x"}]),
        "has the name of a container of Fleetkeeper",
    ),
    "one name twice": (
        a_pod(
            initContainers=[{"name": "a", "image": "x"}], containers=[{"name": "a", "image": "x"}]
        ),
        "has the name of an init container",
    ),
    "a sidecar without an image": (a_pod(containers=[{"name": "a"}]), "has no image"),
    "a mount of an unknown volume": (
        an_engine(volumeMounts=[{"name": "model-0", "mountPath": "/x"}]),
        "names no volume of podTemplate",
    ),
    "a relative mount": (
        an_engine(volumeMounts=[{"name": "home", "mountPath": "x"}]),
        "is not an absolute path",
    ),
    "an owned label": (
        {"metadata": {"labels": {"fleetkeeper.io/service": "x"}}},
        "metadata.labels.fleetkeeper.io/service is set by Fleetkeeper",
    ),
    "an owned annotation": (
        {"metadata": {"annotations": {"prometheus.io/port": "1"}}},
        "metadata.annotations.prometheus.io/port is set by Fleetkeeper",
    ),
    "the deletion cost": (
        {"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "1"}}},
        "is set by Fleetkeeper",
    ),
    "a malformed label": ({"metadata": {"labels": {"a": "b c"}}}, "not a valid value of a label"),
    "a name of the pod": ({"metadata": {"name": "x"}}, "metadata.name is not supported"),
    "a misspelled field": (a_pod(toleration=[]), "spec.toleration is not supported"),
    "a whole Pod": ({"kind": "Pod"}, "podTemplate.kind is not supported"),
    "a deletion": (
        a_pod(containers=[{"name": "engine", "$patch": "delete"}]),
        "$patch is a directive of strategic merge",
    ),
    "a replacement": (a_pod(**{"nodeSelector": {}, "$patch": "replace"}), "only adds and changes"),
    "kept keys": (a_pod(volumes=[{"name": "a", "$retainKeys": ["name"]}]), "only adds and changes"),
    "null": (an_engine(env=None), "env is null, which would delete"),
    "a default": (a_pod(hostNetwork=False), "hostNetwork is false, which is the default"),
    "an empty text": (an_engine(imagePullPolicy=""), 'is "", which is the default'),
    "an item without its key": (
        an_engine(env=[{"value": "x"}]),
        "env[0] has no name, by which it is merged",
    ),
    "an item that is no map": (a_pod(containers=["engine"]), "containers[0] has no name"),
    "an item twice": (
        an_engine(env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
        "env has A twice",
    ),
    "a map for a list": (a_pod(containers={"name": "engine"}), "containers must be a list"),
    "a list for a map": ({"spec": []}, "podTemplate.spec must be a map"),
    "a number for a text": (
        an_engine(env=[{"name": "A", "value": 1}]),
        "is not a string; put it in quotes",
    ),
    "a number for a label": ({"metadata": {"labels": {"a": 1}}}, "is not a string"),
    "no quantity": (
        a_pod(
            containers=[{"name": "a", "image": "i", "resources": {"limits": {"memory": "much"}}}]
        ),
        "is not a quantity",
    ),
    "a volume with two sources": (
        a_pod(volumes=[{"name": "a", "emptyDir": {}, "hostPath": {"path": "/x"}}]),
        "must have a name and one source",
    ),
    "too much": (
        {"metadata": {"annotations": {f"a{number}": "x" * 1000 for number in range(40)}}},
        "is longer than",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_profile_with_what_fleetkeeper_owns_is_refused(what: str) -> None:
    template, says = REFUSED[what]
    resources = {"acceleratorResource": "example.com/accelerator"}
    with pytest.raises(ValidationError) as refused:
        a_profile(template, variables={"HF_ENDPOINT": "https://a"}, resources=resources)
    assert says in str(refused.value)
    assert "podTemplate" in str(refused.value)


def test_every_key_of_the_engine_container_that_fleetkeeper_sets_is_owned_or_merged_by_name() -> (
    None
):
    """A field that Fleetkeeper begins to set is not open by mistake."""
    merged = {"name", "env", "ports", "resources", "securityContext", "volumeMounts"}
    pod = built(None)["spec"]
    assert set(pod["containers"][0]) - merged <= set(OWNED_ENGINE_FIELDS)
    opened = {"containers", "initContainers", "volumes", "securityContext", "affinity"}
    opened |= {"nodeSelector", "tolerations", "topologySpreadConstraints", "imagePullSecrets"}
    assert set(pod) - opened <= set(OWNED_POD_FIELDS)


def test_every_volume_path_port_and_variable_of_every_engine_is_owned() -> None:
    for case in CASES.values():
        profile = case.context.catalog.resolve(case.service().spec.engine.profile)
        pod = desired_engine_template(case.service(), profile, case.context)["spec"]
        for volume in pod["volumes"]:
            with pytest.raises(ValidationError, match="of a volume of Fleetkeeper"):
                a_profile(a_pod(volumes=[{"name": volume["name"], "emptyDir": {}}]))
        for mount in pod["containers"][0]["volumeMounts"]:
            mounts = [{"name": "home", "mountPath": mount["mountPath"]}]
            with pytest.raises(ValidationError, match="which Fleetkeeper mounts"):
                a_profile(an_engine(volumeMounts=mounts))
        for port in pod["containers"][0]["ports"]:
            with pytest.raises(ValidationError, match="of a port of the engine"):
                a_profile(an_engine(ports=[{"containerPort": port["containerPort"]}]))
            with pytest.raises(ValidationError, match="of a port of the engine"):
                a_profile(an_engine(ports=[{"containerPort": 5000, "name": port["name"]}]))
        for entry in pod["containers"][0]["env"]:
            if entry["name"].startswith(("FLEETKEEPER_", "HF_H", "HOME", "POD", "USER")):
                with pytest.raises(ValidationError, match="is set by Fleetkeeper"):
                    a_profile(an_engine(env=[{"name": entry["name"], "value": "x"}]))


def test_quantities_and_references_get_the_form_of_the_api_server() -> None:
    profile = a_profile(
        a_pod(
            containers=[
                {
                    "name": "a",
                    "image": "i",
                    "ports": [{"containerPort": 2020}],
                    "resources": {"limits": {"cpu": 0.5, "memory": "1024Mi"}},
                    "env": [
                        {"name": "P", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
                    ],
                }
            ],
            volumes=[{"name": "v", "emptyDir": {"sizeLimit": "1024Mi"}}],
        )
    )
    (added,) = (profile.pod_template or {})["spec"]["containers"]
    assert added["resources"]["limits"] == {"cpu": "500m", "memory": "1Gi"}
    assert added["ports"] == [{"protocol": "TCP", "containerPort": 2020}]
    assert added["env"][0]["valueFrom"]["fieldRef"]["apiVersion"] == "v1"
    assert (profile.pod_template or {})["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] == "1Gi"
    assert EngineProfile.model_validate(profile.to_manifest()) == profile


def test_network_devices_are_no_accelerators_of_the_gpu_budget() -> None:
    many = copy.deepcopy(RDMA_AND_LOGS)
    many["spec"]["containers"][0]["resources"]["limits"]["rdma/hca_shared_devices_a"] = 8
    assert accelerators_of(built(many)["spec"]) == 1
    assert accelerators_of(built(None)["spec"]) == 1


def test_a_service_cannot_ask_for_what_the_template_sets() -> None:
    profile = a_profile(RDMA_AND_LOGS)
    resource = {"resource": "rdma/hca_shared_devices_a", "count": 1}
    errors = profile_errors(parse_service(chat(resources={"accelerator": resource})).spec, profile)
    assert [error.path for error in errors] == ["spec.resources.accelerator.resource"]
    engine = {"profile": NAME, "env": [{"name": "NCCL_IB_HCA", "value": "mlx5_1"}]}
    (error,) = profile_errors(parse_service(chat(engine=engine)).spec, profile)
    assert f"NCCL_IB_HCA is set by the engine profile {NAME}" in error.message


def test_the_controller_writes_it_once_and_is_settled() -> None:
    world = settle(replace(new_world(), resource=chat(), context=with_profile(RDMA_AND_LOGS)))
    pod = built(RDMA_AND_LOGS)
    assert (
        world.engine.template_hash == pod["metadata"]["annotations"]["fleetkeeper.io/template-hash"]
    )


def test_huge_pages_are_devices() -> None:
    pages = {"hugepages-2Mi": "64Mi"}
    (engine,) = built(an_engine(resources={"limits": pages, "requests": pages}))["spec"][
        "containers"
    ]
    assert engine["resources"]["limits"]["hugepages-2Mi"] == "64Mi"
    assert engine["resources"]["limits"]["memory"]


def test_users_cannot_set_it() -> None:
    (file,) = (Path(__file__).parents[3] / "crds").glob("*.yaml")
    assert "podTemplate:" not in file.read_text()


def check(tmp_path: Path, template: object, **spec: Any) -> Any:
    profiles, settings, file = (tmp_path / name for name in ("p.yaml", "s.yaml", "chat.yaml"))
    profiles.write_text(
        yaml.safe_dump({"profiles": [{**PROFILE, "podTemplate": template}], "aliases": {}})
    )
    settings.write_text(yaml.safe_dump({"profilesFile": str(profiles)}))
    file.write_text(json.dumps(chat(**spec)))
    return CliRunner().invoke(cli.app, ["check", "-f", str(file), "--settings", str(settings)])


def test_check_shows_what_the_template_adds(tmp_path: Path) -> None:
    shown = check(tmp_path, RDMA_AND_LOGS, placement={"tolerations": [{"key": "gpu"}]})
    assert shown.exit_code == 0, shown.output
    for part in (
        "pod template adds containers logs",
        "adds volumes vllm-logs, vllm-logging",
        "rdma/hca_shared_devices_a 1",
        "capabilities.add IPC_LOCK",
        "sets labels team",
        "request 0.1 CPU cores and 0.1 GiB in each replica, outside the memory cap",
        "placement.tolerations is replaced by the podTemplate",
    ):
        assert part in shown.output
    plain = check(tmp_path, None)
    assert "pod template" not in plain.output


def test_check_refuses_a_catalog(tmp_path: Path) -> None:
    refused = check(tmp_path, a_pod(restartPolicy="Never"))
    assert refused.exit_code != 0
    assert "podTemplate.spec.restartPolicy is set by Fleetkeeper" in refused.output
