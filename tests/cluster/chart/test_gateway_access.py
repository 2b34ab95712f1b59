"""What the gateway of the chart may read, and whom it may reach."""

from __future__ import annotations

import pytest
import yaml

from fleetkeeper.adapters.engine import CONTROL_PORT
from fleetkeeper.reconcile.manifests.common import ROUTER_PORT, SERVING_PORT
from tests.support.chart.gateway_chart import (
    BATCH,
    KEYS,
    NAME,
    REDIS,
    USAGE,
    Live,
    environment,
    gateway_objects,
    gateway_values,
    pod_of,
)
from tests.support.chart.helm_chart import NAMESPACE, HelmError, only, rendered
from tests.support.gateway.gateway_world import MARK_RULES, MARKS

SERVED = {"namespaces": ["team-a", "team-b"]}


def _rights(objects: list[Live], account: str) -> set[tuple[str, str, str]]:
    """Return (namespace, resource, verb) of all that a ServiceAccount may do; * for the cluster.

    A resource with a name is one object of it.
    """
    roles = {
        (o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]): o["rules"]
        for o in objects
        if o["kind"] in {"Role", "ClusterRole"}
    }
    found = set()
    for item in objects:
        if item["kind"] not in {"RoleBinding", "ClusterRoleBinding"}:
            continue
        if account not in [s["name"] for s in item["subjects"] if s["kind"] == "ServiceAccount"]:
            continue
        namespace = item["metadata"].get("namespace")
        for rule in roles[item["roleRef"]["kind"], namespace, item["roleRef"]["name"]]:
            found |= {
                (namespace or "*", f"{resource} {name}".rstrip(), verb)
                for resource in rule["resources"]
                for name in rule.get("resourceNames", [""])
                for verb in rule["verbs"]
            }
    return found


READ = ("get", "list", "watch")


def _read(namespaces: list[str], *resources: str) -> set[tuple[str, str, str]]:
    return {(n, resource, verb) for n in namespaces for resource in resources for verb in READ}


def _marks() -> set[tuple[str, str, str]]:
    resource = f"configmaps {MARKS}"
    return {(NAMESPACE, resource, verb) for verb in ("list", "watch", "patch")}


@pytest.mark.promise("gateway-reads")
@pytest.mark.parametrize(("values", "served"), [({}, ["*"]), (SERVED, SERVED["namespaces"])])
def test_rights_are_to_read_services_and_the_keys_and_to_patch_wake_marks(
    values: Live, served: list[str]
) -> None:
    """Secrets only where the keys are; pods only for the process that reads engines."""
    objects = rendered(gateway_values("batch", **values))
    keys = _read([KEYS], "secrets")
    assert _rights(objects, NAME) == _read(served, "inferenceservices") | keys | _marks()
    assert _rights(objects, BATCH) == _read(served, "inferenceservices") | keys
    assert _rights(objects, USAGE) == _read(served, "pods")
    assert only(objects, "Role", MARKS)["rules"] == MARK_RULES
    if values:
        assert not [item for item in objects if item["kind"].startswith("Cluster")]


