"""The one error that the local cluster raises for problems that the user can fix."""

from __future__ import annotations


class LocalError(Exception):
    """Something is missing, in the way or broken; the text says what, where, and what to do."""
