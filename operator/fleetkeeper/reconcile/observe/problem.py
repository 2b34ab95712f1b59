"""A problem of an object: the reason why it is not ready, and a message with a remedy."""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper.api.conditions import MESSAGE_MAX_LENGTH, Reason


@dataclass(frozen=True, slots=True)
class Problem:
    """The reason why an object is not ready.

    `since` is the time of the problem's start, `terminations` the number of container terminations.
    """

    reason: Reason
    message: str
    since: float | None = None
    terminations: int = 0


def say(what: str, detail: str = "", advice: str = "") -> str:
    """Return a message of at most 256 characters. The detail is cut first, the advice last.

    Worked example: `say("Pod a cannot start", "x" * 400, "Do y.")` keeps both ends and cuts the x.
    """
    what, detail, advice = what.rstrip(". "), " ".join(detail.split()).rstrip("."), advice.strip()
    room = MESSAGE_MAX_LENGTH - len(what) - len(advice) - 6
    if len(detail) > room:
        detail = f"{detail[: room - 3].rstrip()}..." if room > 20 else ""
    text = f"{what}: {detail}." if detail else f"{what}."
    text = text.replace("....", "...")
    return f"{text} {advice}".strip()[:MESSAGE_MAX_LENGTH]