def test_the_namespace_of_the_keys_outlives_the_release() -> None:
    namespace = only(gateway_objects("defaults"), "Namespace", KEYS)
    assert namespace["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert environment(gateway_objects("defaults"))["KEYS_NAMESPACE"] == KEYS
    own = gateway_objects("own-keys")
    assert not [item for item in own if item["kind"] == "Namespace"]
    assert environment(own)["KEYS_NAMESPACE"] == "clients"
    assert ("clients", "secrets", "watch") in _rights(own, NAME)


@pytest.mark.parametrize(
    ("namespace", "others"), [(NAMESPACE, {}), ("team-a", SERVED), ("team-b", SERVED)]
)
def test_keys_are_never_where_other_secrets_are(namespace: str, others: Live) -> None:
    """The gateway reads every Secret there: signing keys in the one, a tenant's in the other."""
    values = {"gateway": {"enabled": True, "keys": {"namespace": namespace}}, **others}
    with pytest.raises(HelmError, match=f"gateway.keys.namespace is {namespace}"):
        rendered(values)


def test_in_anonymous_mode_the_gateway_may_read_no_secret() -> None:
    services = _read(["*"], "inferenceservices")
    assert _rights(gateway_objects("anonymous"), NAME) == services | _marks()


def test_a_namespaced_operator_may_read_and_create_wake_marks_and_change_none() -> None:
    """RBAC cannot restrict create requests by name."""
    own = {
        right
        for right in _rights(rendered(gateway_values("defaults", **SERVED)), "fleetkeeper")
        if right[0] == NAMESPACE and right[1].startswith("configmaps")
    }
    resource = f"configmaps {MARKS}"
    assert own == {(NAMESPACE, "configmaps", "create")} | {
        (NAMESPACE, resource, verb) for verb in ("list", "watch")
    }


def test_an_upgrade_resets_no_wake_mark() -> None:
    """Helm leaves fields alone that no revision of the chart has set."""
    marks = only(gateway_objects("defaults"), "ConfigMap", MARKS)
    assert marks.keys() == {"apiVersion", "kind", "metadata"}
    assert marks["metadata"]["namespace"] == NAMESPACE


def test_operator_and_gateway_use_the_same_wake_marks() -> None:
    """Without the gateway, or with batches alone, nothing could hold a request."""
    objects = rendered(gateway_values("defaults", fullnameOverride="keeper"))
    settings = yaml.safe_load(
        only(objects, "ConfigMap", "keeper-settings")["data"]["settings.yaml"]
    )
    assert settings["wakeMarks"] == "keeper-wake-marks"
    assert only(objects, "ConfigMap", "keeper-wake-marks")
    found = environment(objects, "keeper-gateway")
    assert found["WAKE_MARKS"] == f"{NAMESPACE}/keeper-wake-marks"
    assert "WAKE_MARKS" not in environment(objects, "keeper-gateway-usage")
    for without in ({}, gateway_values("batch-alone")):
        assert "wake-marks" not in yaml.safe_dump(rendered(without))


def _policy(name: str, policy: str) -> Live:
    spec: Live = only(gateway_objects(name), "NetworkPolicy", policy)["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    return spec


def _ports(rule: Live) -> set[int]:
    return {port["port"] for port in rule["ports"]}


def _services_rule(rule: Live) -> tuple[str, set[int]] | None:
    """Return the component of services that an egress rule allows, and its ports."""
    for peer in rule.get("to", ()):
        labels = peer.get("podSelector", {}).get("matchLabels", {})
        if labels.get("app.kubernetes.io/managed-by") == "fleetkeeper":
            assert peer["namespaceSelector"] == {}
            return labels["fleetkeeper.io/component"], _ports(rule)
    return None


def test_the_network_lets_each_process_reach_what_it_needs() -> None:
    """Requests go to routers and engines, usage comes from control ports; neither the other way."""
    reached = {
        policy: [
            found
            for rule in _policy("defaults", policy)["egress"]
            if (found := _services_rule(rule))
        ]
        for policy in (NAME, USAGE)
    }
    assert reached == {
        NAME: [("router", {ROUTER_PORT}), ("engine", {SERVING_PORT})],
        USAGE: [("engine", {CONTROL_PORT})],
    }
    for policy in (NAME, USAGE):
        rest = [r for r in _policy("defaults", policy)["egress"] if not _services_rule(r)]
        assert [_ports(rule) for rule in rest] == [{53}, {443, 6443}]


def test_anybody_may_send_requests_unless_clients_are_named() -> None:
    (requests, admin) = _policy("defaults", NAME)["ingress"]
    assert "from" not in requests
    assert _ports(requests) == {8080}
    assert _ports(admin) == {8081}
    assert admin["from"]
    (requests, _) = _policy("narrow", NAME)["ingress"]
    assert requests["from"] == [{"namespaceSelector": {"matchLabels": {"clients": "yes"}}}]


def test_nobody_may_read_usage_but_prometheus_unless_clients_are_named() -> None:
    """Its one port has both."""
    (rule,) = _policy("defaults", USAGE)["ingress"]
    assert _ports(rule) == {8082}
    assert rule["from"] == _policy("defaults", NAME)["ingress"][1]["from"]
    (more,) = _policy("narrow", USAGE)["ingress"]
    assert more["from"] == [{"podSelector": {"matchLabels": {"app": "billing"}}}, *rule["from"]]


def test_redis_is_reached_where_it_is() -> None:
    """The small one by its pods and by nobody else, the user's by its port and addresses."""
    rule = _policy("own-redis", NAME)["egress"][2]
    assert (rule["to"], _ports(rule)) == ([{"ipBlock": {"cidr": "10.7.0.0/16"}}], {6380})
    pod = pod_of(gateway_objects("small-redis"), REDIS)["metadata"]["labels"]
    for policy in (NAME, USAGE):
        rule = _policy("small-redis", policy)["egress"][2]
        assert _ports(rule) == {6379}
        (peer,) = rule["to"]
        assert peer["podSelector"]["matchLabels"].items() <= pod.items()
    own = _policy("small-redis", REDIS)
    assert "egress" not in own
    (rule,) = own["ingress"]
    allowed = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
    assert allowed == [
        only(gateway_objects("small-redis"), "Deployment", name)["spec"]["selector"]["matchLabels"]
        for name in (NAME, USAGE)
    ]


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("redis://redis:7000/2", 7000),
        ("redis://redis", 6379),
        ("rediss://[fd00::6]/0", 6379),
        ("rediss://[fd00::6]:6390", 6390),
    ],
)
def test_the_port_of_redis_is_that_of_its_url(url: str, port: int) -> None:
    objects = rendered({"gateway": {"enabled": True, "redis": {"url": url}}})
    rule = only(objects, "NetworkPolicy", NAME)["spec"]["egress"][2]
    assert "to" not in rule
    assert _ports(rule) == {port}


def test_policies_can_be_left_out() -> None:
    names = {
        o["metadata"]["name"]
        for o in gateway_objects("no-policies")
        if o["kind"] == "NetworkPolicy"
    }
    assert names == {"fleetkeeper"}
