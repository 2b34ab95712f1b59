"""Conversion of times from and to the format of Kubernetes (RFC 3339)."""

from __future__ import annotations

from datetime import UTC, datetime


def format(moment: float) -> str:  # noqa: A001 - called as rfc3339.format
    """Format seconds since the epoch with whole seconds in UTC.

    Worked example: 1767225600.9 is "2026-01-01T00:00:00Z".
    """
    return datetime.fromtimestamp(int(moment), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse(text: object) -> float | None:
    """Return the seconds since the epoch; None for anything that is not such a time.

    Other clients' times may have fractions of a second and another offset than UTC. A time without an
    offset is no moment: its meaning would depend on this machine's zone. Nor is one outside the years
    1 to 9999 in UTC, which `format` could not write.
    """
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
        return None if moment.tzinfo is None else moment.astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        return None
