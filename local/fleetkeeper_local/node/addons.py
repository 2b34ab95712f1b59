"""Additions to a cluster's components: kubelet access, DNS and Prometheus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from fleetkeeper_local.common.files import write_file
from fleetkeeper_local.control_plane.flags import CLUSTER_DOMAIN, KUBELET_CLIENT
from fleetkeeper_local.control_plane.programs import program_path
from fleetkeeper_local.node.settings import DNS_IP, NodeSettings

Manifest = dict[str, Any]

RBAC = "rbac.authorization.k8s.io"
DNS_PORT = 5353
"""Above 1023, so that CoreDNS needs no capability."""
NOBODY_UID = 65534
SCRAPE_PERIOD = "2s"
PROMETHEUS_USER = "prometheus"
MONITORING = "monitoring"


def desired_access() -> list[Manifest]:
    """Return the RBAC that lets only the API server reach the kubelet (logs, exec, forwarding)."""
    return [
        _binding(
            "kubelet-api-admin",
            "system:kubelet-api-admin",
            {"kind": "User", "name": KUBELET_CLIENT, "apiGroup": RBAC},
        )
    ]


def desired_dns(image: str) -> list[Manifest]:
    """Return CoreDNS as an unprivileged Deployment behind the Service `kube-dns`.

    As with kubeadm's Corefile, no name of the cluster is cached: with a cache, a router would not see the
    address of a new engine for as long as the answer is kept that there is none.
    """
    corefile = f""".:{DNS_PORT} {{
    errors
    health :8181
    ready :8182
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
        ttl 5
    }}
}}
"""
    name = {"name": "coredns", "namespace": "kube-system"}
    labels = {"k8s-app": "kube-dns"}
    container = {
        "name": "coredns",
        "image": image,
        "args": ["-conf", "/etc/coredns/Corefile"],
        "ports": [
            {"name": "dns", "containerPort": DNS_PORT, "protocol": "UDP"},
            {"name": "dns-tcp", "containerPort": DNS_PORT, "protocol": "TCP"},
        ],
        "livenessProbe": {"httpGet": {"path": "/health", "port": 8181}, "failureThreshold": 5},
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8182}, "periodSeconds": 1},
        "resources": {
            "requests": {"cpu": "20m", "memory": "40Mi"},
            "limits": {"memory": "170Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns", "readOnly": True}],
    }
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": name},
        _role(
            "coredns",
            [
                _rule("", ["services", "pods", "namespaces"], ["list", "watch"]),
                _rule("discovery.k8s.io", ["endpointslices"], ["list", "watch"]),
            ],
        ),
        _binding("coredns", "coredns", {"kind": "ServiceAccount", **name}),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": name,
            "data": {"Corefile": corefile},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": name,
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        "serviceAccountName": "coredns",
                        "dnsPolicy": "Default",
                        "priorityClassName": "system-cluster-critical",
                        "nodeSelector": {"kubernetes.io/os": "linux"},
                        "securityContext": {
                            "runAsNonRoot": True,
                            "runAsUser": NOBODY_UID,
                            "seccompProfile": {"type": "RuntimeDefault"},
                        },
                        "containers": [container],
                        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
                    },
                },
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": labels},
            "spec": {
                "clusterIP": DNS_IP,
                "selector": labels,
                "ports": [
                    {"name": "dns", "port": 53, "targetPort": DNS_PORT, "protocol": "UDP"},
                    {"name": "dns-tcp", "port": 53, "targetPort": DNS_PORT, "protocol": "TCP"},
                ],
            },
        },
    ]


def desired_monitoring(settings: NodeSettings) -> list[Manifest]:
    """Return Prometheus's RBAC and the Service `prometheus.monitoring` that points to the host."""
    name = {"name": "prometheus", "namespace": MONITORING}
    port = {"name": "http", "port": settings.prometheus_port, "protocol": "TCP"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": MONITORING}},
        _role(
            "prometheus",
            [
                _rule("", ["nodes", "pods"], ["get", "list", "watch"]),
                _rule("", ["nodes/metrics"], ["get"]),
            ],
        ),
        _binding(
            "prometheus",
            "prometheus",
            {"kind": "User", "name": PROMETHEUS_USER, "apiGroup": RBAC},
        ),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": name,
            "spec": {"ports": [{**port, "targetPort": settings.prometheus_port}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**name, "labels": {"kubernetes.io/service-name": "prometheus"}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [settings.node_ip], "conditions": {"ready": True}}],
            "ports": [port],
        },
    ]


