"""The words of sleep that operator and gateway share: states, wake marks, and how long a start takes.

The operator alone changes replicas. It counts the sleeps of a service in `status.sleep.number`. A gateway
with a request for a sleeping service writes a wake mark into one ConfigMap: the key is the UID of the
service, the value the number of the sleep that it ends and the most urgent tier that waits. A mark counts
only while its number is the present one, so neither an old mark nor a late one can undo a newer decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple

from fleetkeeper_contract.tiers import TIER_BY_LABEL, Tier

GATEWAY_KEY: Final = "gateway"
"""Key of the ConfigMap that a gateway writes which can hold requests. Without it no service goes to sleep."""
GATEWAY_VALUE: Final = "holds"
MAX_MARKS: Final = 4096
"""Maximum number of marks in the ConfigMap."""
WAKE_HEADER: Final = "X-Fleetkeeper-Wake"
"""Header of a batch request that wakes its service: its deadline is near, or its service always wakes."""
MAX_NUMBER: Final = 1_000_000_000
KEPT_STARTS: Final = 10
"""Starts of which `status.sleep.startSeconds` holds the durations."""
MAX_RETRY_AFTER_S: Final = 60
UNKNOWN_START_S: Final = 30
"""`Retry-After` of a service that never woke."""


class SleepState(StrEnum):
    """The state of a service that is not awake."""

    GOING_TO_SLEEP = "GoingToSleep"
    """The pods still run. Gateways hold requests and mark."""
    ASLEEP = "Asleep"
    WAKING = "Waking"
    SWAPPING = "Swapping"
    """The only replica is replaced. Gateways hold requests that no replica takes."""


class WakeMark(NamedTuple):
    """The request of a gateway to end one sleep of a service."""

    number: int
    """Number of the sleep."""
    tier: Tier
    """The most urgent tier that waits."""


def format_mark(mark: WakeMark) -> str:
    """Return the value of a mark in the ConfigMap, for example `7.realtime`."""
    return f"{mark.number}.{mark.tier.label}"


def parse_mark(text: object) -> WakeMark | None:
    """Parse the value of a mark; None if it is none. Any client with the right may have written it."""
    if not isinstance(text, str) or len(text) > 32:
        return None
    number, _, label = text.partition(".")
    tier = TIER_BY_LABEL.get(label)
    if tier is None or not (number.isascii() and number.isdigit()):
        return None
    return WakeMark(int(number), tier) if 0 < int(number) <= MAX_NUMBER else None


def start_p90_s(starts: Iterable[int]) -> int | None:
    """Return the 90th percentile of starts in seconds (nearest rank); None without any.

    Worked example: of the starts 20, 30 and 40 it is 40.
    """
    found = sorted(starts)
    return found[math.ceil(0.9 * len(found)) - 1] if found else None


def retry_after_s(starts: Iterable[int], passed_s: float) -> int:
    """Return the `Retry-After` of a service that starts: the 90th percentile of its starts less what has passed.

    Worked example: of the starts 20, 30 and 40, 9 of 10 take at most 40 s. 15 s after the service began
    to wake, the client is to wait for 25 s.
    """
    start_s = start_p90_s(starts)
    if start_s is None:
        return UNKNOWN_START_S
    return max(1, min(MAX_RETRY_AFTER_S, math.ceil(start_s - passed_s)))
