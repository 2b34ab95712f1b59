"""The engines' pods, from the watch of pods."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fleetkeeper_gateway.usage.lines import Pod

SELECTOR: Final = "app.kubernetes.io/managed-by=fleetkeeper,fleetkeeper.io/component=engine"
"""Labels that the operator gives to engines' pods."""
SERVICE_LABEL: Final = "fleetkeeper.io/service"
CONTROL_PORT_NAME: Final = "control"

Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Target:
    """An engine that can be asked."""

    pod: Pod
    name: str
    url: str
    """Of its control port."""
    terminating: bool


class Pods:
    """A sink of the watch."""

    def __init__(self, on_end: Callable[[Target], None] = lambda _: None) -> None:
        self._targets: dict[Place, Target] = {}
        self._on_end = on_end
        """Called when a pod begins to terminate."""

    @property
    def targets(self) -> list[Target]:
        """Return the engines that have an address."""
        return list(self._targets.values())

    def put(self, place: Place, found: Mapping[str, Any]) -> None:
        """Store a pod that is new or changed."""
        target = parse_pod(found)
        before = self._targets.get(place)
        if target is None:
            self._targets.pop(place, None)
            return
        self._targets[place] = target
        if target.terminating and not (before is not None and before.terminating):
            self._on_end(target)

    def remove(self, place: Place) -> None:
        """Forget a pod that is gone."""
        self._targets.pop(place, None)

    def listed(self) -> None:
        """Do nothing: what is known is used at once."""


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
