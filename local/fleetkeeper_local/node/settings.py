"""Settings of a local node; the defaults fit a machine that runs one."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from fleetkeeper_local.common.paths import data_dir

DNS_IP = "10.96.0.10"


@dataclass(frozen=True)
class NodeSettings:
    """The data directory, names and addresses of one node."""

    directory: Path = field(default_factory=data_dir)
    """The node writes everything below this directory."""
    bridge: str = "fk0"
    """The interface that connects the host and the pods; it has the node's address."""
    pod_cidr: str = "10.244.0.0/24"
    node_name: str = "node1"
    api_port: int = 16443
    registry_port: int = 5000
    prometheus_port: int = 9090
    prometheus: bool = True
    """True to run a Prometheus that scrapes annotated pods."""

    @property
    def node_ip(self) -> str:
        """The bridge's address: the first of the pod network."""
        return str(ipaddress.ip_network(self.pod_cidr)[1])

    @property
    def containerd_socket(self) -> Path:
        """The socket of containerd."""
        return self.directory / "sockets" / "containerd.sock"
