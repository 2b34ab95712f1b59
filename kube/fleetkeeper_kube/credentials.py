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
    rotated. So both are checked for each request, and read again when they were replaced.
    """

    url: str
    ca_file: Path | None = None
    token_file: Path | None = None
    authorization: str = field(default="", repr=False)
    """The Authorization header, if there is no `token_file`."""
    context: ssl.SSLContext | None = field(default=None, repr=False)
    server_name: str | None = None
    """The name in the server's certificate, if the address has another one."""
    proxy: str | None = None
    _trusted: str = field(default="", repr=False)
    _files: dict[Path, tuple[tuple[int, int], str]] = field(default_factory=dict, repr=False)
    """The inode and the time of change of each file, and its text."""

    def headers(self) -> dict[str, str]:
        """Return the headers that identify us.

        Raises:
            OSError: the token's file cannot be read, or is empty.
        """
        if self.token_file is not None:
            return {"Authorization": f"Bearer {self._content(self.token_file)}"}
        return {"Authorization": self.authorization} if self.authorization else {}

    def tls(self) -> ssl.SSLContext | bool:
        """Return the TLS settings for the server, or True for the defaults.

        Raises:
            OSError: the CA's file cannot be read, or is empty.
        """
        if self.ca_file is not None:
            trusted = self._content(self.ca_file)
            if trusted != self._trusted:
                self.context = ssl.create_default_context(cadata=trusted)
                self._trusted = trusted
        return self.context or True

    def _content(self, path: Path) -> str:
        """Return the text of a file. An empty CA would mean to trust those of the system.

        Raises:
            OSError: the file cannot be read, or is empty.
        """
        found = path.stat()
        mark = found.st_ino, found.st_mtime_ns
        if self._files.get(path, (None, ""))[0] != mark:
            self._files[path] = mark, path.read_text(encoding="utf-8").strip()
        text = self._files[path][1]
        if not text:
            raise OSError(f"{path} is empty")
        return text


def pod_credentials(setting: str) -> Credentials:
    """Return the credentials of the pod's ServiceAccount.

    Args:
        setting: the variable with which a user names a kubeconfig instead.

    Raises:
        NoCredentials: they cannot be loaded.
    """
    host, port = (
        os.environ.get("KUBERNETES_SERVICE_HOST"),
        os.environ.get("KUBERNETES_SERVICE_PORT"),
    )
    if not host or not port:
        raise NoCredentials(
            f"not in a pod (no KUBERNETES_SERVICE_HOST); set {setting} to a kubeconfig"
        )
    found = Credentials(
        f"https://{f'[{host}]' if ':' in host else host}:{port}",
        ca_file=ACCOUNT / "ca.crt",
        token_file=ACCOUNT / "token",
    )
    try:
        found.headers()
        found.tls()
    except (OSError, ValueError) as problem:
        raise NoCredentials(
            f"cannot use the pod's ServiceAccount in {ACCOUNT}: {problem}; "
            "set automountServiceAccountToken of the pod to true"
        ) from problem
    return found


def json_credentials(path: Path) -> Credentials:
    """Return the credentials in a kubeconfig in JSON that needs no other file and no program.

    Raises:
        NoCredentials: they cannot be loaded.
    """
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
        found = Credentials(cluster["server"].rstrip("/"))
        if user.get("token"):
            found.authorization = f"Bearer {user['token']}"
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
