"""The arguments and configuration files of the programs that make a machine a node."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import yaml

from fleetkeeper_local.common.files import write_file
from fleetkeeper_local.common.packages import CNI_PLUGINS
from fleetkeeper_local.control_plane.flags import CLUSTER_DOMAIN
from fleetkeeper_local.control_plane.programs import program_path
from fleetkeeper_local.node.settings import DNS_IP, NodeSettings

CNI_NETWORK = "fleetkeeper-local"
KUBELET_PORT = 10250
SETTINGS_FILE = "node.json"
CAP_SYS_RESOURCE = 24
RUNTIME_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr")


def containerd(settings: NodeSettings) -> list[str | Path]:
    """Return containerd's arguments, with our configuration and directories."""
    return [program_path("containerd"), "--config", settings.directory / "containerd.toml"]


def registry(settings: NodeSettings) -> list[str | Path]:
    """Return the image registry's arguments."""
    return ["docker-registry", "serve", settings.directory / "registry.yaml"]


def kubelet(settings: NodeSettings) -> list[str | Path]:
    """Return the kubelet's arguments."""
    directory = settings.directory
    return [
        program_path("kubelet"),
        f"--config={directory / 'kubelet.yaml'}",
        f"--kubeconfig={directory / 'kubelet.kubeconfig'}",
        f"--root-dir={directory / 'kubelet'}",
        f"--hostname-override={settings.node_name}",
        f"--node-ip={settings.node_ip}",
        # Deprecated, but without it cAdvisor uses the default socket and has no container metrics.
        f"--containerd={settings.containerd_socket}",
    ]


def kube_proxy(settings: NodeSettings) -> list[str | Path]:
    """Return kube-proxy's arguments; it uses nftables."""
    return [program_path("kube-proxy"), f"--config={settings.directory / 'kube-proxy.yaml'}"]


def read_settings(directory: Path) -> NodeSettings:
    """Return the settings with which a directory's node was started, else the defaults."""
    try:
        stored = json.loads((directory / SETTINGS_FILE).read_text())
        return NodeSettings(directory=directory, **stored)
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return NodeSettings(directory=directory)


def write_settings(settings: NodeSettings) -> None:
    """Store the settings for later commands."""
    stored = {name: value for name, value in asdict(settings).items() if name != "directory"}
    write_file(settings.directory / SETTINGS_FILE, json.dumps(stored, indent=1) + "\n")


def write_node_configs(settings: NodeSettings, pause_image: str) -> None:
    """Write the configuration files that the arguments above name."""
    directory = settings.directory
    network = directory / "cni" / "net.d" / "10-fleetkeeper.conflist"
    write_file(directory / "containerd.toml", _containerd_config(settings, pause_image))
    write_file(network, json.dumps(_cni_config(settings), indent=1))
    write_file(directory / "kubelet.yaml", yaml.safe_dump(_kubelet_config(settings)))
    write_file(directory / "kube-proxy.yaml", yaml.safe_dump(_proxy_config(settings)))


def _containerd_config(settings: NodeSettings, pause_image: str) -> str:
    directory = settings.directory
    adjust = "false" if _may_raise_priority() else "true"
    runtime = "plugins.'io.containerd.cri.v1.runtime'"
    images = "plugins.'io.containerd.cri.v1.images'"
    return f"""version = 4
root = "{directory}/containerd"
state = "{directory}/sockets/containerd"

[plugins.'io.containerd.server.v1.grpc']
  address = "{settings.containerd_socket}"

[plugins.'io.containerd.server.v1.ttrpc']
  address = "{settings.containerd_socket}.ttrpc"

[plugins.'io.containerd.internal.v1.opt']
  path = "{directory}/opt"

# It would listen on a socket outside our directory.
[plugins.'io.containerd.nri.v1.nri']
  disable = true

[{images}]
  snapshotter = "overlayfs"
[{images}.pinned_images]
  sandbox = "{pause_image}"
[{images}.registry]
  config_path = "{directory}/certs.d"

[{runtime}]
  # Without CAP_SYS_RESOURCE runc cannot lower oom_score_adj and starts no container.
  restrict_oom_score_adj = {adjust}
  disable_apparmor = true
[{runtime}.containerd]
  default_runtime_name = "runc"
[{runtime}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  runtime_path = "{program_path("containerd-shim-runc-v2")}"
[{runtime}.cni]
  bin_dirs = ["{CNI_PLUGINS}"]
  conf_dir = "{directory}/cni/net.d"
"""


def _cni_config(settings: NodeSettings) -> dict[str, object]:
    """Return the bridge network without masquerading: pods reach only each other and the host."""
    return {
        "cniVersion": "0.4.0",
        "name": CNI_NETWORK,
        "plugins": [
            {
                "type": "bridge",
                "bridge": settings.bridge,
                "isGateway": True,
                "ipMasq": False,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": settings.pod_cidr}]],
                    "dataDir": str(settings.directory / "cni" / "addresses"),
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }


def _kubelet_config(settings: NodeSettings) -> dict[str, object]:
    directory = settings.directory
    pki = directory / "pki"
    thresholds = {
        # The defaults evict pods and delete images on disks with reserved space.
        "memory.available": "200Mi",
        "nodefs.available": "2Gi",
        "imagefs.available": "2Gi",
        "nodefs.inodesFree": "1%",
        "imagefs.inodesFree": "1%",
    }
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True, "cacheTTL": "10s"},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki / "kubelet-serving.crt"),
        "tlsPrivateKeyFile": str(pki / "kubelet-serving.key"),
        "address": settings.node_ip,
        "port": KUBELET_PORT,
        "healthzBindAddress": "127.0.0.1",
        "failCgroupV1": False,
        "failSwapOn": False,
        "cgroupDriver": "cgroupfs",
        "clusterDNS": [DNS_IP],
        "clusterDomain": CLUSTER_DOMAIN,
        "containerRuntimeEndpoint": f"unix://{settings.containerd_socket}",
        "resolvConf": "",
        # A developer waits for this node. Elsewhere restarts are up to 5 min apart, and a running
        # pod sees a changed ConfigMap after a minute or two.
        "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
        "syncFrequency": "10s",
        "evictionHard": thresholds,
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "makeIPTablesUtilChains": False,
        "serializeImagePulls": False,
        "volumePluginDir": str(directory / "volume-plugins"),
        "podLogsDir": str(directory / "podlogs"),
    }


def _proxy_config(settings: NodeSettings) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(settings.directory / "kube-proxy.kubeconfig")},
        "clusterCIDR": settings.pod_cidr,
        "hostnameOverride": settings.node_name,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        # 0: leave the machine's connection tracking as it is.
        "conntrack": {
            "maxPerCore": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
        "nodePortAddresses": ["primary"],
    }


def _may_raise_priority() -> bool:
    """Return whether this process has CAP_SYS_RESOURCE."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_RESOURCE & 1)
    return False
