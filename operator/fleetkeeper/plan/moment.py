"""Conversion of times from and to the format of Kubernetes."""

from __future__ import annotations

from datetime import UTC, datetime


def text_of_time(moment: float) -> str:
    """Format seconds since the epoch as RFC 3339 with whole seconds in UTC.

    Worked example: 1767225600.9 is "2026-01-01T00:00:00Z".
    """
    return datetime.fromtimestamp(int(moment), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment_of_text(text: str) -> float | None:
    """Return the seconds since the epoch of a `text_of_time`, None for any other text."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
