"""Names of images in registries, and what a registry has under them."""

from __future__ import annotations

import ipaddress
import re

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.shell import attempt

TIMEOUT_S = 120.0
_ABSENT = re.compile(
    r"manifest unknown|name unknown|repository name not known|(?:artifact|repository) \S+ not found"
)
"""Messages by which registries report an unknown name: docker-registry, GHCR, Harbor."""


def host(name: str) -> str | None:
    """Return `HOST` or `HOST:PORT` of an image's name; None if it is a name of Docker Hub."""
    first, slash, _ = name.partition("/")
    named = slash and ("." in first or ":" in first or first == "localhost")
    return first if named else None


def plain_http(name: str) -> bool:
    """Return whether the registry is on loopback, where it has no TLS."""
    address = (host(name) or "").rpartition(":")[0] or host(name) or ""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def full(name: str) -> str:
    """Return the name with its registry: `docker.io/NAME` for one of Docker Hub."""
    if host(name) is not None:
        return name
    return f"docker.io/{name if '/' in name else f'library/{name}'}"


def without_tag(name: str) -> str:
    """Return the name without tag and digest."""
    return re.sub(r"(?::[^:/@]+)?(?:@.*)?$", "", name)


def by_digest(name: str) -> str:
    """Return `NAME@sha256:...` for a name that its registry has now.

    Raises:
        LocalError: the registry does not have it or cannot be read; the text is skopeo's.
    """
    found = full(name)
    done = attempt(
        *("skopeo", "inspect", "--no-tags", "--format", "{{.Digest}}"),
        *(f"--tls-verify={str(not plain_http(found)).lower()}", f"docker://{found}"),
        timeout_s=TIMEOUT_S,
    )
    if done.returncode:
        raise LocalError(f"cannot read the digest of {found}: {done.stderr.strip()}")
    return f"{without_tag(found)}@{done.stdout.strip()}"


def exists(name: str) -> bool:
    """Return whether the registry has this image, chart or other artifact.

    Raises:
        LocalError: the registry cannot be read; the text is skopeo's.
    """
    tls = f"--tls-verify={str(not plain_http(name)).lower()}"
    done = attempt("skopeo", "inspect", "--raw", tls, f"docker://{name}", timeout_s=TIMEOUT_S)
    if done.returncode and not _ABSENT.search(done.stderr):
        raise LocalError(f"cannot read {name}: {done.stderr.strip()}")
    return done.returncode == 0
