"""Names, Services and metrics on the node's own network."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from typing import Any

import pytest

from fleetkeeper_local.node.node import Node
from tests.support.node.node_world import Pods, pod_manifest, until

pytestmark = [pytest.mark.usefixtures("images_ahead"), pytest.mark.exhaustive]

METRICS = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(b"fleetkeeper_e2e_value 42\\n")
    def log_message(self, *words): pass
http.server.HTTPServer(("", 8080), Handler).serve_forever()
"""

FETCH = """
import sys, time, urllib.request
for attempt in range(100):
    try:
        print(urllib.request.urlopen("http://{host}:{port}/", timeout=2).read().decode())
        sys.exit(0)
    except OSError as error:
        print(error, file=sys.stderr)  # Service rules may be seconds younger than the pod
        time.sleep(0.2)
sys.exit(1)
"""


def test_a_deployment_is_reached_from_another_pod_by_its_services_name(
    pods: Pods, python_image: str
) -> None:
    """CoreDNS resolves the Service, kube-proxy leads to a pod, the pod answers."""
    template = pod_manifest("web", python_image, METRICS)
    template["spec"].pop("restartPolicy")
    pods.create(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "web"},
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": {"app": "web"}},
                "template": {"metadata": {"labels": {"app": "web"}}, "spec": template["spec"]},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web"},
            "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
        },
    )
    pods.kubectl("rollout", "status", "deployment/web", "--timeout=300s", timeout_s=320)
    printed = pods.run("short", python_image, FETCH.format(host="web", port=80))
    assert "fleetkeeper_e2e_value 42" in printed
    full = f"web.{pods.namespace}.svc.cluster.local"
    assert "fleetkeeper_e2e_value 42" in pods.run(
        "long", python_image, FETCH.format(host=full, port=80)
    )


def test_no_pod_reaches_anything_outside(pods: Pods, python_image: str) -> None:
    """Pods have no way out of the machine: a name outside is unknown."""
    script = (
        "import socket\n"
        "try: print(socket.getaddrinfo('example.com', 80))\n"
        "except socket.gaierror as error: print('unknown')"
    )
    assert pods.run("out", python_image, script).strip() == "unknown"


def test_annotated_pods_are_scraped_with_the_labels_that_queries_need(
    node: Node, pods: Pods, python_image: str
) -> None:
    """A sample carries namespace, pod and inference_service within a few scrapes of the pod's start."""
    manifest = pod_manifest("engine-0", python_image, METRICS)
    manifest["metadata"]["labels"] |= {
        "fleetkeeper.io/service": "chat",
        "fleetkeeper.io/component": "engine",
    }
    manifest["metadata"]["annotations"] = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": "8080",
        "prometheus.io/path": "/metrics",
    }
    pods.create(manifest)
    pods.await_ready("engine-0")
    query = f'fleetkeeper_e2e_value{{namespace="{pods.namespace}"}}'
    [sample] = until(lambda: _query(node, query), "a sample")
    labels = sample["metric"]
    assert sample["value"][1] == "42"
    assert (labels["pod"], labels["inference_service"], labels["component"]) == (
        "engine-0", "chat", "engine",
    )  # fmt: skip


def test_container_memory_is_known_by_container(node: Node, pods: Pods, python_image: str) -> None:
    """The kubelet's cAdvisor gives working sets with the container's name, not only the pod's."""
    script = (
        "import time; x = bytearray(64 << 20); x[::4096] = b'1' * len(x[::4096]); time.sleep(3600)"
    )
    pods.create(pod_manifest("holder", python_image, script))
    pods.await_ready("holder")
    query = f'container_memory_working_set_bytes{{namespace="{pods.namespace}",container="main"}} > 60000000'
    assert until(lambda: _query(node, query), "the container's working set")


def _query(node: Node, promql: str) -> list[dict[str, Any]]:
    url = f"{node.prometheus_url}/api/v1/query?{urllib.parse.urlencode({'query': promql})}"
    with urllib.request.urlopen(url, timeout=300) as reply:
        found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
    return found
