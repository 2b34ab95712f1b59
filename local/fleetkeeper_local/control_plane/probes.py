"""Readiness probes of a starting component; each returns at once."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.request
from pathlib import Path
from typing import Any

from fleetkeeper_local.control_plane.pki import Identity

TIMEOUT_S = 5.0


def listens(host: str, port: int) -> bool:
    """Return whether a server accepts connections on this address."""
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT_S):
            return True
    except OSError:
        return False


def client_context(ca_file: Path, identity: Identity | None) -> ssl.SSLContext:
    """Return a TLS context that verifies the server and presents our certificate."""
    context = ssl.create_default_context(cafile=str(ca_file))
    if identity is not None:
        context.load_cert_chain(identity.certificate, identity.key)
    return context


def answers_ok(url: str, context: ssl.SSLContext | None = None) -> bool:
    """Return whether a GET of the URL returns 200."""
    return fetch(url, context) is not None


def fetch(url: str, context: ssl.SSLContext | None = None) -> bytes | None:
    """Return the body of a GET with status 200; None for any other outcome."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as reply:  # noqa: S310 - our own addresses
            body: bytes = reply.read()
            return body if reply.status == http.client.OK else None
    except (OSError, http.client.HTTPException):
        return None


def fetch_json(url: str, context: ssl.SSLContext | None = None) -> Any:  # noqa: ANN401 - any JSON
    """Return the decoded JSON of a GET with status 200, None otherwise."""
    body = fetch(url, context)
    return None if body is None else json.loads(body)
