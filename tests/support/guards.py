"""How long a test waits for an event before it fails."""

from __future__ import annotations

from typing import Final

GUARD_S: Final = 400.0
"""The limit of every wait. Events end a wait, so it only bounds how long a failure takes."""
