"""The batch process in the chart: where it keeps files, whom it asks, and what values are refused."""

from __future__ import annotations

import pytest
import yaml

from fleetkeeper_gateway.batch.settings import BatchSettings
from tests.support.chart.gateway_chart import (
    ANY_REDIS,
    BATCH,
    KEYS,
    NAME,
    OBJECT_STORE,
    REDIS,
    USAGE,
    VALUE_SETS,
    Live,
    environment,
    gateway_objects,
    gateway_values,
    mounted,
    pod_of,
)
from tests.support.chart.helm_chart import NAMESPACE, HelmError, only, rendered
from tests.support.docs_commands import ROOT

SETS = [name for name in VALUE_SETS if name.startswith("batch")]
STORE = "/var/lib/fleetkeeper/batch"


def _memory(quantity: object) -> Live:
    return {"resources": {"limits": {"memory": quantity}}}


def _names(objects: list[Live], kind: str) -> set[str]:
    return {item["metadata"]["name"] for item in objects if item["kind"] == kind}


def _of_gateway(item: Live) -> bool:
    component = str(item["metadata"]["labels"].get("app.kubernetes.io/component"))
    return component.startswith("gateway")


def test_it_is_off_by_default_and_after_reused_values() -> None:
    """`helm upgrade --reuse-values` of a release that knows the gateway, and not its batches."""
    off = gateway_objects("defaults")
    assert not [item for item in off if "batch" in item["metadata"]["name"]]
    assert rendered({"gateway": {"enabled": True, "batch": None}}) == off


def test_it_adds_objects_and_changes_none_of_the_gateway() -> None:
    values = {"redis": ANY_REDIS}
    before = rendered({"gateway": {"enabled": True, **values}})
    after = rendered({"gateway": {"enabled": True, **values, "batch": {"enabled": True}}})
    changed = [item for item in before if _of_gateway(item) and item not in after]
    # The keys' Secrets get one more reader.
    assert [(item["kind"], item["metadata"]["name"]) for item in changed] == [
        ("RoleBinding", f"{NAME}-keys")
    ]


