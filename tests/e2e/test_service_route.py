"""The chart's HTTPRoute under a real implementation of the Gateway API, which ends TLS: Traefik."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleetkeeper_local.control_plane.pki import Authority
from fleetkeeper_local.control_plane.ports import free_ports
from fleetkeeper_local.control_plane.processes import Processes
from fleetkeeper_local.demo.cluster import Live
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.front_door import FrontDoor
from fleetkeeper_local.demo.installation import GATEWAY, Installation
from tests.support.chart.helm_chart import only, rendered
from tests.support.guards import GUARD_S
from tests.support.node.node_world import until
from tests.support.node.traefik import CRDS, traefik

HOST = "llm.example.com"
ADMIN_PORT = 8081

pytestmark = [
    pytest.mark.exhaustive,  # about Traefik as much as about the route, and minutes to build
    pytest.mark.usefixtures("calm_operator"),
    pytest.mark.timeout(2400),  # the first time it builds Traefik
]


@dataclass(frozen=True)
class Entry:
    """Where Traefik takes requests, and whom clients trust."""

    port: int
    trusted: Path

    @contextmanager
    def asked(
        self, method: str, path: str, key: str, body: Live | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request with TLS to the name of the route."""
        context = ssl.create_default_context(cafile=str(self.trusted))
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=GUARD_S)
        connection = http.client.HTTPConnection(HOST)
        with context.wrap_socket(plain, server_hostname=HOST) as connection.sock:
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            with connection.getresponse() as answer:
                yield answer


def _parts(port: int, trusted: Authority, namespace: str) -> list[Live]:
    """Return what a user of the Gateway API has: a class, a Gateway with TLS, its certificate."""
    identity = trusted.issue("route", HOST, hosts=[HOST], server=True)
    pair = {"tls.crt": identity.certificate, "tls.key": identity.key}
    secret = {name: base64.b64encode(file.read_bytes()).decode() for name, file in pair.items()}
    listener = {
        "name": "https",
        "port": port,
        "protocol": "HTTPS",
        "hostname": HOST,
        "tls": {"certificateRefs": [{"name": "route-tls"}]},
    }
    group = "gateway.networking.k8s.io/v1"
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "route-tls", "namespace": namespace},
            "type": "kubernetes.io/tls",
            "data": secret,
        },
        {
            "apiVersion": group,
            "kind": "GatewayClass",
            "metadata": {"name": "traefik"},
            "spec": {"controllerName": "traefik.io/gateway-controller"},
        },
        {
            "apiVersion": group,
            "kind": "Gateway",
            "metadata": {"name": "public", "namespace": namespace},
            "spec": {"gatewayClassName": "traefik", "listeners": [listener]},
        },
    ]


def _route() -> Live:
    """Return the HTTPRoute of the chart."""
    route = {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": [HOST]}
    return only(rendered({"gateway": {"enabled": True, "httpRoute": route}}), "HTTPRoute", GATEWAY)


@pytest.fixture(scope="module")
def entry(product: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Entry]:
    """Traefik on this machine, which is the cluster's node, with a Gateway and the route."""
    folder = tmp_path_factory.mktemp("traefik")
    program = traefik()
    cluster = product.cluster
    (port,) = free_ports(1)
    trusted = Authority(folder, "clients-trust").ensure()
    crds = str(program.parent / CRDS)
    cluster.kubectl("apply", "--server-side", "-f", crds)
    cluster.kubectl(
        "wait", "--for=condition=Established", "-f", crds, "--timeout=300s", timeout_s=320
    )
    made = [*_parts(port, trusted, product.namespace), _route()]
    cluster.apply(*made)
    processes = Processes(folder, tied=True)
    processes.start(
        "traefik",
        [
            program,
            f"--entrypoints.https.address=127.0.0.1:{port}",
            "--providers.kubernetesgateway=true",
            "--global.checknewversion=false",
            "--global.sendanonymoususage=false",
        ],
        env={"KUBECONFIG": str(cluster.kubeconfig)},
    )
    try:
        until(lambda: _attached(product), "the Gateway takes the route")
        yield Entry(port, trusted.certificate)
    finally:
        processes.stop(["traefik"])
        cluster.kubectl("delete", "-f", crds, "--ignore-not-found")
        cluster.kubectl("-n", product.namespace, "delete", "secret", "route-tls")


def _attached(product: Installation) -> bool:
    """Return whether the route is accepted and found its Service, as its status says."""
    text = product.cluster.kubectl(
        *("-n", product.namespace, "get", "httproute", GATEWAY, "-o", "json")
    )
    conditions = [
        condition
        for parent in (json.loads(text).get("status") or {}).get("parents") or ()
        for condition in parent["conditions"]
    ]
    return {item["type"] for item in conditions if item["status"] == "True"} >= {
        "Accepted",
        "ResolvedRefs",
    }


def test_requests_pass_the_route_with_tls(fleet: Fleet, door: FrontDoor, entry: Entry) -> None:
    """Refusals too: they are the gateway's own."""
    key = door.create_key("route", fleet.namespace)

    def listed() -> bool:
        with entry.asked("GET", "/v1/models", key) as answer:
            return answer.status == 200 and fleet.name in answer.read().decode()

    until(listed, "Traefik has the route")
    with entry.asked("GET", "/v1/models", "fk_made-up") as answer:
        assert answer.status == 401
        assert json.loads(answer.read())["error"]["code"] == "invalid_api_key"
    with entry.asked("GET", "/healthz", key) as answer:
        assert answer.status == 404


def test_a_stream_passes_the_route_frame_by_frame(
    fleet: Fleet, door: FrontDoor, entry: Entry, product: Installation
) -> None:
    """The client has the first frame while the gateway still serves the request."""
    key = door.create_key("streams", fleet.namespace)
    body = {
        "model": fleet.name,
        "prompt": "The queue",
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    until(lambda: _open_requests(product) == 0, "the gateway is idle")
    with entry.asked("POST", "/v1/completions", key, body) as answer:
        assert answer.status == 200
        assert answer.readline().startswith(b"data: ")
        assert _open_requests(product) == 1
        rest = answer.read()
    assert rest.rstrip().endswith(b"data: [DONE]")
    assert rest.count(b"data: ") > 1


def _open_requests(product: Installation) -> float:
    """Return the requests that the gateway's replicas have open."""
    selector = "app.kubernetes.io/name=fleetkeeper,app.kubernetes.io/component=gateway"
    total = 0.0
    for pod in product.cluster.pods(product.namespace, selector):
        address = f"http://{pod['status']['podIP']}:{ADMIN_PORT}/metrics"
        with urllib.request.urlopen(address, timeout=GUARD_S) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("fleetkeeper_gateway_open_requests "):
                    total += float(line.rpartition(" ")[2])
    return total
