"""The one error that the local cluster raises for what a person can mend."""

from __future__ import annotations


class LocalError(Exception):
    """Something is missing, in the way or broken; the text says what, where and what to do."""
