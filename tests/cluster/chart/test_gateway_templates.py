"""The gateway in the chart, rendered by Helm: its pods, and what values are refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import cast

import pytest
import redis
import yaml
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from starlette.applications import Starlette
from starlette.routing import Route

from fleetkeeper_contract.grants import GATEWAY_POD_LABELS, USAGE_POD_LABELS
from fleetkeeper_gateway.http.admin import admin_application
from fleetkeeper_gateway.http.settings import ServeSettings
from fleetkeeper_gateway.usage.app import UsageApp
from fleetkeeper_gateway.usage.store import UsageStore
from fleetkeeper_local.control_plane.ports import free_ports
from tests.support.chart.gateway_chart import (
    NAME,
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
from tests.support.reconcile.pod_security import violations_of_restricted
from tests.support.services.redis_server import ensure_redis


def test_without_the_gateway_nothing_of_it_is_rendered() -> None:
    """Also for `helm upgrade --reuse-values` of a release that does not know the value."""
    off = rendered({})
    assert not [item for item in off if "gateway" in item["metadata"]["name"]]
    assert "grant" not in yaml.safe_dump([item for item in off if item["kind"] == "Deployment"])
    assert rendered({"gateway": None}) == off


def test_the_gateway_changes_only_the_pods_of_the_operator() -> None:
    """Everything else of the chart stays: settings of engines and routers among it."""

    def others(objects: list[Live]) -> list[Live]:
        return [item for item in objects if not _of_gateway(item)]

    before, after = others(rendered({})), others(gateway_objects("defaults"))
    deployment = only(after, "Deployment", "fleetkeeper")
    spec = deployment["spec"]["template"]["spec"]
    spec["volumes"] = [item for item in spec["volumes"] if item["name"] != "grant-keys"]
    (container,) = spec["containers"]
    mounts = container["volumeMounts"]
    container["volumeMounts"] = [item for item in mounts if item["name"] != "grant-keys"]
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    old = only(before, "Deployment", "fleetkeeper")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["checksum/settings"] != old["checksum/settings"]
    annotations["checksum/settings"] = old["checksum/settings"]
    config = only(after, "ConfigMap", "fleetkeeper-settings")["data"]
    settings = yaml.safe_load(config["settings.yaml"])
    assert settings.pop("grantJwksFile") == "/etc/fleetkeeper/grant-keys/jwks.json"
    assert settings.pop("wakeMarks") == "fleetkeeper-wake-marks"
    assert settings.pop("helmRelease") == "fleetkeeper"
    assert settings.pop("holdS") == 55
    config["settings.yaml"] = only(before, "ConfigMap", "fleetkeeper-settings")["data"][
        "settings.yaml"
    ]
    assert settings == yaml.safe_load(config["settings.yaml"])
    (job,) = only(after, "Job", "fleetkeeper-control-keys")["spec"]["template"]["spec"][
        "containers"
    ]
    job["args"].remove("--grant-secret=fleetkeeper-grant-keys")
    for item in after:
        if item["kind"] == "ValidatingAdmissionPolicy":
            assert item["spec"]["matchConditions"].pop()["name"] == "not-wake-marks"
    assert after == before


def _of_gateway(item: Live) -> bool:
    labels = item["metadata"]["labels"]
    return str(labels.get("app.kubernetes.io/component")).startswith("gateway")


@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_value_set_renders_to_sound_objects(name: str) -> None:
    objects = gateway_objects(name)
    keys = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(keys) == len(set(keys))
    for item in objects:
        if item["kind"] != "Deployment":
            continue
        template = item["spec"]["template"]
        assert violations_of_restricted(template) == []
        labels = item["spec"]["selector"]["matchLabels"]
        assert labels.items() <= template["metadata"]["labels"].items()
        (container,) = template["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert "cpu" not in container["resources"]["limits"]
        assert mounted(template)


def test_pods_have_the_labels_that_the_operator_lets_through() -> None:
    """Whatever the chart's own name is: services of a release let these pods in."""
    names: Live = {"nameOverride": "keeper", "fullnameOverride": "gpu-keeper"}
    objects = rendered(gateway_values("defaults", **names))
    for name, labels in (
        ("gpu-keeper-gateway", GATEWAY_POD_LABELS),
        ("gpu-keeper-gateway-usage", USAGE_POD_LABELS),
    ):
        assert labels.items() <= pod_of(objects, name)["metadata"]["labels"].items()


