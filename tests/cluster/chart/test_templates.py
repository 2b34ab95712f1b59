"""The chart, rendered by Helm with many values: what it makes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fleetkeeper.api.profiles.defaults import simulated_catalog
from fleetkeeper.api.profiles.environment import HARMLESS
from fleetkeeper.api.profiles.metadata_names import DEFAULT_ALLOWED
from fleetkeeper.api.profiles.profile import ProfileCatalog
from fleetkeeper.api.profiles.simulation import FaultKind, Simulation
from fleetkeeper.cli import app
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.runtime.plan_context import plan_context
from fleetkeeper.runtime.settings import load_settings
from tests.support.chart.helm_chart import (
    CHART,
    NAMESPACE,
    HelmError,
    helm,
    only,
    rendered,
    template,
)
from tests.support.reconcile.pod_security import violations_of_restricted
from tests.support.reconcile.pod_templates import RDMA_AND_LOGS

ROOT = Path(__file__).parents[3]
STREAMED = ROOT / "examples" / "object-storage"
PROFILE = {
    "accelerator": "cuda",
    "vllmVersion": "0.33.0",
    "delivery": "inject",
    "image": "registry.example.com/vllm@sha256:" + "a" * 64,
    "injectedImage": "fleetkeeper-engine:0.2.0",
}
TRACING: dict[str, Any] = {
    "endpoint": "https://[fd00::7]:4318/v1/traces",
    "protocol": "http",
    "sampleRatio": 0.5,
    "collector": {"cidr": "fd00::7/128", "port": 14318},
}
VALUE_SETS: dict[str, dict[str, Any]] = {
    "control-off": {"control": {"enabled": False}},
    "prometheus-only": {"control": {"directReads": False}},
    "prometheus-with-credentials": {
        "prometheus": {
            "url": "https://prometheus.monitoring:9090",
            "caSecret": {"name": "prometheus-ca", "key": "ca.crt"},
            "tokenSecret": {"name": "prometheus-token", "key": "token"},
        }
    },
    "defaults": {},
    "one-replica": {"replicas": 1},
    "five-replicas": {"replicas": 5},
    "registry": {
        "image": {"repository": "registry.example.com/fleetkeeper", "tag": "1.2.3"},
        "imagePullSecrets": [{"name": "registry"}],
    },
    "digest": {"image": {"digest": "sha256:" + "b" * 64}},
    "one-namespace": {"namespaces": ["team-a"]},
    "two-namespaces": {"namespaces": ["team-a", "team-b"]},
    "no-crds": {"crds": {"enabled": False}},
    "crds-go-too": {"crds": {"keep": False}},
    "own-account": {"serviceAccount": {"create": False, "name": "mine"}, "rbac": {"create": False}},
    "named-account": {"serviceAccount": {"name": "ops", "annotations": {"a": "b"}}},
    "own-keys": {"controlKeys": {"create": False, "secretName": "my-keys"}},
    "named-keys": {"controlKeys": {"secretName": "signing"}},
    "prometheus": {
        "prometheus": {
            "url": "https://prometheus.example.com",
            "peers": [{"cidr": "10.0.0.0/8", "cidrExcept": ["10.1.0.0/16"]}],
            "annotations": False,
        }
    },
    "prometheus-operator": {
        "prometheus": {
            "podMonitor": {"enabled": True, "labels": {"release": "kps"}},
        }
    },
    "prometheus-operator-namespaced": {
        "namespaces": ["team-a"],
        "prometheus": {"podMonitor": {"enabled": True}},
    },
    "nobody-scrapes": {"prometheus": {"peers": []}},
    "new-profile": {
        "engineProfiles": {"cuda-0.33.0-1": PROFILE},
        "engineAliases": {"cuda": "cuda-0.33.0-1"},
    },
    "traced-profile": {"engineProfiles": {"cuda-0.33.0-1": {**PROFILE, "tracing": TRACING}}},
    "no-cpu-profile": {"engineProfiles": {"cpu-0.32.0-1": None}, "engineAliases": {"cpu": None}},
    "simulated": {"simulatedEngines": True},
    "profile-image": {"engineProfiles": {"cpu-0.32.0-1": {"image": "r.example.com/cpu:1"}}},
    "drop-profiles": {"dropProfilesInUse": True},
    "accelerators": {"accelerators": {"max": 64, "maxByNamespace": {"team-a": 8, "*": 2}}},
    "openshift": {
        "securityContext": {"runAsUser": None, "runAsGroup": None},
        "pods": {"user": None, "group": None},
    },
    "narrow-network": {
        "network": {
            "dns": {
                "peers": [
                    {
                        "namespaceLabels": {"kubernetes.io/metadata.name": "kube-system"},
                        "podLabels": {"k8s-app": "kube-dns"},
                    }
                ],
                "tcpPorts": [53],
                "udpPorts": [53],
            },
            "apiServer": {"peers": [{"cidr": "10.0.0.1/32"}], "tcpPorts": [6443]},
            "modelHub": {"peers": [{"cidr": "10.9.0.0/16"}], "tcpPorts": [8443]},
        }
    },
    "object-storage": yaml.safe_load((STREAMED / "values.yaml").read_text()),
    "two-releases": {
        "refuseSecondRelease": False,
        "systemPriorityClasses": True,
        "exposedServiceTypes": ["LoadBalancer"],
    },
    "accounts": {"engineServiceAccounts": ["model-reader", "team-*"]},
    "pod-metadata": {"podMetadataNames": ["example.com/*"]},
    "pod-template": {
        "engineProfiles": {"cuda-0.33.0-1": {**PROFILE, "podTemplate": RDMA_AND_LOGS}},
        "admissionPolicy": {
            "podTemplates": {
                "capabilities": ["IPC_LOCK"],
                "hostNetwork": True,
                "volumeTypes": ["nfs"],
            }
        },
    },
    "no-admission-policy": {"admissionPolicy": {"enabled": False}},
    "no-policies": {"network": {"operatorPolicy": False}, "podDisruptionBudget": False},
    "placement": {
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
        "podLabels": {"team": "platform"},
        "podAnnotations": {"a": "b"},
    },
    "tuned": {
        "workers": 32,
        "requestsInFlight": 64,
        "resyncSeconds": 60,
        "leader": {"durationSeconds": 30, "renewDeadlineSeconds": 20, "retrySeconds": 4},
        "log": {"level": "debug", "format": "console"},
        "floatingRevisions": True,
        "router": {"image": "r.example.com/router:1", "cpu": "1", "memory": "2Gi"},
    },
    "names": {"nameOverride": "keeper", "fullnameOverride": "gpu-keeper"},
}
WORKLOADS = {"Deployment", "Job"}


def _all(name: str) -> list[dict[str, Any]]:
    return rendered(VALUE_SETS[name])


def _settings_files(objects: list[dict[str, Any]]) -> dict[str, str]:
    (config,) = (
        item
        for item in objects
        if item["kind"] == "ConfigMap" and item["metadata"]["name"].endswith("-settings")
    )
    files: dict[str, str] = config["data"]
    return files


def test_there_are_at_least_twenty_value_sets() -> None:
    """And each is rendered by the tests below."""
    assert len(VALUE_SETS) >= 20


def test_lint_finds_nothing() -> None:
    """Not even in strict mode."""
    assert "0 chart(s) failed" in helm("lint", str(CHART), "--strict")


@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_value_set_renders_to_sound_objects(name: str) -> None:
    """Names are unique, the namespace is the release's or a served one, pods are restricted."""
    objects = _all(name)
    keys = [
        (item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"])
        for item in objects
    ]
    assert len(keys) == len(set(keys))
    cluster_wide = {
        "CustomResourceDefinition",
        "ClusterRole",
        "ClusterRoleBinding",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    }
    served = {NAMESPACE, *(VALUE_SETS[name].get("namespaces") or ["kube-public"])}
    for kind, namespace, _ in keys:
        assert (namespace is None) == (kind in cluster_wide)
        assert namespace is None or namespace in served
    for item in objects:
        if item["kind"] in WORKLOADS:
            assert violations_of_restricted(item["spec"]["template"]) == []
            (container,) = item["spec"]["template"]["spec"]["containers"]
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert "cpu" not in container["resources"]["limits"]


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_operator_takes_the_settings_of_every_value_set(name: str, tmp_path: Path) -> None:
    """Rendered keys are those that it reads; files are mounted where it reads them."""
    files = _settings_files(_all(name))
    keys = tmp_path / "jwks.json"
    keys.write_text('{"keys":[]}')
    profiles = tmp_path / "profiles.yaml"
    profiles.write_text(files["profiles.yaml"])
    settings = yaml.safe_load(files["settings.yaml"])
    assert settings["profilesFile"] == "/etc/fleetkeeper/settings/profiles.yaml"
    assert settings["controlJwksFile"] == "/etc/fleetkeeper/control-keys/jwks.json"
    settings |= {"profilesFile": str(profiles), "controlJwksFile": str(keys)}
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    context = plan_context(load_settings(file))
    assert context.catalog.profiles
    assert context.operator_namespace == NAMESPACE
    deployment = next(item for item in _all(name) if item["kind"] == "Deployment")
    pod_labels = deployment["spec"]["template"]["metadata"]["labels"]
    (peer,) = context.operator_peers
    assert peer.pod_labels.items() <= pod_labels.items()


def _settings_file(name: str, directory: Path) -> Path:
    """Write the settings and profiles of a value set, as `check --settings` takes them."""
    files = _settings_files(_all(name))
    profiles, file = directory / "profiles.yaml", directory / "settings.yaml"
    profiles.write_text(files["profiles.yaml"])
    settings = yaml.safe_load(files["settings.yaml"])
    del settings["controlJwksFile"]
    file.write_text(yaml.safe_dump({**settings, "profilesFile": str(profiles)}))
    return file


def test_defaults_are_those_of_render(tmp_path: Path) -> None:
    """What `fleetkeeper render` shows is what a chart with its defaults makes."""
    file = _settings_file("defaults", tmp_path)
    context, default = plan_context(load_settings(file)), default_context()
    assert context.catalog == default.catalog
    assert context.router == default.router
    assert context.security == default.security
    assert context.prometheus_peers == default.prometheus_peers
    assert context.model_hub_rule == default.model_hub_rule
    (ours,), (theirs,) = context.operator_peers, default.operator_peers
    assert theirs.namespace_labels == ours.namespace_labels
    assert theirs.pod_labels.items() <= ours.pod_labels.items()


def test_values_of_a_release_without_pod_templates_render_the_same() -> None:
    """`helm upgrade --reuse-values` has none of the values that are newer than the release."""
    assert rendered({"admissionPolicy": {"podTemplates": None}}) == rendered({})


def test_the_example_of_object_storage_fits_its_values(tmp_path: Path) -> None:
    """Its service is refused by a chart with default values, which has no address for it."""
    file = _settings_file("object-storage", tmp_path)
    context = plan_context(load_settings(file))
    assert context.object_storage_rule is not None
    assert context.object_storage_rule.tcp_ports == (9000,)
    check = ["check", "-f", str(STREAMED / "service.yaml")]
    done = CliRunner().invoke(app, [*check, "--settings", str(file)])
    assert done.exit_code == 0, done.output
    assert "use a new prefix for each version" in done.output
    done = CliRunner().invoke(app, check)
    assert done.exit_code == 64
    assert "has no objectStorage" in done.output


def test_the_crd_is_the_generated_one() -> None:
    """Kept at an uninstallation by default."""
    (source,) = (ROOT / "crds").glob("*.yaml")
    wanted = yaml.safe_load(source.read_text())
    for name, keeps in (("defaults", True), ("crds-go-too", False)):
        found = only(_all(name), "CustomResourceDefinition", wanted["metadata"]["name"])
        annotations = found["metadata"].pop("annotations", None) or {}
        assert ("helm.sh/resource-policy" in annotations) is keeps
        assert found["spec"] == wanted["spec"]
    assert not [item for item in _all("no-crds") if item["kind"] == "CustomResourceDefinition"]


def _rules(objects: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [
        (item, rule)
        for item in objects
        if item["kind"] in {"Role", "ClusterRole"}
        for rule in item["rules"]
    ]


@pytest.mark.promise("no-prompts-no-secrets", "operator-rights", "no-secrets", "smallest-role")
@pytest.mark.parametrize("name", VALUE_SETS)
def test_rights_are_the_smallest_of_their_kind(name: str) -> None:
    """No wildcard, no Secret but to create one by the key job, nothing cluster-scoped to write."""
    for role, rule in _rules(_all(name)):
        for part in ("apiGroups", "resources", "verbs"):
            assert "*" not in rule[part]
        assert "nonResourceURLs" not in rule
        assert not {"escalate", "impersonate", "deletecollection"} & set(rule["verbs"])
        assert not {"pods/exec", "pods/attach", "pods/portforward", "nodes"} & set(
            rule["resources"]
        )
        if "secrets" in rule["resources"]:
            assert role["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
            assert (rule["resources"], rule["verbs"]) == (["secrets"], ["create"])
        if {"roles", "clusterroles"} & set(rule["resources"]):
            assert rule["verbs"] == ["bind"]
            assert len(rule["resourceNames"]) == 1
        assert not {"namespaces", "customresourcedefinitions", "clusterrolebindings"} & set(
            rule["resources"]
        )


@pytest.mark.promise("smallest-role")
@pytest.mark.parametrize("name", ["one-namespace", "two-namespaces"])
def test_namespaced_mode_needs_no_right_on_the_cluster(name: str) -> None:
    """Roles alone, in the served namespaces and the release's own; routers by a Role there."""
    objects = _all(name)
    assert not [item for item in objects if item["kind"].startswith("Cluster")]
    served = VALUE_SETS[name]["namespaces"]
    for namespace in served:
        names = {
            item["metadata"]["name"]
            for item in objects
            if item["kind"] == "Role" and item["metadata"]["namespace"] == namespace
        }
        assert names == {"fleetkeeper", "fleetkeeper-router"}
    settings = yaml.safe_load(_settings_files(objects)["settings.yaml"])
    assert settings["namespaces"] == served
    assert settings["router"]["roleKind"] == "Role"


@pytest.mark.promise("smallest-role")
def test_the_operator_may_bind_exactly_the_role_that_routers_get() -> None:
    """The name in the settings, in the rule and of the role are one."""
    for name in ("defaults", "one-namespace", "names"):
        objects = _all(name)
        settings = yaml.safe_load(_settings_files(objects)["settings.yaml"])
        role = settings["router"]["roleName"]
        kind = settings["router"]["roleKind"]
        assert [
            item for item in objects if (item["kind"], item["metadata"]["name"]) == (kind, role)
        ]
        (bind,) = (rule for _, rule in _rules(objects) if rule["verbs"] == ["bind"])
        assert bind["resourceNames"] == [role]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("namespaces", "kind"), [([], "ClusterRole"), (["a"], "Role")])
def test_routers_keep_their_role_as_long_as_services_are_kept(
    namespaces: list[str], kind: str, keep: bool
) -> None:
    """`helm uninstall` leaves it with the CRD: routers of services that serve on go on to find engines."""
    objects = rendered({"namespaces": namespaces, "crds": {"keep": keep}})
    role = only(objects, kind, "fleetkeeper-router")
    policy = (role["metadata"].get("annotations") or {}).get("helm.sh/resource-policy")
    assert policy == ("keep" if keep else None)


def test_keys_are_made_by_a_job_that_can_do_nothing_else() -> None:
    """No key is rendered, so a GitOps tool sees the same text every time."""
    assert template({}) == template({})
    objects = rendered({})
    assert not [item for item in objects if item["kind"] == "Secret"]
    job = only(objects, "Job", "fleetkeeper-control-keys")
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == [
        "signing-keys",
        "create",
        "--secret=fleetkeeper-control-keys",
        f"--namespace={NAMESPACE}",
    ]
    own = _all("own-keys")
    assert not [item for item in own if item["metadata"]["name"].endswith("-control-keys")]
    volumes = only(own, "Deployment", "fleetkeeper")["spec"]["template"]["spec"]["volumes"]
    assert [v["secret"]["secretName"] for v in volumes if "secret" in v] == ["my-keys"]


def test_a_traced_profile_reaches_the_operator_as_the_values_say() -> None:
    found = _catalog("traced-profile").resolve("cuda-0.33.0-1").tracing
    assert found is not None
    assert found.to_manifest() == {
        **TRACING,
        "collector": {**TRACING["collector"], "namespaceLabels": {}, "podLabels": {}},
    }


def _catalog(name: str) -> ProfileCatalog:
    """The profiles of a value set."""
    text = only(_all(name), "ConfigMap", "fleetkeeper-settings")["data"]["profiles.yaml"]
    return ProfileCatalog.model_validate(yaml.safe_load(text))


def test_simulated_engines_are_off_unless_the_administrator_allows_them() -> None:
    """With their alias and their image in the admission policy."""
    image = "fleetkeeper-engine-simulated:0.1.0"
    assert _catalog("defaults") == default_context().catalog
    assert _catalog("simulated") == simulated_catalog()
    assert image not in _policy_list({}, "images")
    assert image in _policy_list(VALUE_SETS["simulated"], "images")


def test_a_simulated_profile_of_ones_own_is_off_too() -> None:
    """Whatever the schema takes, the operator takes."""
    simulation = {
        "hardware": "h100-70b",
        "costs": dict.fromkeys(
            (f"{name}Seconds" for name in ("t0", "w", "g", "b", "c", "q", "request")), 0.001
        ),
        "kvCapacityTokens": 4096,
        "speed": 10,
        "seed": 3,
        "startSeconds": {"weights": 5, "load": 1.5, "warmUp": 0},
        "faults": [{"kind": kind, "afterSeconds": 60} for kind in FaultKind],
    }
    own = {**simulated_catalog().resolve("simulated").to_manifest(), "simulation": simulation}
    name = "simulated-0.32.0-9"
    values = {
        "engineProfiles": {name: {key: value for key, value in own.items() if key != "name"}},
        "engineAliases": {"slow": name},
    }

    def catalog(of: dict[str, Any]) -> ProfileCatalog:
        data = only(rendered(of), "ConfigMap", "fleetkeeper-settings")["data"]
        return ProfileCatalog.model_validate(yaml.safe_load(data["profiles.yaml"]))

    assert catalog(values) == default_context().catalog
    found = catalog({**values, "simulatedEngines": True}).resolve("slow").simulation
    assert found == Simulation.model_validate(simulation)


def test_an_upgrade_and_a_rollback_ask_first_whether_a_profile_is_in_use() -> None:
    """By a job before it, which has its profiles by then, unless forced."""
    for kind in ("ConfigMap", "Job"):
        hooked = only(_all("new-profile"), kind, "fleetkeeper-profiles")["metadata"]["annotations"]
        assert set(hooked["helm.sh/hook"].split(",")) == {"pre-upgrade", "pre-rollback"}
    assert not [
        item for item in _all("drop-profiles") if item["metadata"]["name"] == "fleetkeeper-profiles"
    ]


def test_a_change_of_settings_restarts_the_operator() -> None:
    """It reads them at its start."""

    def checksum(values: dict[str, Any]) -> str:
        pod = only(rendered(values), "Deployment", "fleetkeeper")["spec"]["template"]
        return str(pod["metadata"]["annotations"]["checksum/settings"])

    assert checksum({}) == checksum({"replicas": 3})
    assert checksum({}) != checksum({"workers": 17})
    assert checksum({}) != checksum(VALUE_SETS["new-profile"])


def _policy_list(values: dict[str, Any], variable: str) -> list[str]:
    """A list in the admission policy for pods."""
    policy = only(rendered(values), "ValidatingAdmissionPolicy", "fleetkeeper-restricted-pods")
    found = {item["name"]: item["expression"] for item in policy["spec"]["variables"]}
    names: list[str] = json.loads(found[variable])
    return names


def test_the_policy_allows_the_variables_from_secrets_that_profiles_allow() -> None:
    """A profile without `env` allows the operator's default, which the chart repeats."""
    exact = {
        name
        for profile in default_context().catalog.profiles
        for name in profile.env
        if not name.endswith("*")
    }
    assert set(_policy_list({}, "secretVariables")) == {"HF_TOKEN", *exact}
    own = {"engineProfiles": {"cpu-0.32.0-1": {"env": ["AWS_ACCESS_KEY_ID", "NCCL_*"]}}}
    assert set(_policy_list(own, "secretVariables")) == {"HF_TOKEN", "AWS_ACCESS_KEY_ID", *exact}
    none: dict[str, Any] = {"cpu-0.32.0-1": {"env": []}, "cuda-0.32.0-1": {"env": []}}
    assert _policy_list({"engineProfiles": none}, "secretVariables") == ["HF_TOKEN"]
    keys = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert keys <= set(_policy_list(VALUE_SETS["object-storage"], "secretVariables"))


def test_the_policy_knows_the_accounts_that_the_operator_allows() -> None:
    assert _policy_list({}, "accounts") == []
    values = VALUE_SETS["accounts"]
    assert _policy_list(values, "accounts") == values["engineServiceAccounts"]


def test_the_policy_knows_the_labels_and_annotations_that_the_operator_allows() -> None:
    assert set(DEFAULT_ALLOWED) <= set(_policy_list({}, "metadata"))
    values = VALUE_SETS["pod-metadata"]
    assert not set(DEFAULT_ALLOWED) & set(_policy_list(values, "metadata"))
    assert "example.com/" in _policy_list(values, "metadataPrefixes")


def test_the_policy_names_the_variables_that_services_may_set() -> None:
    """One by one: also those of a prefix, and never those that load code if a profile lists them."""
    names = set(_policy_list({}, "names"))
    assert {name for name in HARMLESS if name.startswith("NCCL_")} <= names
    assert not {name for name in HARMLESS if name.startswith("VLLM_")} & names
    listed = ["VLLM_*", "HF_ENDPOINT", "LD_PRELOAD"]
    own = {"engineProfiles": {"cpu-0.32.0-1": {"env": listed, "variables": {"LD_PRELOAD": "a"}}}}
    names = set(_policy_list(own, "names"))
    assert {name for name in HARMLESS if name.startswith("VLLM_")} <= names
    assert not {"HF_ENDPOINT", "LD_PRELOAD"} & names
    assert "LD_PRELOAD=a" in _policy_list(own, "values")


def test_the_policy_holds_images_to_the_repositories_of_models() -> None:
    assert _policy_list({}, "repositories") == [""]
    values = {"admissionPolicy": {"modelRepositories": ["registry.example.com/models/"]}}
    assert _policy_list(values, "repositories") == ["registry.example.com/models/"]


def test_rules_are_made_when_asked_for() -> None:
    """One PrometheusRule for each file of rules, each with its groups; none otherwise."""
    asked = rendered({"prometheus": {"rules": {"enabled": True}, "alerts": {"enabled": True}}})
    rules = [item for item in asked if item["kind"] == "PrometheusRule"]
    assert len(rules) == len(list((CHART / "files" / "rules").glob("*.yaml"))) > 0
    assert all(group["rules"] for item in rules for group in item["spec"]["groups"])
    assert not [item for item in _all("defaults") if item["kind"] == "PrometheusRule"]


def test_prometheus_credentials_are_mounted_where_the_settings_look_for_them() -> None:
    """CA and token come from Secrets, by file, and stand in no setting."""
    values = {
        "prometheus": {
            "url": "https://prometheus.monitoring:9090",
            "caSecret": {"name": "prometheus-ca", "key": "ca.crt"},
            "tokenSecret": {"name": "prometheus-token", "key": "token"},
        }
    }
    objects = rendered(values)
    settings = yaml.safe_load(_settings_files(objects)["settings.yaml"])
    pod = only(objects, "Deployment", "fleetkeeper")["spec"]["template"]["spec"]
    mounts = {item["name"]: item["mountPath"] for item in pod["containers"][0]["volumeMounts"]}
    secrets = {item["name"]: item.get("secret", {}).get("secretName") for item in pod["volumes"]}
    for name, setting, key in (
        ("prometheus-ca", "prometheusCaFile", "ca.crt"),
        ("prometheus-token", "prometheusTokenFile", "token"),
    ):
        assert settings[setting] == f"{mounts[name]}/{key}"
        assert secrets[name] == name


def test_monitors_are_made_only_when_asked_for() -> None:
    """Their kinds may not exist in the cluster."""
    group = "monitoring.coreos.com/v1"
    assert not [item for item in _all("defaults") if item["apiVersion"] == group]
    monitors = [item for item in _all("prometheus-operator") if item["kind"] == "PodMonitor"]
    parts = {
        item["spec"]["selector"]["matchLabels"].get("fleetkeeper.io/component") for item in monitors
    }
    assert parts == {"engine", "router", None}
    assert all(item["metadata"]["labels"]["release"] == "kps" for item in monitors)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engineServiceAccounts": ["a*b"]}, "engineServiceAccounts"),
        ({"podMetadataNames": ["a b"]}, "podMetadataNames"),
        ({"admissionPolicy": {"modelRepositories": ["registry.example.com/mod"]}}, "pattern"),
        ({"replica": 2}, "replica"),
        ({"image": {"name": "x"}}, "name"),
        ({"replicas": 0}, "replicas"),
        ({"log": {"level": "trace"}}, "level"),
        ({"prometheus": {"url": "prometheus:9090"}}, "url"),
        ({"prometheus": {"peers": [{}]}}, "peers"),
        ({"prometheus": {"caSecret": {"name": "x"}}}, "caSecret"),
        ({"prometheus": {"tokenSecret": {"key": "x"}}}, "tokenSecret"),
        ({"namespaces": ["Team A"]}, "namespaces"),
        ({"engineProfiles": {"cuda": PROFILE}}, "does not match pattern"),
        ({"engineProfiles": {"cuda-0.33.0-1": {"image": "x"}}}, "cuda-0.33.0-1"),
        (
            {"engineProfiles": {"cuda-0.33.0-1": {**PROFILE, "delivery": "baked"}}},
            "cuda-0.33.0-1",
        ),
        (
            {
                "engineProfiles": {
                    "cuda-0.33.0-1": {
                        **PROFILE,
                        "tracing": {**TRACING, "endpoint": "collector:4317"},
                    }
                }
            },
            "endpoint",
        ),
        (
            {
                "engineProfiles": {
                    "cuda-0.33.0-1": {**PROFILE, "tracing": {**TRACING, "sampleratio": 1}}
                }
            },
            "sampleratio",
        ),
        (
            {"engineProfiles": {"cuda-0.33.0-1": {**PROFILE, "maxCapPercent": 96}}},
            "cuda-0.33.0-1",
        ),
        (
            {"engineProfiles": {"cuda-0.33.0-1": {**PROFILE, "extraArguments": ["seed=1"]}}},
            "cuda-0.33.0-1",
        ),
        (
            {"engineProfiles": {"cuda-0.33.0-1": {**PROFILE, "podTemplate": {"containers": []}}}},
            "cuda-0.33.0-1",
        ),
        (
            {"engineProfiles": {"simulated-0.32.0-1": {"simulation": {"hardware": "h100"}}}},
            "hardware",
        ),
        ({"engineProfiles": {"simulated-0.32.0-1": {"simulation": {"speed": 0}}}}, "speed"),
        ({"admissionPolicy": {"podTemplates": {"containers": ["engine"]}}}, "containers"),
        ({"admissionPolicy": {"podTemplates": {"capabilities": ["ALL"]}}}, "capabilities"),
        ({"admissionPolicy": {"podTemplates": {"volumeTypes": ["projected"]}}}, "volumeTypes"),
        ({"engineAliases": {"cuda": "cuda-9.9.9-1"}}, "not in engineProfiles"),
        ({"engineProfiles": {"cpu-0.32.0-1": None}}, "not in engineProfiles"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name is required"),
        ({"controlKeys": {"create": False}}, "controlKeys.secretName is required"),
        ({"network": {"dns": {"peers": [{"cidr": "10.0.0.0/8"}]}}}, "dns"),
        ({"securityContext": {"runAsUser": 0}}, "runAsUser"),
        ({"pods": {"user": 0}}, "user"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    """Before anything reaches a cluster, naming what is wrong."""
    with pytest.raises(HelmError, match=message):
        rendered(values)


def test_every_value_is_in_the_schema_and_every_section_is_closed() -> None:
    """A misspelt value never vanishes."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert schema["additionalProperties"] is False
    assert set(values) == set(schema["properties"]) - {"global"}
    for name, part in schema["properties"].items():
        if "properties" in part:
            assert part["additionalProperties"] is False, name
            assert set(values[name]) <= set(part["properties"]), name


def test_dashboards_are_made_when_asked_for() -> None:
    """One ConfigMap for each file, as it is, with the label that Grafana's sidecar looks for."""
    asked = rendered(
        {
            "prometheus": {
                "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Fleet"}}
            }
        }
    )
    files = [*(CHART / "files" / "dashboards").glob("*.json")]
    assert len(files) == 3
    for file in files:
        made = only(asked, "ConfigMap", f"fleetkeeper-dashboard-{file.stem}")
        assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert made["metadata"]["annotations"] == {"grafana_folder": "Fleet"}
        assert made["data"] == {f"fleetkeeper-{file.name}": file.read_text()}
    plain = {item["metadata"]["name"] for item in _all("defaults") if item["kind"] == "ConfigMap"}
    assert not [name for name in plain if "dashboard" in name]
