"""The arguments and configuration files of the control plane's components."""

from __future__ import annotations

import json
from pathlib import Path

from fleetkeeper_local.common.files import write_file
from fleetkeeper_local.control_plane.access import Endpoint
from fleetkeeper_local.control_plane.programs import program_path

CLUSTER_DOMAIN = "cluster.local"
CLUSTER_SUFFIX = f".default.svc.{CLUSTER_DOMAIN}"
SERVICE_CIDR = "10.96.0.0/16"
SERVICE_API_IP = "10.96.0.1"
KUBELET_CLIENT = "kube-apiserver-kubelet-client"

AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}

CLIENT_QPS = 300
"""Requests per second of the controllers. The defaults (20 to 50) delay 1,000 pods by a minute."""
FAKE_NODE_GRACE = "1h"
"""Grace period before a silent fake node is not Ready; a real one has 50 s."""
FAKE_NODE_HPA_PERIOD = "2s"
"""Time between two decisions of the HorizontalPodAutoscalers; Kubernetes' default is 15 s."""


def etcd(directory: Path, endpoint: Endpoint) -> list[str | Path]:
    """Return etcd's arguments: loopback, mutual TLS, no fsync because this data may be lost."""
    pki = directory / "pki"
    client = f"https://127.0.0.1:{endpoint.etcd}"
    peer = f"https://127.0.0.1:{endpoint.etcd_peer}"
    return [
        program_path("etcd"),
        "--name=local",
        f"--data-dir={directory / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=local={peer}",
        f"--cert-file={pki / 'etcd.crt'}",
        f"--key-file={pki / 'etcd.key'}",
        "--client-cert-auth",
        f"--trusted-ca-file={pki / 'etcd-ca.crt'}",
        f"--peer-cert-file={pki / 'etcd.crt'}",
        f"--peer-key-file={pki / 'etcd.key'}",
        "--peer-client-cert-auth",
        f"--peer-trusted-ca-file={pki / 'etcd-ca.crt'}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver(directory: Path, endpoint: Endpoint, *, real_node: bool) -> list[str | Path]:
    """Return kube-apiserver's arguments: certificates only, Node and RBAC authorization.

    Anonymous access is off.
    """
    pki = directory / "pki"
    argv: list[str | Path] = [
        program_path("kube-apiserver"),
        f"--etcd-servers=https://127.0.0.1:{endpoint.etcd}",
        f"--etcd-cafile={pki / 'etcd-ca.crt'}",
        f"--etcd-certfile={pki / 'apiserver-etcd.crt'}",
        f"--etcd-keyfile={pki / 'apiserver-etcd.key'}",
        f"--bind-address={endpoint.host}",
        f"--advertise-address={endpoint.host}",
        f"--secure-port={endpoint.api}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        f"--service-account-issuer=https://kubernetes.default.svc.{CLUSTER_DOMAIN}",
        f"--service-account-key-file={pki / 'sa.pub'}",
        f"--service-account-signing-key-file={pki / 'sa.key'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--anonymous-auth=false",
        "--allow-privileged=true",
        "--profiling=false",
        f"--audit-policy-file={directory / 'audit-policy.json'}",
        f"--audit-log-path={directory / 'audit.log'}",
        f"--requestheader-client-ca-file={pki / 'front-ca.crt'}",
        "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki / 'front-proxy.crt'}",
        f"--proxy-client-key-file={pki / 'front-proxy.key'}",
    ]
    if not real_node:
        # A loopback address must not back the Service `kubernetes`, and no pod uses it.
        return [*argv, "--endpoint-reconciler-type=none"]
    return [
        *argv,
        "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        f"--kubelet-client-certificate={pki / 'apiserver-kubelet.crt'}",
        f"--kubelet-client-key={pki / 'apiserver-kubelet.key'}",
    ]


def controller_manager(directory: Path, endpoint: Endpoint, *, real_node: bool) -> list[str | Path]:
    """Return kube-controller-manager's arguments, with the controllers that a single node needs.

    A fake node never fails. On a busy machine its lease is late; the node controller would then set
    its pods not Ready, and kwok would not set them Ready again. Fake pods start at once, so that an
    autoscaler need not wait for them either.
    """
    pki = directory / "pki"
    for_fake_nodes = [
        f"--node-monitor-grace-period={FAKE_NODE_GRACE}",
        f"--horizontal-pod-autoscaler-sync-period={FAKE_NODE_HPA_PERIOD}",
    ]
    login = directory / "kube-controller-manager.kubeconfig"
    return [
        program_path("kube-controller-manager"),
        f"--kubeconfig={login}",
        f"--authentication-kubeconfig={login}",
        f"--authorization-kubeconfig={login}",
        "--bind-address=127.0.0.1",
        f"--secure-port={endpoint.controller_manager}",
        f"--cert-dir={directory / 'kube-controller-manager'}",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki / 'sa.key'}",
        f"--root-ca-file={pki / 'ca.crt'}",
        "--leader-elect=false",
        f"--kube-api-qps={CLIENT_QPS}",
        f"--kube-api-burst={2 * CLIENT_QPS}",
        "--controllers=*,-node-ipam-controller,-node-route-controller,-service-lb-controller",
        *([] if real_node else for_fake_nodes),
    ]


def scheduler(directory: Path, endpoint: Endpoint) -> list[str | Path]:
    """Return kube-scheduler's arguments; its configuration is in a file."""
    login = directory / "kube-scheduler.kubeconfig"
    return [
        program_path("kube-scheduler"),
        f"--config={directory / 'scheduler.json'}",
        f"--authentication-kubeconfig={login}",
        f"--authorization-kubeconfig={login}",
        "--bind-address=127.0.0.1",
        f"--secure-port={endpoint.scheduler}",
        f"--tls-cert-file={directory / 'pki' / 'kube-scheduler-server.crt'}",
        f"--tls-private-key-file={directory / 'pki' / 'kube-scheduler-server.key'}",
    ]


def kwok(directory: Path, endpoint: Endpoint, annotation: str) -> list[str | Path]:
    """Return kwok's arguments: it acts as kubelet of annotated nodes, with its "fast" stages."""
    return [
        program_path("kwok"),
        f"--kubeconfig={directory / 'kwok.kubeconfig'}",
        f"--config={program_path('kwok-stages.yaml')}",
        f"--manage-nodes-with-annotation-selector={annotation}",
        "--node-lease-duration-seconds=40",
        "--v=WARN",
        "--node-ip=127.0.0.1",
        "--cidr=10.250.0.0/16",
        f"--server-address=127.0.0.1:{endpoint.kwok}",
    ]


def write_configs(directory: Path) -> None:
    """Write the files that the arguments above name."""
    _write_json(directory / "audit-policy.json", AUDIT_POLICY)
    _write_json(
        directory / "scheduler.json",
        {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {
                "kubeconfig": str(directory / "kube-scheduler.kubeconfig"),
                "qps": CLIENT_QPS,
                "burst": 2 * CLIENT_QPS,
            },
        },
    )


def _write_json(path: Path, document: object) -> None:
    write_file(path, json.dumps(document, indent=1) + "\n")
