"""The Pod Security Standard *restricted*, as a pure check of a pod template.

Written from https://kubernetes.io/docs/concepts/security/pod-security-standards/ (baseline and
restricted, Linux pods, without the exceptions that a user namespace would open).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VOLUME_TYPES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}
SELINUX_TYPES = {
    None,
    "",
    "container_t",
    "container_init_t",
    "container_kvm_t",
    "container_engine_t",
}
APPARMOR_TYPES = {None, "RuntimeDefault", "Localhost"}
SECCOMP_TYPES = {"RuntimeDefault", "Localhost"}


def violations_of_restricted(template: dict[str, Any]) -> list[str]:
    """What a namespace that enforces *restricted* would refuse the pod for; empty means nothing."""
    pod = template["spec"]
    found = list(_pod(pod)) + list(_annotations(template))
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in pod.get(kind, ()):
            found += [f"{container['name']}: {problem}" for problem in _container(container, pod)]
    return found


def _annotations(template: dict[str, Any]) -> Iterator[str]:
    for key, value in template.get("metadata", {}).get("annotations", {}).items():
        is_apparmor = key.startswith("container.apparmor.security.beta.kubernetes.io/")
        if is_apparmor and value != "runtime/default" and not value.startswith("localhost/"):
            yield f"annotation {key}={value}"


def _pod(pod: dict[str, Any]) -> Iterator[str]:
    for flag in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(flag):
            yield flag
    context = pod.get("securityContext", {})
    yield from _selinux_and_profiles(context)
    for sysctl in context.get("sysctls", ()):
        if sysctl["name"] not in SAFE_SYSCTLS:
            yield f"sysctl {sysctl['name']}"
    if context.get("runAsUser") == 0:
        yield "runAsUser 0"
    for volume in pod.get("volumes", ()):
        for kind in volume.keys() - {"name"}:
            if kind not in VOLUME_TYPES:
                yield f"volume {volume['name']} of type {kind}"


def _selinux_and_profiles(context: dict[str, Any]) -> Iterator[str]:
    selinux = context.get("seLinuxOptions", {})
    if selinux.get("type") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield "seLinuxOptions"
    if context.get("appArmorProfile", {}).get("type") not in APPARMOR_TYPES:
        yield "appArmorProfile"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "hostProcess"


def _container(container: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    context = container.get("securityContext", {})
    outer = pod.get("securityContext", {})
    yield from _selinux_and_profiles(context)
    if context.get("privileged"):
        yield "privileged"
    if context.get("procMount", "Default") != "Default":
        yield "procMount"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if "ALL" not in context.get("capabilities", {}).get("drop", ()):
        yield "capabilities are not dropped"
    if set(context.get("capabilities", {}).get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities are added"
    if context.get("runAsNonRoot", outer.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot is not true"
    if context.get("runAsUser") == 0:
        yield "runAsUser 0"
    seccomp = context.get("seccompProfile", outer.get("seccompProfile", {}))
    if seccomp.get("type") not in SECCOMP_TYPES:
        yield "seccompProfile"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort"
    yield from _hosts_of_handlers(container)


def _hosts_of_handlers(container: dict[str, Any]) -> Iterator[str]:
    handlers = [
        container.get(name, {}) for name in ("startupProbe", "livenessProbe", "readinessProbe")
    ]
    handlers += container.get("lifecycle", {}).values()
    for handler in handlers:
        if any(handler.get(kind, {}).get("host") for kind in ("httpGet", "tcpSocket")):
            yield "a probe or a lifecycle handler that names a host"
