"""A Redis of the user on the local node: TLS of a CA of its own, and a user with the rights that the page names."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetkeeper_local.common.paths import REPOSITORY
from fleetkeeper_local.control_plane.pki import Authority
from fleetkeeper_local.demo.cluster import Cluster, Live
from tests.support.node.node_world import pod_manifest

NAME: Final = "own-redis"
USER: Final = "gateway"
PORT: Final = 6379
TLS: Final = "/etc/redis-tls"
PAGE: Final = REPOSITORY / "docs" / "gateway-limits.md"
LABELS: Final = {"app": NAME}
READY_S: Final = 400


@dataclass(frozen=True)
class OwnRedis:
    """The server, and what the chart needs to reach it."""

    cluster: Cluster
    namespace: str

    @property
    def host(self) -> str:
        """Return its name, for which its certificate is valid."""
        return f"{NAME}.{self.namespace}.svc"

    @property
    def values(self) -> Live:
        """Return `gateway.redis` of the chart."""
        return {
            "url": f"rediss://{self.host}:{PORT}/0",
            "username": USER,
            "passwordSecret": {"name": f"{NAME}-login", "key": "password"},
            "caSecret": {"name": f"{NAME}-ca", "key": "ca.crt"},
            "peers": [{"podLabels": LABELS}],
        }

    def keys(self) -> list[str]:
        """Return the names of its entries, as the gateway's user sees them."""
        command = f"REDISCLI_AUTH=$PASSWORD redis-cli --tls --cacert {TLS}/ca.crt --user {USER} -h {self.host} --scan"
        return self.cluster.kubectl(
            *("-n", self.namespace, "exec", NAME, "--", "sh", "-c", command)
        ).split()


@contextmanager
def own_redis(cluster: Cluster, namespace: str, image: str, folder: Path) -> Iterator[OwnRedis]:
    """Run the server until the block ends.

    Args:
        cluster: the local node.
        namespace: that of the release, in which the chart expects the Secrets.
        image: an image with redis-server.
        folder: for the certificates.
    """
    found = OwnRedis(cluster, namespace)
    try:
        cluster.apply(*_secrets(found.host, folder), _service(), _pod(image), namespace=namespace)
        cluster.kubectl(
            *("-n", namespace, "wait", "--for=condition=Ready", f"pod/{NAME}"),
            f"--timeout={READY_S}s",
            timeout_s=READY_S + 30,
        )
        yield found
    finally:
        cluster.kubectl("-n", namespace, "delete", "pod,service,secret", "-l", f"app={NAME}")


def _secrets(host: str, folder: Path) -> list[Live]:
    trusted = Authority(folder, "redis-ca").ensure()
    identity = trusted.issue("redis", NAME, hosts=[host], server=True)
    authority = trusted.certificate.read_text()
    content = {
        "login": {"password": secrets.token_urlsafe(24)},
        "ca": {"ca.crt": authority},
        "tls": {
            "ca.crt": authority,
            "tls.crt": identity.certificate.read_text(),
            "tls.key": identity.key.read_text(),
        },
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"{NAME}-{part}", "labels": LABELS},
            "stringData": data,
        }
        for part, data in content.items()
    ]


def _service() -> Live:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME, "labels": LABELS},
        "spec": {"selector": LABELS, "ports": [{"port": PORT}]},
    }


def _pod(image: str) -> Live:
    """Return the server's pod. It takes connections with TLS alone, and its default user is off."""
    password = {"secretKeyRef": {"name": f"{NAME}-login", "key": "password"}}
    manifest = pod_manifest(
        NAME,
        image,
        "",
        command=[
            "redis-server",
            *("--port", "0", "--tls-port", str(PORT), "--tls-auth-clients", "no"),
            *("--tls-cert-file", f"{TLS}/tls.crt", "--tls-key-file", f"{TLS}/tls.key"),
            *("--save", "", "--maxmemory-policy", "noeviction"),
            *("--user", "default", "off"),
            *("--user", USER, "on", ">$(PASSWORD)", *_rights()),
        ],
        env=[{"name": "PASSWORD", "valueFrom": password}],
        readinessProbe={"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        volumeMounts=[{"name": "tls", "mountPath": TLS, "readOnly": True}],
    )
    manifest["spec"]["volumes"] = [{"name": "tls", "secret": {"secretName": f"{NAME}-tls"}}]
    return manifest


def _rights() -> list[str]:
    """Return the rights of the gateway's user, as the page tells them."""
    (rights,) = re.findall(r"^\| a user with `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)
    return str(rights).split()