@pytest.mark.parametrize("name", SETS)
def test_its_settings_are_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable is one of the settings, and the process accepts its value."""
    objects = gateway_objects(name)
    for variable, value in environment(objects, BATCH).items():
        monkeypatch.setenv(f"FLEETKEEPER_GATEWAY_{variable}", value)
    settings = BatchSettings()
    named = {word for word in environment(objects, BATCH) if word.startswith("BATCH_")}
    assert named <= {field.upper() for field in BatchSettings.model_fields}
    (container,) = pod_of(objects, BATCH)["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": settings.batch_port, "admin": settings.batch_admin_port}
    assert settings.batch_upstream


def test_the_values_have_the_defaults_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = BatchSettings()
    for variable, value in environment(gateway_objects("batch"), BATCH).items():
        monkeypatch.setenv(f"FLEETKEEPER_GATEWAY_{variable}", value)
    changed = {"batch_upstream"}
    assert BatchSettings().model_dump(exclude=changed) == plain.model_dump(exclude=changed)


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [
        ("50Gi", 5_368_709_120),
        ("0.5Ti", 54_975_581_388),
        ("2000M", 200_000_000),
        ("1000000", 100_000),
    ],
)
def test_a_key_may_store_a_tenth_of_the_volume(size: str, bytes_: int) -> None:
    batch = {"enabled": True, "store": {"persistence": {"size": size}}}
    objects = rendered({"gateway": {"enabled": True, "redis": ANY_REDIS, "batch": batch}})
    assert environment(objects, BATCH)["BATCH_KEY_BYTES"] == str(bytes_)


def test_a_key_may_store_what_the_values_say() -> None:
    for store, most in (({"persistence": {"size": "50Gi"}}, 50 << 30), (OBJECT_STORE, 500 << 30)):
        batch = {"enabled": True, "store": store, "quotas": {"bytes": most}}
        objects = rendered({"gateway": {"enabled": True, "redis": ANY_REDIS, "batch": batch}})
        assert environment(objects, BATCH)["BATCH_KEY_BYTES"] == str(most)
    assert environment(gateway_objects("batch-objects"), BATCH)["BATCH_KEY_BYTES"] == str(100 << 30)


def test_one_replica_keeps_its_files_in_a_volume_that_outlives_the_release() -> None:
    objects = gateway_objects("batch")
    claim = only(objects, "PersistentVolumeClaim", BATCH)
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    volume = mounted(pod_of(objects, BATCH))[STORE]
    assert volume["persistentVolumeClaim"] == {"claimName": BATCH}
    found = environment(objects, BATCH)
    assert (found["BATCH_STORE"], found["BATCH_STORE_SHARED"]) == (f"file://{STORE}", "false")
    # A second process would not start while the first one has the volume.
    assert only(objects, "Deployment", BATCH)["spec"]["strategy"] == {"type": "Recreate"}


def test_replicas_share_an_object_store() -> None:
    objects = gateway_objects("batch-objects")
    assert environment(objects, BATCH)["BATCH_STORE"] == "s3://batches/prod"
    pod = pod_of(objects, BATCH)
    assert STORE not in mounted(pod)
    (container,) = pod["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "s3-login"}}]
    assert {"name": "AWS_REGION", "value": "eu-central-1"} in container["env"]
    assert BATCH not in _names(objects, "PersistentVolumeClaim")
    assert only(objects, "Deployment", BATCH)["spec"]["strategy"]["type"] == "RollingUpdate"
    budget = only(objects, "PodDisruptionBudget", BATCH)["spec"]
    assert budget["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert BATCH not in _names(gateway_objects("batch"), "PodDisruptionBudget")


def test_replicas_share_a_volume_that_all_may_write() -> None:
    objects = gateway_objects("batch-shared")
    assert environment(objects, BATCH)["BATCH_STORE_SHARED"] == "true"
    volume = mounted(pod_of(objects, BATCH))[STORE]
    assert volume["persistentVolumeClaim"] == {"claimName": "shared"}
    assert BATCH not in _names(objects, "PersistentVolumeClaim")
    assert only(objects, "Deployment", BATCH)["spec"]["strategy"]["type"] == "RollingUpdate"


def test_without_a_volume_files_are_those_of_the_pod() -> None:
    volume = mounted(pod_of(gateway_objects("batch-no-volume"), BATCH))[STORE]
    assert volume["emptyDir"] == {"sizeLimit": "50Gi"}


def test_lines_go_to_the_gateway_on_behalf_of_their_key() -> None:
    objects = gateway_objects("batch")
    found = environment(objects, BATCH)
    (port,) = only(objects, "Service", NAME)["spec"]["ports"]
    assert port["port"] == 80
    assert found["BATCH_UPSTREAM"] == f"http://{NAME}.{NAMESPACE}.svc:80"
    volume = mounted(pod_of(objects, BATCH))[found["GRANT_KEYS_DIRECTORY"]]
    assert volume["secret"]["secretName"] == "fleetkeeper-grant-keys"
    assert "BATCH_UPSTREAM_KEY_FILE" not in found


def test_alone_it_asks_another_api_with_a_key_of_its_own() -> None:
    """No signing key is where no grant is signed, and nothing of the gateway is rendered."""
    objects = gateway_objects("batch-alone")
    found = environment(objects, BATCH)
    folder, _, name = found["BATCH_UPSTREAM_KEY_FILE"].rpartition("/")
    volumes = mounted(pod_of(objects, BATCH))
    assert (volumes[folder]["secret"]["secretName"], name) == ("provider", "token")
    assert "GRANT_KEYS_DIRECTORY" not in found
    assert not [v for v in volumes.values() if "grant" in v["name"]]
    assert _names(objects, "Deployment") == {"fleetkeeper", BATCH, REDIS}
    assert KEYS in _names(objects, "Namespace")
    rule = only(objects, "NetworkPolicy", BATCH)["spec"]["egress"][3]
    assert rule == {
        "to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}],
        "ports": [{"port": 8443, "protocol": "TCP"}],
    }


@pytest.mark.promise("batch-reads")
@pytest.mark.parametrize("name", SETS)
def test_it_reads_keys_and_services_and_writes_nothing(name: str) -> None:
    objects = gateway_objects(name)
    roles = {
        (o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]): o["rules"]
        for o in objects
        if o["kind"] in {"Role", "ClusterRole"}
    }
    found = {}
    for item in objects:
        if item["kind"] not in {"RoleBinding", "ClusterRoleBinding"}:
            continue
        if BATCH in [subject["name"] for subject in item["subjects"]]:
            namespace = item["metadata"].get("namespace")
            (rule,) = roles[item["roleRef"]["kind"], namespace, item["roleRef"]["name"]]
            (resource,) = rule["resources"]
            found[namespace, resource] = rule["verbs"]
    read = ["get", "list", "watch"]
    assert found == {(None, "inferenceservices"): read, (KEYS, "secrets"): read}
    assert only(objects, "ServiceAccount", BATCH)["automountServiceAccountToken"] is False


def _policy(name: str, policy: str = BATCH) -> Live:
    spec: Live = only(gateway_objects(name), "NetworkPolicy", policy)["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    return spec


def _ports(rule: Live) -> set[int]:
    return {port["port"] for port in rule["ports"]}


def test_it_reaches_the_gateway_redis_and_the_store_alone() -> None:
    egress = _policy("batch-objects")["egress"]
    assert [_ports(rule) for rule in egress] == [{53}, {443, 6443}, {6379}, {8080}, {443, 9000}]
    (peer,) = egress[3]["to"]
    labels = pod_of(gateway_objects("batch-objects"))["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    assert egress[4]["to"] == [{"ipBlock": {"cidr": "10.9.0.0/16"}}]
    assert [_ports(rule) for rule in _policy("batch")["egress"]][3:] == [{8080}]


def test_clients_reach_it_and_it_the_gateway_and_redis() -> None:
    """Also where the gateway's clients are named: it is one of them then."""
    requests, admin = _policy("batch")["ingress"]
    assert "from" not in requests
    assert (_ports(requests), _ports(admin)) == ({8083}, {8084})
    named, _ = _policy("batch-shared")["ingress"]
    assert named["from"] == [{"namespaceSelector": {"matchLabels": {"clients": "yes"}}}]
    pod = pod_of(gateway_objects("batch-shared"), BATCH)["metadata"]["labels"].items()
    own = _policy("batch-shared", NAME)["ingress"][0]["from"][1]["podSelector"]["matchLabels"]
    assert own.items() <= pod
    (rule,) = _policy("batch", REDIS)["ingress"]
    assert [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule["from"]
    ] == [
        "gateway",
        "gateway-usage",
        "gateway-batch",
    ]
    (rule,) = _policy("batch-alone", REDIS)["ingress"]
    assert len(rule["from"]) == 1


