"""The chart's HTTPRoute behind a real implementation of the Gateway API, Traefik, with TLS."""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from fleetkeeper_local.control_plane.pki import Authority
from fleetkeeper_local.control_plane.ports import free_ports
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.front_door import FrontDoor
from fleetkeeper_local.demo.installation import GATEWAY, Installation
from fleetkeeper_local.node.node import Node
from tests.support.helm_chart import only, rendered
from tests.support.node_world import until
from tests.support.traefik import CRDS, traefik

HOST = "models.example.com"
GUARD_S = 120.0
pytestmark = [
    pytest.mark.exhaustive,  # the first build of Traefik takes minutes
    pytest.mark.usefixtures("calm_operator"),
]


def _class_and_gateway(port: int, namespace: str) -> list[dict[str, object]]:
    listener = {
        "name": "https",
        "protocol": "HTTPS",
        "port": port,
        "hostname": HOST,
        "tls": {"mode": "Terminate", "certificateRefs": [{"kind": "Secret", "name": "route-tls"}]},
    }
    return [
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "GatewayClass",
            "metadata": {"name": "traefik"},
            "spec": {"controllerName": "traefik.io/gateway-controller"},
        },
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "Gateway",
            "metadata": {"name": "public", "namespace": namespace},
            "spec": {"gatewayClassName": "traefik", "listeners": [listener]},
        },
    ]


def _certificate(authority: Authority, namespace: str) -> dict[str, object]:
    pair = authority.issue("route", HOST, hosts=(HOST,), server=True)
    files = {"tls.crt": pair.certificate, "tls.key": pair.key}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": "route-tls", "namespace": namespace},
        "data": {
            name: base64.b64encode(path.read_bytes()).decode() for name, path in files.items()
        },
    }


@contextmanager
def _running_traefik(node: Node, port: int, log: Path) -> Iterator[None]:
    argv = [
        str(traefik()),
        "--providers.kubernetesgateway=true",
        f"--entrypoints.websecure.address=127.0.0.1:{port}",
        "--global.checknewversion=false",
        "--log.level=INFO",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            env={**os.environ, "KUBECONFIG": str(node.kubeconfig)},
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(GUARD_S)


@pytest.fixture
def address(product: Installation, node: Node, tmp_path: Path) -> Iterator[str]:
    """The port of a Traefik whose Gateway the chart's HTTPRoute names."""
    (port,) = free_ports(1)
    program, cluster = traefik(), product.cluster
    parent = {"name": "public", "sectionName": "https"}
    values = {
        **product.values,
        "gateway": {
            **product.values["gateway"],
            "httpRoute": {"enabled": True, "parentRefs": [parent], "hostnames": [HOST]},
        },
    }
    objects = rendered(values, release=product.release, namespace=product.namespace)
    made = [
        *_class_and_gateway(port, product.namespace),
        _certificate(Authority(tmp_path, "route-ca").ensure(), product.namespace),
        only(objects, "HTTPRoute", GATEWAY),
    ]
    given = "\n---\n".join(json.dumps(item) for item in made)
    cluster.kubectl("apply", "--server-side", "-f", str(program.parent / CRDS))
    cluster.kubectl(
        *("wait", "--for=condition=Established", "crd/httproutes.gateway.networking.k8s.io"),
    )
    try:
        cluster.kubectl("apply", "-f", "-", given=given)
        log = tmp_path / "traefik.log"
        with _running_traefik(node, port, log):
            until(lambda: _accepted(product), f"the route is accepted; see {log}")
            yield f"https://{HOST}:{port}"
    finally:
        cluster.kubectl("delete", "--ignore-not-found", "-f", "-", given=given)
        cluster.kubectl("delete", "-f", str(program.parent / CRDS))


def _accepted(product: Installation) -> bool:
    route = json.loads(
        product.cluster.kubectl("-n", product.namespace, "get", "httproute", GATEWAY, "-o", "json")
    )
    conditions = {
        condition["type"]: condition["status"]
        for parent in route.get("status", {}).get("parents", [])
        for condition in parent["conditions"]
    }
    return conditions.get("Accepted") == conditions.get("ResolvedRefs") == "True"


async def _ask(
    address: str, trusted: ssl.SSLContext, key: str | None, body: dict[str, object]
) -> tuple[int, str, bytes]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    port = int(address.rpartition(":")[2])
    connector = aiohttp.TCPConnector(ssl=trusted)
    async with (
        aiohttp.ClientSession(connector=connector) as client,
        client.post(
            f"https://127.0.0.1:{port}/v1/completions",
            json=body,
            headers={**headers, "Host": HOST},
            server_hostname=HOST,
            timeout=aiohttp.ClientTimeout(GUARD_S),
        ) as response,
    ):
        return response.status, response.content_type, await response.read()


async def test_a_request_comes_in_by_https_through_the_route(
    address: str, product: Installation, fleet: Fleet, tmp_path: Path
) -> None:
    """Key, model and stream pass; a client without a key is refused by the gateway behind."""
    url = f"http://{product.cluster.cluster_ip(product.namespace, GATEWAY)}"
    door = FrontDoor(product.cluster, url, product.namespace)
    key = door.create_key("route", fleet.namespace)
    trusted = ssl.create_default_context(cafile=str(tmp_path / "route-ca.crt"))
    body = {"model": fleet.name, "prompt": "The queue", "max_tokens": 4, "stream": True}
    status, kind, stream = await _ask(address, trusted, key, body)
    assert (status, kind) == (200, "text/event-stream")
    assert stream.endswith(b"data: [DONE]\n\n")
    status, _, refused = await _ask(address, trusted, None, body)
    assert (status, json.loads(refused)["error"]["code"]) == (401, "missing_api_key")
