"""A service without requests, and the request that wakes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.demo.fleet import ENGINE, Fleet
from fleetkeeper_local.demo.front_door import FrontDoor

KEY = "demo-asleep"
IDLE_S = 30
NO_PROGRESS_S = 300.0
"""The idle time, and a drain."""
TRIES = 10
"""A start may take longer than the gateway holds a request. Then the client comes back."""


def chapter(door: FrontDoor, fleet: Fleet, say: Callable[[str], None]) -> list[str]:
    """Let the service sleep, wake it by a request through the gateway, and return the report.

    Raises:
        LocalError: it did not go to sleep, or the request got no answer.
    """
    key = door.create_key(KEY, fleet.namespace)
    began = time.monotonic()
    say(f"asleep: spec.scaling.sleep.afterIdleSeconds is {IDLE_S}; no request is sent")
    fall_asleep(fleet)
    lines = [
        f"Without a request, the last replica was gone after {time.monotonic() - began:.0f} s.",
        f"Ready is {fleet.condition('Ready')['status']} ({fleet.condition('Ready')['reason']}).",
    ]
    say("asleep: no replica is left; one request is sent to the gateway")
    asked = time.monotonic()
    tries = ask(door, key, fleet.name)
    again = "" if tries == 1 else f", at try {tries} after 503 with Retry-After"
    lines.append(
        f"The next request woke the service and was answered after {time.monotonic() - asked:.0f} s{again}."
    )
    awake(fleet)  # a service that may no longer sleep does not count the start
    fleet.change({"scaling": {"sleep": None}})
    for line in lines:
        say(f"asleep: {line}")
    return lines


def fall_asleep(fleet: Fleet) -> None:
    """Let a service sleep, and return when its last replica is gone."""
    sleep = {"afterIdleSeconds": IDLE_S, "minAwakeSeconds": 0}
    fleet.change({"replicas": None, "scaling": {"sleep": sleep}})
    fleet.until(lambda: _is_asleep(fleet), "no replica", NO_PROGRESS_S)


def _is_asleep(fleet: Fleet) -> bool:
    state = (fleet.status().get("sleep") or {}).get("state")
    return state == "Asleep" and not fleet.pods(ENGINE)


def awake(fleet: Fleet) -> dict[str, Any]:
    """Return status.sleep once it says that the service is awake."""
    fleet.until(lambda: "state" not in fleet.status()["sleep"], "awake in its status")
    found: dict[str, Any] = fleet.status()["sleep"]
    return found


def ask(door: FrontDoor, key: str, model: str) -> int:
    """Send a request until it is answered, as a client that follows Retry-After; return the tries."""
    for number in range(1, TRIES + 1):
        answer = door.complete(key, model)
        if answer.status == 200:
            return number
        if answer.status != 503:
            break
        time.sleep(float(answer.headers["retry-after"]))
    raise LocalError(f"asleep: status {answer.status}: {answer.body}")
