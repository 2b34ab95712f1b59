"""Self-contained kubeconfig files, which can be copied anywhere."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import yaml

from fleetkeeper_local.pki import Identity


def write_kubeconfig(
    path: Path, server: str, ca_file: Path, user: str, credentials: Identity | str
) -> Path:
    """Write a kubeconfig (mode 0600) for one user and one cluster and return its path.

    Args:
        path: the file to write.
        server: `https://HOST:PORT`.
        ca_file: the certificate of the authority that signed the server's certificate.
        user: the user's name in the file.
        credentials: a client certificate, or a bearer token.
    """
    if isinstance(credentials, Identity):
        login = {
            "client-certificate-data": _encoded(credentials.certificate),
            "client-key-data": _encoded(credentials.key),
        }
    else:
        login = {"token": credentials}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "fleetkeeper-local",
                "cluster": {"server": server, "certificate-authority-data": _encoded(ca_file)},
            }
        ],
        "users": [{"name": user, "user": login}],
        "contexts": [
            {
                "name": "fleetkeeper-local",
                "context": {"cluster": "fleetkeeper-local", "user": user},
            }
        ],
        "current-context": "fleetkeeper-local",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
        yaml.safe_dump(document, handle, sort_keys=False)
    draft.replace(path)
    return path


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
