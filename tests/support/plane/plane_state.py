"""How a control plane stands, in a few lines, and its mending.

A part of it that ended is no fault of what is tested: it is started again, and the run's last lines tell it.
"""

from __future__ import annotations

import json
from typing import Any

from fleetkeeper_local.control_plane.control_plane import ControlPlane

MENDED: list[str] = []
"""How control planes of this process stood when a part of them had ended."""
MAKERS = ("kube-controller-manager", "kube-scheduler", "kwok")
"""Each has its part in making a pod Ready."""
MAX_PODS = 12
TAIL_LINES = 5


def mend(plane: ControlPlane) -> bool:
    """Starts again what has ended; False where nothing had. For the thread that started the plane."""
    if not plane.processes.ended():
        return False
    MENDED.append(state_of(plane))
    plane.start()
    return True


def state_of(plane: ControlPlane) -> str:
    """Components that ended, with the end of their logs; nodes; pods that are not Ready, and why."""
    lines = [f"components: {', '.join(plane.processes.names())}"]
    for name in plane.processes.ended():
        lines += [f"ENDED: {name}", plane.processes.log_tail(name, TAIL_LINES)]
    nodes = (plane.get("/api/v1/nodes") or {}).get("items")
    pods = (plane.get("/api/v1/pods") or {}).get("items")
    if nodes is None or pods is None:
        return "\n".join([*lines, "the API server does not answer"])
    ready = sum(_condition(node, "Ready").get("status") == "True" for node in nodes)
    lines.append(f"nodes: {ready} of {len(nodes)} Ready")
    waiting = [pod for pod in pods if _condition(pod, "Ready").get("status") != "True"]
    lines.append(f"pods: {len(pods) - len(waiting)} of {len(pods)} Ready")
    lines += map(_line, waiting[:MAX_PODS])
    if waiting:
        for name in MAKERS:
            lines += [f"last of {name}:", plane.processes.log_tail(name, TAIL_LINES)]
    return "\n".join(lines)


def claim_namespace(plane: ControlPlane, name: str) -> None:
    """Create a namespace, once one of that name that an earlier test deleted is gone."""
    phase = plane.kubectl(
        "get", "namespace", name, "--ignore-not-found", "-o", "jsonpath={.status.phase}"
    )
    if phase == "Terminating":
        plane.kubectl("wait", "--for=delete", f"namespace/{name}", "--timeout=300s")
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    plane.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(space))


def _line(pod: dict[str, Any]) -> str:
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    scheduled = _condition(pod, "PodScheduled")
    where = pod["spec"].get("nodeName") or f"no node: {scheduled.get('message', 'not looked at')}"
    ending = " is being deleted," if pod["metadata"].get("deletionTimestamp") else ""
    return f"  {name}:{ending} {pod['status'].get('phase')}, {where}"


def _condition(live: dict[str, Any], kind: str) -> dict[str, Any]:
    conditions = live["status"].get("conditions", ())
    return next((found for found in conditions if found["type"] == kind), {})
