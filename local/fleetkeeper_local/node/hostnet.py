"""The node's part of the host network: a bridge, forwarding, and their removal."""

from __future__ import annotations

import json
from pathlib import Path

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.shell import attempt, run
from fleetkeeper_local.node.settings import NodeSettings

SYSCTLS = (
    "net/ipv4/ip_forward",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""Kernel settings that we or the kubelet change; `down` restores them."""

PROXY_TABLES = (("ip", "kube-proxy"), ("ip6", "kube-proxy"))
NETNS = Path("/run/netns")


def ensure_bridge(settings: NodeSettings) -> None:
    """Create the bridge with the node's address and let the host forward between pods.

    Raises:
        LocalError: the name belongs to another kind of interface, or the network to another
            interface.
    """
    links = {link["ifname"]: link for link in json.loads(run("ip", "-details", "-json", "link"))}
    found = links.get(settings.bridge)
    if found is None:
        _refuse_taken_network(settings)
        run("ip", "link", "add", settings.bridge, "type", "bridge")
    elif found.get("linkinfo", {}).get("info_kind") != "bridge":
        raise LocalError(
            f"the interface {settings.bridge} exists and is not a bridge; choose another name with --bridge"
        )
    prefix = settings.pod_cidr.split("/")[1]
    run("ip", "address", "replace", f"{settings.node_ip}/{prefix}", "dev", settings.bridge)
    run("ip", "link", "set", settings.bridge, "up")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")


def remove_bridge(bridge: str) -> None:
    """Remove the bridge and the pods' interfaces on it."""
    for link in json.loads(attempt("ip", "-json", "link", "show", "master", bridge).stdout or "[]"):
        attempt("ip", "link", "delete", link["ifname"])
    attempt("ip", "link", "delete", bridge)


def remove_proxy_rules() -> None:
    """Remove the packet filter tables that kube-proxy created."""
    for family, name in PROXY_TABLES:
        attempt("nft", "delete", "table", family, name)


def remove_namespaces(names: list[str]) -> None:
    """Remove the named network namespaces, which the end of their pod would have removed."""
    for name in names:
        if (NETNS / name).exists():
            attempt("ip", "netns", "delete", name)


def namespaces_on(bridge_results: Path, network: str) -> list[str]:
    """Return the network namespaces of the pods that CNI plugins attached to our network.

    Args:
        bridge_results: the directory where CNI keeps the result of each attachment.
        network: the name of our network.
    """
    names: list[str] = []
    for path in sorted(bridge_results.glob(f"{network}-*")):
        try:
            config = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            continue  # half-written: then the namespace is found by its mount
        interfaces = config.get("result", {}).get("interfaces", ())
        names.extend(Path(link["sandbox"]).name for link in interfaces if link.get("sandbox"))
    return sorted(set(names))


def remember_sysctls(path: Path) -> None:
    """Store the kernel settings once, before the node changes them."""
    if not path.exists():
        values = {name: (Path("/proc/sys") / name).read_text().strip() for name in SYSCTLS}
        path.write_text(json.dumps(values, indent=1))


def restore_sysctls(path: Path) -> None:
    """Restore the kernel settings."""
    if path.exists():
        for name, value in json.loads(path.read_text()).items():
            (Path("/proc/sys") / name).write_text(value + "\n")
        path.unlink()


def _refuse_taken_network(settings: NodeSettings) -> None:
    for interface in json.loads(run("ip", "-json", "-4", "address")):
        for address in interface.get("addr_info", ()):
            if address.get("local") == settings.node_ip:
                raise LocalError(
                    f"{settings.node_ip} is the address of {interface['ifname']}; "
                    "choose another network with --pod-cidr"
                )
