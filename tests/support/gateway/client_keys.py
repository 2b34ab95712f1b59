"""Secrets of client keys as the API server gives them, and what a store of them reports."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

from fleetkeeper_contract.client_key_entries import digest_of, new_key
from fleetkeeper_contract.client_keys import KEY_LABEL, KEY_SECRET_TYPE

NAMESPACE = "fleetkeeper-keys"


def key_of(number: int) -> str:
    """Return a well-formed key, the same for the same number."""
    return new_key(number.to_bytes(32, "big"))


def key_entries(key: str, /, **entries: str) -> dict[str, str]:
    """Return the entries of a key's Secret, for namespace team-a if none is given."""
    return {"sha256": digest_of(key), "namespaces": "team-a", **entries}


def key_secret(
    name: str, entries: dict[str, str], *, namespace: str = NAMESPACE, manager: str = ""
) -> dict[str, Any]:
    """Return the Secret with these entries."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "labels": {KEY_LABEL: "true"},
    }
    if manager:
        metadata["managedFields"] = [
            {"manager": "earlier", "time": "2026-01-01T00:00:00Z"},
            {"manager": manager, "time": "2026-01-02T00:00:00Z"},
        ]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": KEY_SECRET_TYPE,
        "metadata": metadata,
        "data": {
            entry: base64.b64encode(value.encode()).decode() for entry, value in entries.items()
        },
    }


@dataclass
class RecordedAudit:
    """An audit log that keeps what it was told."""

    changes: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Key, change, actor."""

    def request(self, **_: object) -> None:
        """Keep nothing: stores report changes only."""

    def change(self, *, key_id: str, change: str, actor: str | None) -> None:
        """Keep a change."""
        self.changes.append((key_id, change, actor))
