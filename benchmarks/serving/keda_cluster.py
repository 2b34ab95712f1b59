"""KEDA on the local node: its two processes run on the host, beside the API server."""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from keda_programs import METRICS_SERVER, OPERATOR, ensure_keda, module_directory

from fleetkeeper_local.control_plane.pki import Authority, Identity
from fleetkeeper_local.control_plane.ports import free_ports
from fleetkeeper_local.control_plane.processes import Processes
from fleetkeeper_local.node.node import Node

NAMESPACE = "keda"
SERVICE = "keda-metrics-apiserver"
GROUP = "external.metrics.k8s.io"
READY_S = 120.0
Manifest = dict[str, Any]


class Keda:
    """KEDA while its block runs: CRDs, external metrics API, operator and metrics server."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._folder = Path(tempfile.mkdtemp(prefix="fleetkeeper-keda-"))
        self._processes = Processes(self._folder, tied=True)
        ports = free_ports(5)
        self._grpc, self._api, self._probes, *self._metrics = ports

    def __enter__(self) -> Self:
        """Start KEDA and return when its metrics API answers through the API server."""
        programs = ensure_keda()
        kubectl = self._node.plane.kubectl
        crds = module_directory() / "config" / "crd" / "bases"
        kubectl("apply", "--server-side", "-f", str(crds))
        authority, _ = self._certificates()
        documents = desired_metrics_api(
            self._node.settings.node_ip, self._api, authority.certificate.read_bytes()
        )
        kubectl(
            *("apply", "--server-side", "-f", "-"),
            input=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}),
        )
        self._start(programs)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop both processes. What is in the cluster goes with the node."""
        self._processes.stop(self._processes.names())

    def logs(self) -> str:
        """Return the end of both logs."""
        return "\n".join(self._processes.log_tail(name, 30) for name in self._processes.names())

    def _certificates(self) -> tuple[Authority, Identity]:
        """Return the authority and the one certificate with which both processes serve and call."""
        folder = self._folder / "certs"
        folder.mkdir(exist_ok=True)
        authority = Authority(folder, "ca").ensure()
        hosts = ["127.0.0.1", self._node.settings.node_ip, f"{SERVICE}.{NAMESPACE}.svc"]
        return authority, authority.issue("tls", "keda", hosts=hosts, server=True)

    def _start(self, programs: Path) -> None:
        login = str(self._node.kubeconfig)
        certificates = self._folder / "certs"
        environment = {
            "KUBECONFIG": login,
            "WATCH_NAMESPACE": "",
            "POD_NAMESPACE": NAMESPACE,
            "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE,
        }
        operator_metrics, server_metrics = self._metrics
        self._processes.start(
            "keda-operator",
            [
                programs / OPERATOR,
                f"--metrics-bind-address=127.0.0.1:{operator_metrics}",
                f"--health-probe-bind-address=127.0.0.1:{self._probes}",
                f"--metrics-service-bind-address=127.0.0.1:{self._grpc}",
                f"--cert-dir={certificates}",
            ],
            env=environment,
        )
        self._processes.start(
            "keda-metrics-server",
            [
                programs / METRICS_SERVER,
                f"--secure-port={self._api}",
                f"--tls-cert-file={certificates / 'tls.crt'}",
                f"--tls-private-key-file={certificates / 'tls.key'}",
                f"--cert-dir={certificates}",
                f"--metrics-service-address=127.0.0.1:{self._grpc}",
                f"--port={server_metrics}",
                f"--lister-kubeconfig={login}",
                f"--authentication-kubeconfig={login}",
                f"--authorization-kubeconfig={login}",
            ],
            env=environment,
        )
        self._processes.await_ready("keda-metrics-server", self._answers, READY_S)

    def _answers(self) -> bool:
        """Return whether the API server reaches KEDA's metrics."""
        found = self._node.plane.get(f"/apis/{GROUP}/v1beta1")
        return found is not None and self._processes.running("keda-operator") is not None


def desired_metrics_api(node_ip: str, port: int, authority_pem: bytes) -> list[Manifest]:
    """Return the external metrics API, served by a process on the node, and the HPA's right to it."""
    meta = {"name": SERVICE, "namespace": NAMESPACE}
    rbac = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {"ports": [{"name": "https", "port": 443, "targetPort": port}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**meta, "labels": {"kubernetes.io/service-name": SERVICE}},
            "addressType": "IPv4",
            "ports": [{"name": "https", "port": port}],
            "endpoints": [{"addresses": [node_ip], "conditions": {"ready": True}}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"v1beta1.{GROUP}"},
            "spec": {
                "service": meta,
                "group": GROUP,
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "caBundle": base64.b64encode(authority_pem).decode(),
            },
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "keda-external-metrics-reader"},
            "rules": [{"apiGroups": [GROUP], "resources": ["*"], "verbs": ["*"]}],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "keda-hpa-controller-external-metrics"},
            "roleRef": {
                "apiGroup": rbac,
                "kind": "ClusterRole",
                "name": "keda-external-metrics-reader",
            },
            "subjects": [
                {
                    "kind": "ServiceAccount",
                    "name": "horizontal-pod-autoscaler",
                    "namespace": "kube-system",
                }
            ],
        },
    ]


def desired_scaled_object(
    service: str, namespace: str, *, prometheus_url: str, query: str, target: float, most: int
) -> Manifest:
    """Return a ScaledObject for an InferenceService, with a target of a query per replica."""
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": service, "namespace": namespace},
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "fleetkeeper.io/v1alpha1",
                "kind": "InferenceService",
                "name": service,
            },
            "pollingInterval": 5,
            "minReplicaCount": 1,
            "maxReplicaCount": most,
            "triggers": [
                {
                    "type": "prometheus",
                    "metadata": {
                        "serverAddress": prometheus_url,
                        "query": query,
                        "threshold": f"{target:g}",
                        "ignoreNullValues": "false",
                    },
                }
            ],
        },
    }
