"""The programs of a cluster: upstream Go modules, how they are linked, and what a build costs."""

from __future__ import annotations

from dataclasses import dataclass

KUBERNETES_VERSION = "1.36.3"
HELM_VERSION = "3.22.0"
PROMETHEUS_VERSION = "3.15.0"
COSIGN_VERSION = "3.1.3"
CONTAINERD_VERSION = "2.4.2"


@dataclass(frozen=True)
class Assets:
    """YAML files of an upstream Go module, joined into one."""

    name: str
    upstream: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A binary: the Go module that it comes from and how it is linked."""

    name: str
    module: str
    """Directory under local/node that pins the versions (go.mod, go.sum)."""
    package: str
    """The package argument of `go build`."""
    stamps: tuple[str, ...] = ()
    """`-X` values of the linker; without them Kubernetes reports v0.0.0 and helm rejects it."""
    tags: str = ""
    links: tuple[str, ...] = ()
    """Other names under which the binary can be run."""
    assets: Assets | None = None
    """A file made from upstream's files, stored next to the binary."""


_BASE = "k8s.io/component-base/version"
_CONTAINERD = "github.com/containerd/containerd/v2"
_MAJOR, _MINOR, _ = KUBERNETES_VERSION.split(".")

PROGRAMS = {
    program.name: program
    for program in (
        Program(
            name="fleetkeeper-node",
            module="kubernetes",
            package=".",
            stamps=(
                f"{_BASE}.gitVersion=v{KUBERNETES_VERSION}",
                f"{_BASE}.gitMajor={_MAJOR}",
                f"{_BASE}.gitMinor={_MINOR}",
                f"{_BASE}.gitTreeState=clean",
            ),
            links=(
                "etcd",
                "kube-apiserver",
                "kube-controller-manager",
                "kube-proxy",
                "kube-scheduler",
                "kubectl",
                "kubelet",
            ),
        ),
        Program(
            name="kwok",
            module="tools",
            package="sigs.k8s.io/kwok/cmd/kwok",
            assets=Assets(
                name="kwok-stages.yaml",
                upstream="sigs.k8s.io/kwok",
                files=(
                    "kustomize/stage/node/fast/node-initialize.yaml",
                    "kustomize/stage/node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
                    "kustomize/stage/pod/fast/pod-ready.yaml",
                    "kustomize/stage/pod/fast/pod-complete.yaml",
                    "kustomize/stage/pod/fast/pod-delete.yaml",
                ),
            ),
        ),
        Program(
            name="helm",
            module="tools",
            package="helm.sh/helm/v3/cmd/helm",
            stamps=(
                f"helm.sh/helm/v3/internal/version.version=v{HELM_VERSION}",
                # The Kubernetes version that `helm template` and `helm lint` assume; 1.20 if unset.
                *(
                    f"helm.sh/helm/v3/pkg/{package}.k8sVersion{part}={number}"
                    for package in ("chartutil", "lint/rules")
                    for part, number in (("Major", _MAJOR), ("Minor", _MINOR))
                ),
            ),
        ),
        Program(
            name="prometheus",
            module="prometheus",
            package="github.com/prometheus/prometheus/cmd/prometheus",
            stamps=(f"github.com/prometheus/common/version.Version={PROMETHEUS_VERSION}",),
            tags="remove_all_sd,enable_kubernetes_sd,enable_static_sd,enable_file_sd",
        ),
        Program(
            # Its own module: a change to the tests of the alerts does not build the server again.
            name="promtool",
            module="promtool",
            package="github.com/prometheus/prometheus/cmd/promtool",
            stamps=(f"github.com/prometheus/common/version.Version={PROMETHEUS_VERSION}",),
            tags="remove_all_sd,enable_kubernetes_sd,enable_static_sd,enable_file_sd",
        ),
        *(
            Program(
                name=name,
                module="containerd",
                package=f"{_CONTAINERD}/cmd/{name}",
                stamps=(f"{_CONTAINERD}/version.Version=v{CONTAINERD_VERSION}",),
                # Snapshotters that the node does not use.
                tags="no_btrfs,no_devmapper,no_tracing,no_zfs",
            )
            for name in ("containerd", "containerd-shim-runc-v2", "ctr")
        ),
        Program(name="coredns", module="coredns", package="."),
        Program(name="pause", module="pause", package="."),
        Program(
            name="actionlint",
            module="actionlint",
            package="github.com/rhysd/actionlint/cmd/actionlint",
        ),
        Program(name="kstatus", module="kstatus", package="."),
        Program(
            name="cosign",
            module="cosign",
            package="github.com/sigstore/cosign/v3/cmd/cosign",
            stamps=(f"sigs.k8s.io/release-utils/version.gitVersion=v{COSIGN_VERSION}",),
        ),
    )
}
ON_DEMAND = frozenset({"cosign"})
"""Programs that only a release and exhaustive tests need; they are built when first used."""
ONLY_TESTS = frozenset({"actionlint", "kstatus", "kwok", "promtool"})
"""Programs that a node and the demo do not use."""

COSTS = {
    "fleetkeeper-node": (15.0, "Kubernetes: etcd, API server, controllers, scheduler, kubelet"),
    "cosign": (4.0, "signatures of a release"),
    "prometheus": (2.0, "the metrics that decisions are made by"),
    "containerd": (1.2, "runs the containers"),
    "kwok": (1.1, "fake nodes with GPUs"),
    "helm": (0.9, "installs the charts"),
    "coredns": (0.9, "names of services"),
    "ctr": (0.6, "removes containers with the node"),
    "kstatus": (0.3, "the status that Flux computes"),
    "promtool": (0.2, "tests of the alerts"),
    "containerd-shim-runc-v2": (0.1, "runs the containers"),
    "actionlint": (0.1, "checks the workflows of CI"),
    "pause": (0.0, "holds the network of a pod"),
}
"""Minutes of processor time that a build takes, with sources to download, and its purpose.

Measured in all: 22 minutes without cosign, of which the node takes two thirds. The other shares
are estimates from the time that each build took beside another one.
"""