def test_an_ending_pod_has_time_to_drain() -> None:
    spec = pod_of(rendered({"gateway": {"enabled": True, "drainSeconds": 90}}))["spec"]
    (container,) = spec["containers"]
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= 90 + pause + 5
    deployment = only(gateway_objects("defaults"), "Deployment", NAME)["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert only(gateway_objects("defaults"), "Deployment", USAGE)["spec"]["strategy"] == {
        "type": "Recreate"
    }


def _paths(application: Starlette) -> set[str]:
    return {route.path for route in application.routes if isinstance(route, Route)}


def test_probes_ask_paths_that_the_processes_serve() -> None:
    """The applications are asked for their routes, so that a renamed one is noticed here."""
    usage = UsageApp(cast("UsageStore", None), float, period_s=1)
    served = {
        NAME: _paths(admin_application(dict)),
        USAGE: _paths(usage.app()),
    }
    for name, paths in served.items():
        pod = pod_of(gateway_objects("defaults"), name)
        (container,) = pod["spec"]["containers"]
        kinds = ("startupProbe", "livenessProbe", "readinessProbe")
        probes = [container[kind]["httpGet"] for kind in kinds]
        assert {probe["path"] for probe in probes} <= paths
        assert {probe["port"] for probe in probes} <= {port["name"] for port in container["ports"]}
        assert pod["metadata"]["annotations"]["prometheus.io/path"] in paths