def prometheus_config(settings: NodeSettings) -> Manifest:
    """Return the configuration: scrape annotated pods every 2 s, and the kubelet for containers.

    The kubelet reports the memory and CPU of containers. Samples carry `namespace`, `pod`,
    `inference_service` and `component` (from the pods' labels `fleetkeeper.io/service` and
    `fleetkeeper.io/component`).
    """
    pki = settings.directory / "pki"
    tls = {
        "ca_file": str(pki / "ca.crt"),
        "cert_file": str(pki / "prometheus.crt"),
        "key_file": str(pki / "prometheus.key"),
    }
    login = str(settings.directory / "prometheus.kubeconfig")
    annotation = "__meta_kubernetes_pod_annotation_prometheus_io_"
    label = "__meta_kubernetes_pod_label_fleetkeeper_io_"
    pods = [
        {"action": "keep", "source_labels": [annotation + "scrape"], "regex": "true"},
        {
            "action": "drop",
            "source_labels": ["__meta_kubernetes_pod_phase"],
            "regex": "Pending|Succeeded|Failed",
        },
        {
            "source_labels": ["__meta_kubernetes_pod_ip", annotation + "port"],
            "regex": r"(.+);(\d+)",
            "separator": ";",
            "replacement": "$1:$2",
            "target_label": "__address__",
        },
        _copy(annotation + "path", "__metrics_path__"),
        _copy(annotation + "scheme", "__scheme__"),
        _copy("__meta_kubernetes_namespace", "namespace"),
        _copy("__meta_kubernetes_pod_name", "pod"),
        _copy(label + "service", "inference_service"),
        _copy(label + "component", "component"),
    ]
    return {
        "global": {"scrape_interval": SCRAPE_PERIOD, "scrape_timeout": SCRAPE_PERIOD},
        "scrape_configs": [
            {
                "job_name": "pods",
                "kubernetes_sd_configs": [{"role": "pod", "kubeconfig_file": login}],
                "relabel_configs": pods,
            },
            {
                "job_name": "containers",
                "scheme": "https",
                "metrics_path": "/metrics/cadvisor",
                "tls_config": tls,
                "scrape_interval": "5s",
                "scrape_timeout": "5s",
                "honor_timestamps": False,
                "kubernetes_sd_configs": [{"role": "node", "kubeconfig_file": login}],
                "relabel_configs": [
                    # Fake nodes have no kubelet.
                    {
                        "action": "drop",
                        "source_labels": ["__meta_kubernetes_node_label_type"],
                        "regex": "kwok",
                    }
                ],
            },
        ],
    }


def prometheus(settings: NodeSettings) -> list[str | Path]:
    """Return Prometheus's arguments; it listens on the node's address for pods and host only."""
    directory = settings.directory
    return [
        program_path("prometheus"),
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'prometheus'}",
        "--storage.tsdb.retention.time=6h",
        f"--web.listen-address={settings.node_ip}:{settings.prometheus_port}",
        "--log.level=warn",
    ]


def write_prometheus_config(settings: NodeSettings) -> None:
    """Write the file that Prometheus's arguments name."""
    write_file(settings.directory / "prometheus.yaml", yaml.safe_dump(prometheus_config(settings)))


def as_list(items: list[Manifest]) -> str:
    """Return the manifests as one document for `kubectl apply -f -`."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def _copy(source: str, target: str) -> Manifest:
    return {
        "source_labels": [source],
        "regex": "(.+)",
        "target_label": target,
        "replacement": "$1",
    }


def _rule(group: str, resources: list[str], verbs: list[str]) -> Manifest:
    return {"apiGroups": [group], "resources": resources, "verbs": verbs}


def _role(name: str, rules: list[Manifest]) -> Manifest:
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": rules,
    }


def _binding(name: str, role: str, subject: Manifest) -> Manifest:
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
        "subjects": [subject],
    }
