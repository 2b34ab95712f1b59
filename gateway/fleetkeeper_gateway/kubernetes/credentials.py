"""The API server's address and our credentials."""

from __future__ import annotations

import base64
import json
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class NoCredentials(RuntimeError):
    """The lack of a usable kubeconfig or ServiceAccount. The message says what to do."""


@dataclass(slots=True)
class Credentials:
    """The address of an API server, and how we prove who we are.

    The kubelet replaces a ServiceAccount's token about every hour, and the CA when the cluster's is
    rotated. So both are read again for each request; requests are rare.
    """

    url: str
    ca_file: Path | None = None
    token_file: Path | None = None
    token: str | None = field(default=None, repr=False)
    context: ssl.SSLContext | None = field(default=None, repr=False)
    _trusted: str = field(default="", repr=False)

    def headers(self) -> dict[str, str]:
        """Return the headers that identify us.

        Raises:
            OSError: the token's file cannot be read.
        """
        token = self.token_file.read_text().strip() if self.token_file else self.token
        return {"Authorization": f"Bearer {token}"} if token else {}

    def tls(self) -> ssl.SSLContext | bool:
        """Return the TLS settings for the server, or True for the defaults.

        Raises:
            OSError: the CA's file cannot be read.
        """
        if self.ca_file is not None:
            trusted = self.ca_file.read_text()
            if trusted != self._trusted:
                self.context = ssl.create_default_context(cadata=trusted)
                self._trusted = trusted
        return self.context or True


def load_credentials(kubeconfig: Path | None) -> Credentials:
    """Return credentials from a kubeconfig in JSON, or the pod's ServiceAccount if it is None.

    Raises:
        NoCredentials: they cannot be loaded.
    """
    return _of_pod() if kubeconfig is None else _of_kubeconfig(kubeconfig)


def _of_pod() -> Credentials:
    host, port = (
        os.environ.get("KUBERNETES_SERVICE_HOST"),
        os.environ.get("KUBERNETES_SERVICE_PORT"),
    )
    if not host or not port:
        raise NoCredentials(
            "not in a pod (no KUBERNETES_SERVICE_HOST); set FLEETKEEPER_GATEWAY_KUBECONFIG to a kubeconfig"
        )
    found = Credentials(
        f"https://{f'[{host}]' if ':' in host else host}:{port}",
        ca_file=ACCOUNT / "ca.crt",
        token_file=ACCOUNT / "token",
    )
    try:
        found.headers()
        found.tls()
    except (OSError, ssl.SSLError) as problem:
        raise NoCredentials(
            f"cannot use the pod's ServiceAccount in {ACCOUNT}: {problem}; "
            "set automountServiceAccountToken of the pod to true"
        ) from problem
    return found


def _of_kubeconfig(path: Path) -> Credentials:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise NoCredentials(f"cannot read the kubeconfig {path}: {problem.strerror}") from problem
    except ValueError as problem:
        raise NoCredentials(
            f"the kubeconfig {path} is not JSON; write it with: kubectl config view --raw --flatten -o json"
        ) from problem
    try:
        context = _named(config["contexts"], config["current-context"])["context"]
        cluster = _named(config["clusters"], context["cluster"])["cluster"]
        user = _named(config["users"], context["user"])["user"] or {}
        found = Credentials(cluster["server"].rstrip("/"), token=user.get("token"))
        authority = cluster.get("certificate-authority-data")
        if authority:
            found.context = ssl.create_default_context(cadata=_decoded(authority))
        if user.get("client-certificate-data"):
            found.context = found.context or ssl.create_default_context()
            _load_certificate(found.context, user)
    except (KeyError, TypeError, AttributeError, ValueError, ssl.SSLError) as problem:
        raise NoCredentials(
            f"cannot use the kubeconfig {path}: {type(problem).__name__} {problem}; it needs a "
            "current-context with a server and a token or client certificate, all in the file "
            "(kubectl config view --raw --flatten -o json)"
        ) from problem
    return found


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    for entry in entries:
        if entry["name"] == name:
            return entry
    raise KeyError(name)


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()


def _load_certificate(context: ssl.SSLContext, user: dict[str, str]) -> None:
    """Load a client certificate; Python's ssl reads one only from a file."""
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as pair:  # mode 0600
        pair.write(_decoded(user["client-certificate-data"]))
        pair.write("\n" + _decoded(user["client-key-data"]))
        pair.flush()
        context.load_cert_chain(pair.name)