def test_a_disruption_takes_one_replica_at_a_time() -> None:
    budget = only(gateway_objects("defaults"), "PodDisruptionBudget", NAME)["spec"]
    assert budget["maxUnavailable"] == 1
    labels = pod_of(gateway_objects("defaults"))["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    for name in ("one-replica", "no-policies"):
        assert not [
            item
            for item in gateway_objects(name)
            if (item["kind"], item["metadata"]["name"]) == ("PodDisruptionBudget", NAME)
        ]


def test_numbers_reach_the_process_as_whole_numbers() -> None:
    """Helm reads large numbers as floats, and would write 1.6777216e+07."""
    found = environment(gateway_objects("defaults"))
    assert found["REQUEST_BYTES"] == "16777216"
    assert found["BODY_BUDGET_BYTES"] == "268435456"
    assert found["HOLD_BYTES"] == "67108864"
    assert "REDIS_URL" not in found
    assert found["ANONYMOUS"] == "false"


def test_a_hold_of_zero_seconds_reaches_the_process() -> None:
    assert environment(gateway_objects("defaults"))["HOLD_SECONDS"] == "55"
    none = rendered({"gateway": {"enabled": True, "hold": {"seconds": 0}}})
    assert environment(none)["HOLD_SECONDS"] == "0"
    known_before = rendered({"gateway": {"enabled": True, "hold": None}})
    assert "HOLD_SECONDS" not in environment(known_before), "the process has the same default"


def test_origins_of_browsers_are_none_unless_they_are_listed() -> None:
    assert "ALLOWED_ORIGINS" not in environment(gateway_objects("defaults"))
    origins = ["https://chat.example.com", "http://localhost:3000"]
    objects = rendered({"gateway": {"enabled": True, "allowedOrigins": origins}})
    assert ServeSettings(
        allowed_origins=environment(objects)["ALLOWED_ORIGINS"]
    ).allowed_origins == (*origins,)


def test_anonymous_requests_have_the_limits_of_the_values() -> None:
    found = environment(gateway_objects("anonymous"))
    assert {name: value for name, value in found.items() if name.startswith("ANONYMOUS")} == {
        "ANONYMOUS": "true",
        "ANONYMOUS_HIGHEST_TIER": "batch",
        "ANONYMOUS_REQUESTS_PER_MINUTE": "standard=100,batch=20",
        "ANONYMOUS_TOKENS_PER_MINUTE": "9000000",
    }


@pytest.mark.parametrize("process", [NAME, USAGE])
def test_redis_of_the_user_is_reached_with_its_secrets(process: str) -> None:
    """They are files: no password is in a variable or in an object of the chart."""
    objects = gateway_objects("own-redis")
    found = environment(objects, process)
    assert found["REDIS_URL"] == "rediss://redis.example.com:6380/1"
    assert found["REDIS_USERNAME"] == "gateway"
    volumes = mounted(pod_of(objects, process))
    for setting, secret in (("REDIS_PASSWORD_FILE", "redis-login"), ("REDIS_CA_FILE", "redis-ca")):
        folder = found[setting].rpartition("/")[0]
        assert volumes[folder]["secret"]["secretName"] == secret


def test_the_small_redis_has_a_bound_and_a_password() -> None:
    objects = gateway_objects("small-redis")
    (container,) = pod_of(objects, REDIS)["spec"]["containers"]
    server, *arguments = container["args"]
    assert server == "redis-server"
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert options["--maxmemory-policy"] == "noeviction"
    assert options["--appendfsync"] == "everysec"
    (variable,) = container["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "redis-login", "key": "password"}
    address = f"{REDIS}.{NAMESPACE}.svc:6379"
    assert environment(objects)["REDIS_URL"] == f"redis://{address}/0"
    (port,) = only(objects, "Service", REDIS)["spec"]["ports"]
    assert port["port"] == 6379


@pytest.mark.parametrize("password", ["canary", r"""two words "and\more' $HOME `id` %s #x"""])
def test_the_password_of_the_small_redis_is_in_no_list_of_processes(
    tmp_path: Path, password: str
) -> None:
    """The command of the chart with a real server: it asks for the password, and hides it."""
    ensure_redis()
    (container,) = pod_of(gateway_objects("small-redis"), REDIS)["spec"]["containers"]
    server, *arguments = container["args"]
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    (port,) = free_ports(1)
    given |= {"--dir": str(tmp_path), "--bind": "127.0.0.1", "--port": str(port)}
    words = [word for pair in given.items() for word in pair]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            [*container["command"], server, *words],
            env={**os.environ, "REDIS_PASSWORD": f"{password}\n"},
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            guard = Retry(ConstantBackoff(0.05), 2000)
            client = redis.Redis(port=port, password=password, retry=guard)
            assert client.ping()
            with pytest.raises(redis.AuthenticationError):
                redis.Redis(port=port).ping()
            shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            assert shown.startswith(b"redis-server")
            assert password.encode() not in shown
        finally:
            process.terminate()
            assert process.wait(60) == 0


def test_usage_is_kept_in_a_volume_that_outlives_the_release() -> None:
    claim = only(gateway_objects("defaults"), "PersistentVolumeClaim", USAGE)
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    for name, volume in (
        ("defaults", {"persistentVolumeClaim": {"claimName": USAGE}}),
        ("own-volume", {"persistentVolumeClaim": {"claimName": "counted"}}),
        ("no-volume", {"emptyDir": {"sizeLimit": "5Gi"}}),
    ):
        folder = environment(gateway_objects(name), USAGE)["USAGE_DIRECTORY"]
        found = mounted(pod_of(gateway_objects(name), USAGE))[folder]
        assert {key: value for key, value in found.items() if key != "name"} == volume
        claims = [item for item in gateway_objects(name) if item["kind"] == "PersistentVolumeClaim"]
        assert bool(claims) is (name == "defaults")


@pytest.mark.promise("signing-keys")
def test_signing_keys_reach_the_gateway_and_only_public_ones_the_operator() -> None:
    for name, secret in (("defaults", "fleetkeeper-grant-keys"), ("own-keys", "signing")):
        objects = gateway_objects(name)
        for process in (NAME, USAGE):
            folder = environment(objects, process)["GRANT_KEYS_DIRECTORY"]
            volume = mounted(pod_of(objects, process))[folder]["secret"]
            assert volume["secretName"] == secret
            assert "items" not in volume
        public = mounted(pod_of(objects, "fleetkeeper"))["/etc/fleetkeeper/grant-keys"]["secret"]
        assert public["secretName"] == secret
        assert public["items"] == [{"key": "jwks.json", "path": "jwks.json"}]
    pod = pod_of(gateway_objects("small-redis"), REDIS)
    assert "grant-keys" not in yaml.safe_dump(pod)
    assert pod["spec"]["automountServiceAccountToken"] is False


def test_a_route_leads_to_the_gateway_and_gives_answers_their_time() -> None:
    """Gateways end requests after 15 s or so if nobody says otherwise."""
    route = only(gateway_objects("route"), "HTTPRoute", NAME)["spec"]
    assert route["parentRefs"] == VALUE_SETS["route"]["httpRoute"]["parentRefs"]
    assert route["hostnames"] == ["llm.example.com"]
    (rule,) = route["rules"]
    assert rule["timeouts"] == {"request": "3600s", "backendRequest": "3600s"}
    assert rule["backendRefs"] == [{"name": NAME, "port": 80}]
    (port,) = only(gateway_objects("route"), "Service", NAME)["spec"]["ports"]
    assert port["port"] == 80
    assert not [item for item in gateway_objects("defaults") if item["kind"] == "HTTPRoute"]


def test_prometheus_finds_both_processes() -> None:
    """By annotations, or by PodMonitors if they are asked for."""
    monitored = {"prometheus": {"podMonitor": {"enabled": True}}}
    objects = rendered(gateway_values("defaults", **monitored))
    for name, port in ((NAME, "admin"), (USAGE, "usage")):
        pod = pod_of(objects, name)
        (container,) = pod["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(ports[port])
        monitor = only(objects, "PodMonitor", name)["spec"]
        assert monitor["podMetricsEndpoints"][0]["port"] == port
        labels = pod["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= labels.items()


SMALL_REDIS = {"enabled": True, "image": "valkey:8"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"image": ""}, "image"),
        ({"service": {"type": "ExternalName"}}, "type"),
        ({"redis": {"url": "redis.example.com:6379"}}, "url"),
        ({"redis": {"url": "redis://user:secret@redis:6379"}}, "url"),
        ({"redis": {"enabled": True}}, "gateway.redis.image is required"),
        (
            {"redis": {"enabled": True, "image": "valkey:8", "url": "redis://redis"}},
            "both set",
        ),
        ({"redis": {"passwordSecret": {"name": "x"}}}, "passwordSecret"),
        ({"redis": {"maxMemory": "1Gi"}}, "maxMemory"),
        ({"redis": {"url": "redis://redis", "username": "gateway"}}, "redis.passwordSecret"),
        ({"redis": {"url": "redis://redis", "caSecret": {"name": "x", "key": "y"}}}, "rediss://"),
        ({"redis": {**SMALL_REDIS, "username": "gateway"}}, "redis.username"),
        ({"redis": {**SMALL_REDIS, "caSecret": {"name": "x", "key": "y"}}}, "rediss://"),
        ({"anonymous": {"highestTier": "urgent"}}, "highestTier"),
        ({"anonymous": {"requestsPerMinute": 0}}, "requestsPerMinute"),
        ({"anonymous": {"concurrency": "urgent=5"}}, "concurrency"),
        ({"keys": {"namespace": "Keys"}}, "namespace"),
        ({"keys": {"staleSeconds": 119}}, "staleSeconds"),
        ({"httpRoute": {"enabled": True}}, "parentRefs"),
        ({"httpRoute": {"timeout": "1 hour"}}, "timeout"),
        ({"usage": {"retentionDays": 0}}, "retentionDays"),
        ({"usage": {"retentionDays": 3651}}, "retentionDays"),
        ({"usage": {"periodSeconds": 301}}, "periodSeconds"),
        ({"bodyBudgetBytes": 2 * 16_777_216 - 1}, "gateway.bodyBudgetBytes"),
        ({"hold": {"seconds": -1}}, "seconds"),
        ({"hold": {"seconds": 601}}, "seconds"),
        ({"hold": {"bytes": 0}}, "bytes"),
        ({"hold": {"second": 1}}, "second"),
        ({"networkPolicy": {"clients": [{}]}}, "clients"),
        ({"allowedOrigins": ["https://chat.example.com/"]}, "allowedOrigins"),
        ({"allowedOrigins": ["*"]}, "allowedOrigins"),
    ],
)
def test_wrong_values_are_refused(values: Live, message: str) -> None:
    with pytest.raises(HelmError, match=message):
        rendered({"gateway": {"enabled": True, **values}})
