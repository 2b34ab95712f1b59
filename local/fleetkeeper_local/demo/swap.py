"""A new revision in the place of the only replica, while the gateway holds requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fleetkeeper_local.demo.asleep import ask
from fleetkeeper_local.demo.cluster import Live
from fleetkeeper_local.demo.fleet import ENGINE, Fleet
from fleetkeeper_local.demo.front_door import FrontDoor

KEY = "demo-swap"
SHORTER = 1024
"""The new spec.engine.maxModelLength, less than that of the examples."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that was answered."""

    took_s: float
    tries: int


def chapter(door: FrontDoor, fleet: Fleet, say: Callable[[str], None]) -> list[str]:
    """Replace the only replica while requests arrive, and return the report.

    Raises:
        LocalError: the replica was not replaced, or a request got no answer.
    """
    key = door.create_key(KEY, fleet.namespace)
    fleet.change({"replicas": 1, "rollout": {"strategy": "Swap"}})
    fleet.await_ready(1)
    say(
        "swap: a changed spec.engine.maxModelLength replaces the only replica, without room for a second one"
    )
    began = time.monotonic()
    sent = swap(door, key, fleet, {"engine": {"maxModelLength": SHORTER}})
    fleet.await_ready(1)
    longest = max(sent, key=lambda request: request.took_s)
    again = "" if longest.tries == 1 else f", at try {longest.tries} after 503 with Retry-After"
    lines = [
        f"rollout.strategy: Swap. The new replica was ready {time.monotonic() - began:.0f} s after the change.",
        f"{len(sent)} requests meanwhile, one after another: all answered.",
        f"The one that waited for the new replica took {longest.took_s:.0f} s{again}.",
    ]
    for line in lines:
        say(f"swap: {line}")
    return lines


def swap(door: FrontDoor, key: str, fleet: Fleet, change: Live) -> list[Sent]:
    """Change the spec, and send requests until the new replica is the only one; return them.

    Raises:
        LocalError: nothing changes anymore, or a request got no answer.
    """
    (old,) = fleet.engines()
    fleet.change(change)
    sent: list[Sent] = []

    def is_swapped() -> bool:
        asked = time.monotonic()
        tries = ask(door, key, fleet.name)
        sent.append(Sent(time.monotonic() - asked, tries))
        pods = fleet.pods(ENGINE)
        is_new = len(pods) == 1 and pods[0].ready and pods[0].uid != old.uid
        return is_new and "state" not in (fleet.status().get("sleep") or {})

    fleet.until(is_swapped, "a new replica")
    return sent
