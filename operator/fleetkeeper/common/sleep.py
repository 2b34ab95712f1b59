"""The sleep of a service as its status holds it, and what decides it.

    awake ──idle──► GoingToSleep ──idle still, read directly──► Asleep ──mark──► Waking ──available──► awake
                        └──mark, or a request──► awake             ▲──────start failed──────┘
    new ──no room for its first start──────────────────────────────┘

    awake ──the only replica is to be replaced──► Swapping ──the new one serves──► awake

`reconcile.sleep` and `reconcile.swap` decide, and the status keeps the result: a new leader continues where the last one ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetkeeper_contract import rfc3339
from fleetkeeper_contract.sleep import KEPT_STARTS, SleepState, WakeMark
from fleetkeeper_contract.tiers import TIER_BY_LABEL, Tier


@dataclass(frozen=True, slots=True)
class Sleep:
    """The content of `status.sleep`. `state` is None while the service is awake."""

    number: int = 0
    state: SleepState | None = None
    since: float = 0.0
    """Time of the last change of the state, also to awake."""
    tier: Tier | None = None
    """While it wakes: the most urgent tier that waits."""
    failures: int = 0
    """Failed starts in a row."""
    message: str = ""
    """Why the last start failed, why it never started, for which service it sleeps, or why it stays awake."""
    never_started: bool = False
    """True if a new service had no room to start, until a start succeeds."""
    start_seconds: tuple[int, ...] = field(default=())
    """Durations of the last starts, oldest first."""

    @property
    def is_asleep(self) -> bool:
        """Return True if the service is to have no replica."""
        return self.state is SleepState.ASLEEP

    @property
    def is_waking(self) -> bool:
        """Return True if the first replica starts."""
        return self.state is SleepState.WAKING

    @property
    def is_swapping(self) -> bool:
        """Return True if the only replica is replaced."""
        return self.state is SleepState.SWAPPING

    @property
    def shown_state(self) -> str:
        """Return the state in one word for people, "" while the service is awake."""
        if self.is_asleep and self.never_started:
            return "NeverStarted"
        return self.state.value if self.state is not None else ""

    def to_status(self) -> dict[str, Any]:
        """Return `status.sleep`, empty if it never slept or swapped and nothing is to be said."""
        found: dict[str, Any] = {
            "state": self.state and self.state.value,
            "since": rfc3339.format(self.since) if self.since else None,
            "tier": None if self.tier is None else self.tier.label,
            "failures": self.failures or None,
            "message": self.message or None,
            "neverStarted": self.never_started or None,
            "startSeconds": list(self.start_seconds) or None,
        }
        found = {key: value for key, value in found.items() if value is not None}
        return {"number": self.number, **found} if found or self.number else {}


NEVER_SLEPT = Sleep()
_STATES = {state.value: state for state in SleepState}


@dataclass(frozen=True, slots=True)
class Idle:
    """What the control loop knows of the last request of a service.

    `is_idle` is True if every pod was read directly, none had a request for `afterIdleSeconds`, and nothing
    else forbids sleep. `read_at` is the time of the oldest of these reads. Anything unknown is not idle.
    `sleeps_for` names the service that needs its accelerators: then a shorter time without a request is
    enough, also within `minAwakeSeconds`.
    """

    is_idle: bool = False
    read_at: float = 0.0
    sleeps_for: str = ""


NOT_IDLE = Idle()


@dataclass(frozen=True, slots=True)
class Wake:
    """The wake marks of one service.

    `can_wake` is True if the marks are read now and a gateway has shown that it can hold requests. Without
    it no service goes to sleep.
    """

    can_wake: bool = False
    mark: WakeMark | None = None


NO_WAKE = Wake()


def parse_sleep(status: Mapping[str, Any]) -> Sleep:
    """Parse `status.sleep`. What cannot be read is absent: the service then counts as awake."""
    part = status.get("sleep")
    if not isinstance(part, Mapping):
        return NEVER_SLEPT
    starts = part.get("startSeconds")
    return Sleep(
        number=_whole(part.get("number")),
        state=_STATES.get(str(part.get("state"))),
        since=rfc3339.parse(part.get("since")) or 0.0,
        tier=TIER_BY_LABEL.get(str(part.get("tier"))),
        failures=_whole(part.get("failures")),
        message=str(part.get("message") or ""),
        never_started=part.get("neverStarted") is True,
        start_seconds=tuple(map(_whole, starts))[-KEPT_STARTS:] if isinstance(starts, list) else (),
    )


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