def test_metrics_are_for_prometheus() -> None:
    admin = _policy("batch")["ingress"][1]
    assert admin["from"] == _policy("batch", NAME)["ingress"][1]["from"]
    monitored = {"prometheus": {"podMonitor": {"enabled": True}}}
    for name, all_three in (("batch", True), ("batch-alone", False)):
        objects = rendered(gateway_values(name, **monitored))
        monitor = only(objects, "PodMonitor", BATCH)["spec"]
        labels = pod_of(objects, BATCH)["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= labels.items()
        assert monitor["podMetricsEndpoints"][0]["port"] == "admin"
        assert ({NAME, USAGE} <= _names(objects, "PodMonitor")) is all_three
    annotations = pod_of(gateway_objects("batch"), BATCH)["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == "8084"


def test_the_route_leads_files_and_batches_to_it() -> None:
    route = VALUE_SETS["route"]
    for name, backends in (("batch", [BATCH, NAME]), ("batch-alone", [BATCH])):
        values = gateway_values(name)
        values["gateway"].update(route)
        rules = only(rendered(values), "HTTPRoute", NAME)["spec"]["rules"]
        assert [rule["backendRefs"][0]["name"] for rule in rules] == backends
        paths = [match["path"]["value"] for match in rules[0]["matches"]]
        assert paths == ["/v1/files", "/v1/batches"]
        assert rules[0]["timeouts"] == {"request": "3600s", "backendRequest": "3600s"}


def test_redis_of_the_chart_may_have_a_volume() -> None:
    objects = gateway_objects("batch")
    claim = only(objects, "PersistentVolumeClaim", REDIS)["spec"]
    assert claim["resources"]["requests"]["storage"] == "2Gi"
    volume = mounted(pod_of(objects, REDIS))["/data"]
    assert volume["persistentVolumeClaim"] == {"claimName": REDIS}
    assert "emptyDir" in mounted(pod_of(gateway_objects("small-redis"), REDIS))["/data"]
    assert environment(objects, BATCH)["REDIS_URL"] == environment(objects)["REDIS_URL"]


def test_the_example_renders_to_two_replicas_on_a_bucket() -> None:
    objects = rendered(yaml.safe_load((ROOT / "examples/batch/values.yaml").read_text()))
    assert only(objects, "Deployment", BATCH)["spec"]["replicas"] == 2
    found = environment(objects, BATCH)
    assert (found["BATCH_STORE"], found["BATCH_RETENTION_DAYS"]) == ("s3://llm-batches/prod", "14")


def test_probes_are_those_of_the_gateway() -> None:
    """Both processes are asked at the same paths."""
    objects = gateway_objects("batch")
    kinds = ("startupProbe", "livenessProbe", "readinessProbe")
    (gateway,) = pod_of(objects)["spec"]["containers"]
    (batch,) = pod_of(objects, BATCH)["spec"]["containers"]
    assert [batch[kind] for kind in kinds] == [gateway[kind] for kind in kinds]


@pytest.mark.parametrize("memory", ["4Gi", "3840Mi", "4100M", 4_100_000_000, "1e12", None])
def test_worker_processes_fit_in_the_memory_of_the_pod(memory: object) -> None:
    batch = {**BATCHES, **_memory(memory)}
    objects = rendered({"gateway": {"enabled": True, "redis": ANY_REDIS, "batch": batch}})
    variables = environment(objects, BATCH)
    assert (variables["BATCH_PROCESSES"], variables["BATCH_PROCESS_BYTES"]) == ("4", "536870912")


@pytest.mark.parametrize("drain_s", [30, 600])
def test_an_ending_pod_has_time_for_its_lines(drain_s: int) -> None:
    """The pause before SIGTERM, the drain, 20 s for results in a slow store, and 10 s for requests."""
    values = gateway_values("batch")
    values["gateway"]["batch"]["drainSeconds"] = drain_s
    objects = rendered(values)
    assert environment(objects, BATCH)["BATCH_DRAIN_SECONDS"] == str(drain_s)
    grace_s = pod_of(objects, BATCH)["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= 5 + drain_s + 20 + 10


def test_the_operator_reads_the_backlog_of_the_release_alone() -> None:
    """Only pods of the chart are in its namespace. Without lines for its services it reads none."""
    selected = {name: _operator_settings(name).get("prometheusBatchSelector") for name in SETS}
    own = f'namespace="{NAMESPACE}"'
    assert selected == {name: None if name == "batch-alone" else own for name in SETS}
    assert "prometheusBatchSelector" not in _operator_settings("defaults")


def _operator_settings(name: str) -> Live:
    found: Live = yaml.safe_load(
        only(gateway_objects(name), "ConfigMap", "fleetkeeper-settings")["data"]["settings.yaml"]
    )
    return found


BATCHES = {"enabled": True}


@pytest.mark.promise("batch-volumes")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": BATCHES}, "gateway.redis"),
        ({"enabled": False, "redis": ANY_REDIS, "batch": BATCHES}, "gateway.batch.upstream"),
        (
            {
                "enabled": False,
                "redis": ANY_REDIS,
                "batch": {**BATCHES, "upstream": "http://gateway"},
            },
            "gateway.batch.upstreamKeySecret",
        ),
        ({"redis": ANY_REDIS, "batch": {**BATCHES, "replicas": 2}}, "ReadWriteMany"),
        (
            {
                "redis": ANY_REDIS,
                "batch": {
                    **BATCHES,
                    "replicas": 2,
                    "store": {"persistence": {"enabled": False, "accessModes": ["ReadWriteMany"]}},
                },
            },
            "a volume of its own",
        ),
        (
            {
                "redis": ANY_REDIS,
                "batch": {**BATCHES, "upstreamKeySecret": {"name": "a", "key": "b"}},
            },
            "upstreamKeySecret is set",
        ),
        ({"redis": ANY_REDIS, "batch": {**BATCHES, "upstream": "http://api/v1"}}, "ends with /v1"),
        ({"redis": ANY_REDIS, "batch": {**BATCHES, "upstream": "api:80"}}, "upstream"),
        ({"redis": ANY_REDIS, "batch": {**BATCHES, "upstream": "http://u:p@api"}}, "upstream"),
        ({"batch": {"store": {"url": "file:///data"}}}, "url"),
        ({"batch": {"store": {"url": "s3://user@bucket"}}}, "url"),
        ({"batch": {"store": {"persistence": {"accessModes": ["ReadOnlyMany"]}}}}, "accessModes"),
        ({"batch": {"replica": 2}}, "replica"),
        ({"batch": {"replicas": 0}}, "replicas"),
        ({"batch": {"concurrency": 5000}}, "concurrency"),
        ({"batch": {"answerBytes": 16_000_000}}, "answerBytes"),
        (
            {"redis": ANY_REDIS, "batch": {**BATCHES, "processes": 5}},
            "are 3584 MiB, more than 80% of the memory limit",
        ),
        (
            {"redis": ANY_REDIS, "batch": {**BATCHES, "processBytes": 1 << 30}},
            "are 5120 MiB, more than 80% of the memory limit",
        ),
        ({"redis": ANY_REDIS, "batch": {**BATCHES, **_memory("3.5Gi")}}, "raise gateway.batch"),
        ({"redis": ANY_REDIS, "batch": {**BATCHES, **_memory(4_000_000_000)}}, "raise gateway"),
        ({"batch": {"quotas": {"files": 0}}}, "files"),
        ({"batch": {"quotas": {"lines": 49_999}}}, "lines"),
        (
            {"redis": ANY_REDIS, "batch": {**BATCHES, "quotas": {"bytes": (50 << 30) + 1}}},
            "more than gateway.batch.store.persistence.size",
        ),
        (
            {
                "redis": ANY_REDIS,
                "batch": {**BATCHES, "store": {"persistence": {"size": "50GB"}}},
            },
            "such as 50Gi",
        ),
        ({"batch": {"store": {**OBJECT_STORE, "env": {"a b": "c"}}}}, "a b"),
    ],
)
def test_wrong_values_are_refused_with_words(values: Live, message: str) -> None:
    with pytest.raises(HelmError, match=message):
        rendered({"gateway": {"enabled": True, **values}})
