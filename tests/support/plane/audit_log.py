"""What the operator asked of the API server, from the API server's audit log."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fleetkeeper_local.control_plane.control_plane import ControlPlane

WRITE_VERBS = {"create", "update", "patch", "delete", "deletecollection"}


@dataclass(frozen=True)
class Request:
    """A request as the audit log has it."""

    verb: str
    resource: str
    namespace: str
    name: str
    code: int


def audited_requests(plane: ControlPlane, user: str, since: int = 0) -> list[Request]:
    """Return a user's requests since an offset in the log, without watches, leases and discovery."""
    with plane.audit_log.open("rb") as lines:
        lines.seek(since)
        data = lines.read()
    found = []
    mentioned = json.dumps(user).encode()  # the others' lines, most of them, are not decoded
    for line in data.splitlines():
        if mentioned not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the last line may be half written
        if event["user"].get("username") != user or event["stage"] != "ResponseComplete":
            continue
        reference = event.get("objectRef") or {}
        resource = "/".join(
            part
            for part in (reference.get("resource", ""), reference.get("subresource", ""))
            if part
        )
        if event["verb"] == "watch" or resource == "leases":
            continue
        if not resource:
            continue  # discovery and OpenAPI
        found.append(
            Request(
                event["verb"],
                resource,
                reference.get("namespace", ""),
                reference.get("name", ""),
                event["responseStatus"]["code"],
            )
        )
    return found
