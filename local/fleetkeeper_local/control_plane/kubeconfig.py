"""Self-contained kubeconfig files, which can be copied anywhere."""

from __future__ import annotations

import base64
from pathlib import Path

import yaml

from fleetkeeper_local.common.files import write_file
from fleetkeeper_local.control_plane.pki import Identity


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
    write_file(path, yaml.safe_dump(document, sort_keys=False), 0o600)
    return path


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
