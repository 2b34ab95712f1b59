"""The engines' pods, from a watch of pods."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from fleetkeeper_gateway.kubernetes.watch import ObjectName
from fleetkeeper_gateway.usage.lines import Pod

SELECTOR: Final = "app.kubernetes.io/managed-by=fleetkeeper,fleetkeeper.io/component=engine"
"""Label selector of the engines' pods."""
SERVICE_LABEL: Final = "fleetkeeper.io/service"
CONTROL_PORT_NAME: Final = "control"


@dataclass(frozen=True, slots=True)
class Target:
    """An engine whose ledger can be read."""

    pod: Pod
    name: str
    url: str
    """URL of its control port."""
    terminating: bool

    @property
    def service(self) -> str:
        """Return the service as NAMESPACE/NAME."""
        return f"{self.pod.namespace}/{self.pod.service}"


class Follower(Protocol):
    """Reads the engines that it is given."""

    def follow(self, target: Target) -> None:
        """Start to read an engine, or take its changes."""

    def leave(self, uid: str) -> None:
        """Stop reading an engine: its pod is gone or no longer readable."""


class Pods:
    """The reflector's sink for pods."""

    def __init__(self, follower: Follower) -> None:
        self._uids: dict[ObjectName, str] = {}
        """UIDs of the engines that can be read."""
        self._follower = follower

    def put(self, place: ObjectName, found: Mapping[str, Any]) -> None:
        """Follow a pod that is new or changed."""
        target = parse_pod(found)
        if target is None or target.pod.uid != self._uids.get(place):
            self.remove(place)
        if target is not None:
            self._uids[place] = target.pod.uid
            self._follower.follow(target)

    def remove(self, place: ObjectName) -> None:
        """Drop a deleted pod."""
        uid = self._uids.pop(place, None)
        if uid is not None:
            self._follower.leave(uid)

    def listed(self) -> None:
        """Do nothing: every pod is used at once."""


def parse_pod(found: Mapping[str, Any]) -> Target | None:
    """Return the engine of a pod; None if it has no address, no control port, or has ended."""
    try:
        metadata, status = found["metadata"], found["status"]
        address = ipaddress.ip_address(status["podIP"])
        service = metadata["labels"][SERVICE_LABEL]
        port = _control_port(found["spec"])
        name, namespace, uid = metadata["name"], metadata["namespace"], metadata["uid"]
    except (KeyError, TypeError, ValueError):
        return None
    if port is None or status.get("phase") in {"Succeeded", "Failed"}:
        return None
    host = f"[{address}]" if address.version == 6 else str(address)
    return Target(
        Pod(uid, namespace, service),
        name,
        f"http://{host}:{port}",
        terminating="deletionTimestamp" in metadata,
    )


def _control_port(spec: Mapping[str, Any]) -> int | None:
    for container in spec["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == CONTROL_PORT_NAME:
                return int(port["containerPort"])
    return None
