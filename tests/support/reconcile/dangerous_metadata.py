"""Labels and annotations that other programs take as instructions, which no tenant may give by default."""

from __future__ import annotations

import random
from typing import Any

ANNOTATIONS = {
    "container.apparmor.security.beta.kubernetes.io/engine": "unconfined",
    "container.seccomp.security.alpha.kubernetes.io/engine": "unconfined",
    "scheduler.alpha.kubernetes.io/tolerations": "[]",
    "kubernetes.io/egress-bandwidth": "1",
    "node.k8s.io/anything": "x",
    "io.kubernetes.cri-o.userns-mode": "auto",
    "io.kubernetes.cri-o.Devices": "/dev/kmsg",
    "io.katacontainers.config.hypervisor.path": "/tmp/evil",
    "cpu-quota.crio.io": "disable",
    "run.oci.handler": "krun",
    "k8s.v1.cni.cncf.io/networks": "storage",
    "v1.multus-cni.io/default-network": "storage",
    "k8s.ovn.org/pod-networks": "{}",
    "cni.projectcalico.org/ipAddrs": '["10.0.0.9"]',
    "sidecar.istio.io/inject": "true",
    "sidecar.istio.io/bootstrapOverride": "mine",
    "traffic.sidecar.istio.io/excludeOutboundIPRanges": "0.0.0.0/0",
    "linkerd.io/inject": "enabled",
    "vault.hashicorp.com/agent-inject": "true",
    "vault.hashicorp.com/agent-inject-secret-x": "secret/data/other",
    "iam.amazonaws.com/role": "admin",
    "ad.datadoghq.com/engine.checks": "{}",
    "co.elastic.logs/enabled": "false",
    "openshift.io/scc": "privileged",
    "openshift.io/required-scc": "privileged",
    "reloader.stakater.com/auto": "true",
    "prometheus.io/param_x": "y",
}
LABELS = {
    "azure.workload.identity/use": "true",
    "sidecar.istio.io/inject": "true",
    "istio.io/rev": "other",
    "kueue.x-k8s.io/priority-class": "high",
    "topology.kubernetes.io/zone": "a",
    "batch.kubernetes.io/job-name": "theirs",
    "security.istio.io/tlsMode": "disabled",
}


def add_dangerous(rng: random.Random, spec: dict[str, Any]) -> None:
    """Add a dangerous label or annotation to a third of the specs."""
    if rng.random() < 1 / 3:
        kind, names = rng.choice((("labels", LABELS), ("annotations", ANNOTATIONS)))
        name = rng.choice(sorted(names))
        spec.setdefault("podMetadata", {}).setdefault(kind, {})[name] = names[name]


def dangerous_in(template: dict[str, Any]) -> list[str]:
    """Return the names of dangerous labels and annotations in a pod template."""
    metadata = template["metadata"]
    return sorted(
        (metadata.get("annotations", {}).keys() & ANNOTATIONS.keys())
        | (metadata.get("labels", {}).keys() & LABELS.keys())
    )
